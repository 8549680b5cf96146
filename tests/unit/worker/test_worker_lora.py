"""What a worker believes of adapters that it is sent: names, shapes, configurations; and PEFT's folders."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rollout_common.wire.adapters import (
    CONFIG_KEY,
    AdapterConfig,
    AdapterRefused,
    entry_name,
    split_entry,
    split_key,
    tensor_key,
)
from rollout_worker.engine import (
    EngineError,
    TensorEntry,
    TensorSpec,
    WeightsLayout,
    WeightsRejected,
)
from rollout_worker.engines.hf.lora_layers import HfAdapter, LoraLayers
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.lora.lora_sink import LoraSink
from rollout_worker.sources.checkpoint_files import open_source
from rollout_worker.weights import check_layout

MODULE = "model.layers.0.mlp.up_proj"
LAYOUT = WeightsLayout(
    {f"{MODULE}.weight": TensorSpec("BF16", (6, 4)), "norm.weight": TensorSpec("BF16", (4,))},
    {},
    {},
)
CONFIG = AdapterConfig(2, 4.0).encode()


def adapter(name: str = "a", module: str = MODULE, **changed: TensorSpec) -> list[TensorEntry]:
    """The entries of a good adapter of rank 2, but for what is changed."""
    specs = {
        "lora_A": TensorSpec("F32", (2, 4)),
        "lora_B": TensorSpec("F32", (6, 2)),
        "config": TensorSpec("U8", (len(CONFIG),)),
        **changed,
    }
    keys = {half: tensor_key(module, half) for half in ("lora_A", "lora_B")} | {
        "config": CONFIG_KEY
    }
    return [TensorEntry(entry_name(name, keys[half]), spec) for half, spec in specs.items()]


def test_good_ones_pass_alone_and_together() -> None:
    check_layout(LAYOUT, adapter(), "here")
    check_layout(LAYOUT, [*adapter("a"), *adapter("b")], "here")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (adapter(lora_A=TensorSpec("F32", (2, 5))), r"must be \[2, 4\]"),
        (adapter(lora_B=TensorSpec("F32", (6, 3))), r"must be \[6, 2\]"),
        (adapter(lora_A=TensorSpec("F32", ())), "must be"),
        (adapter(lora_A=TensorSpec("I8", (2, 4))), "use BF16, F16, F32"),
        (adapter(lora_A=TensorSpec("F32", (2000, 4))), "at most 1024"),
        (adapter(config=TensorSpec("F32", (8,))), CONFIG_KEY),
        (adapter(config=TensorSpec("U8", (1 << 20,))), CONFIG_KEY),
        (adapter(module="model.layers.0.mlp.gate"), "no such linear layer"),
        (adapter(module="norm"), "no such linear layer"),
        (adapter()[1:], "both lora_A and lora_B"),
        (adapter()[:2], CONFIG_KEY),
        (adapter()[2:], "no tensors"),
        (adapter("..bad/name"), "names no adapter"),
        ([*adapter(), TensorEntry("norm.weight", TensorSpec("BF16", (4,)))], "not both"),
        ([e for n in range(65) for e in adapter(f"a{n}")], "at most 64"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(entries: list[TensorEntry], said: str) -> None:
    with pytest.raises(WeightsRejected, match=said):
        check_layout(LAYOUT, entries, "here")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = ("r", "lora_alpha", "bias", "use_dora", "use_rslora", "rank_pattern", "base_root_hash")


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_configuration_is_refused_or_means_the_same_again(fields: dict[str, Any]) -> None:
    given = {"r": 8, "lora_alpha": 16, **fields}
    try:
        config = AdapterConfig.decode(json.dumps(given).encode())
    except AdapterRefused:
        return
    assert 0 < config.scaling < math.inf
    assert AdapterConfig.decode(config.encode()) == config


@given(st.binary(max_size=64) | st.just(b"[" * 20000) | st.just(b"1" * 70000))
def test_bytes_that_say_nothing_are_refused(content: bytes) -> None:
    with pytest.raises(AdapterRefused):
        AdapterConfig.decode(content)


@given(st.text(max_size=80))
def test_any_name_is_refused_or_stays_below_its_adapter(name: str) -> None:
    try:
        adapter_name, _ = split_entry(f"adapters/{name}")
    except AdapterRefused:
        return
    assert "/" not in adapter_name
    assert not adapter_name.startswith(".")


@pytest.mark.parametrize(
    "key",
    [
        f"base_model.model.{MODULE}.lora_A.weight",
        f"base_model.model.{MODULE}.lora_A.default.weight",
        f"{MODULE}.lora_A.weight",
    ],
)
def test_peft_s_names_name_the_module(key: str) -> None:
    assert split_key(key) == (MODULE, "lora_A")


def filled(base: str = "x", config: bytes = CONFIG, load: Any = lambda adapters: "it") -> LoraSink:
    entries = adapter(config=TensorSpec("U8", (len(config),)))
    gone: list[Any] = []
    claim = StagingBudget(1000).claim_memory
    sink = LoraSink(entries, base, load, gone.append, claim)
    for entry in entries:
        with sink.allocate(entry) as place:
            if entry.name.endswith(CONFIG_KEY):
                place[:] = config
    sink.gone = gone  # type: ignore[attr-defined]
    return sink


def test_what_the_engine_loaded_is_given_up_with_the_slot_unless_it_serves() -> None:
    sink = filled()
    sink.seal()
    [found] = sink.adapters
    assert (found.name, found.config.scaling, [*found.pairs]) == ("a", 2.0, [MODULE])
    sink.close()
    sink.close()
    assert sink.gone == ["it"]  # type: ignore[attr-defined]
    served = filled()
    served.seal()
    served.loaded = None
    served.close()
    assert served.gone == []  # type: ignore[attr-defined]


def test_adapters_count_as_staged_until_their_slot_is_closed() -> None:
    entries, staging = adapter(), StagingBudget(200)
    nbytes = sum(each.spec.nbytes for each in entries)
    assert 100 < nbytes <= 200, "one has room, and no two"

    def open_sink() -> LoraSink:
        return LoraSink(entries, "x", list, print, staging.claim_memory)

    sink = open_sink()
    with pytest.raises(EngineError, match="stagingMemory"):
        open_sink()
    sink.close()
    open_sink()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (AdapterConfig(3, 4.0).encode(), "rank 2"),
        (AdapterConfig(2, 4.0, False, "other").encode(), "root_hash other"),
        (b"{}", "r is None"),
        *(
            (json.dumps({"r": 2, "lora_alpha": 4, field: value}).encode(), field)
            for field, value in (
                *(("lora_alpha", 0), ("bias", "all"), ("use_dora", True)),
                ("rank_pattern", {"q_proj": 4}),
            )
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(config: bytes, said: str) -> None:
    with pytest.raises(WeightsRejected, match=said):
        filled(config=config).seal()


def write_folder(folder: Path, config: Any = None, tensors: bool = True) -> Path:
    """A folder as PEFT writes it, of zeros."""
    folder.mkdir(parents=True)
    body = {"r": 2, "lora_alpha": 4} if config is None else config
    (folder / CONFIG_KEY).write_text(body if isinstance(body, str) else json.dumps(body))
    header: dict[str, Any] = {}
    end = 0
    for half, shape in (("lora_A", (2, 4)), ("lora_B", (6, 2))):
        begin, end = end, end + 4 * math.prod(shape)
        header[tensor_key(MODULE, half)] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    if tensors:
        content = struct.pack("<Q", len(text)) + text + bytes(end)
        (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def test_a_folder_holds_one_adapter_or_several(tmp_path: Path) -> None:
    home = write_folder(tmp_path / "home")
    write_folder(home / "other")
    names = {split_entry(entry.name)[0] for entry in open_source(home).entries}
    assert names == {"default", "other"}
    check_layout(LAYOUT, open_source(home).entries, "here")
    below = tmp_path / "below"
    write_folder(below / "one")
    assert {split_entry(entry.name)[0] for entry in open_source(below).entries} == {"one"}


def test_a_folder_that_lacks_something_is_refused(tmp_path: Path) -> None:
    for name, folder, said in (
        ("text", write_folder(tmp_path / "text", "{"), "not JSON"),
        ("bare", write_folder(tmp_path / "bare", tensors=False), "adapter_model.safetensors"),
        ("kind", write_folder(tmp_path / "kind", {"peft_type": "IA3"}), "only LoRA"),
    ):
        with pytest.raises(WeightsRejected, match=said):
            open_source(folder)
        assert name in str(folder)


def test_links_out_of_the_volume_are_refused(tmp_path: Path) -> None:
    outside = write_folder(tmp_path / "outside")
    home = tmp_path / "volume" / "v1"
    home.mkdir(parents=True)
    for name in (CONFIG_KEY, "adapter_model.safetensors"):
        (home / name).symlink_to(outside / name)
    with pytest.raises(WeightsRejected, match="leads out"):
        open_source(home, roots=[tmp_path / "volume"])


class SharedExpert(nn.Module):
    """A model of one layer that an adapter may change."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 4, bias=False)

    def get_decoder(self) -> nn.Module:
        return self


@pytest.mark.parametrize("shape", [(5, 3), (1, 5, 3)], ids=["flattened", "as a batch"])
def test_each_token_gets_its_own_adapter_in_either_shape(shape: tuple[int, ...]) -> None:
    """Mixtures flatten the tokens for an expert that all of them pass."""
    model, a, b = SharedExpert(), torch.randn(2, 3), torch.randn(4, 2)
    layers, adapter = LoraLayers(model), HfAdapter("a", 0.5, {"shared": (a, b)})
    layers.prepare_layers({"a": adapter})
    layers.segments = [(1, 3, adapter)]
    tokens = torch.randn(5, 3)
    with torch.no_grad():
        expected = tokens @ model.shared.weight.T
        expected[1:3] += tokens[1:3] @ a.T @ b.T * 0.5
        made = model.shared(tokens.reshape(shape))
    assert made.shape == (*shape[:-1], 4)
    assert torch.allclose(made.reshape(5, 4), expected, atol=1e-6)
