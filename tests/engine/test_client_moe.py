"""Models whose experts transformers 5 holds fused, published as models: what arrives, and what a worker makes of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rollout_client import PublishFailed, RolloutPool, whole_tensors
from rollout_client.steering import checkpoint_form
from rollout_client.steering.checkpoint_form import Unfused, state_of
from rollout_common.transfer.layout import LayoutError
from rollout_worker.sources.checkpoint_files import write_manifest
from tests.support.engine import moe_rank
from tests.support.engine.reference import Reference
from tests.support.engine.workers import InProcess, in_process, ports_of
from tests.support.unit.ranks import ranks

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
SMALL = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
HEADS = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**SMALL, "num_experts": 4, "head_dim": 8},
    "Mixtral": {"num_local_experts": 4},
    "DeepseekV3": {
        **SMALL,
        **HEADS,
        "qk_nope_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
PROMPT = [5, 6, 7, 8, 9, 100]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def model_of(kind: str, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**COMMON, **MODELS[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def loaded(folder: Path) -> Any:
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder)).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    model_of("Qwen3Moe").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> Iterator[InProcess]:
    # A socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="moe-") as short:
        flags = "--weights-port", "0", "--weights-socket", f"{short}/sock"
        with in_process(checkpoint, *flags) as worker:
            yield worker


@pytest.fixture
def pool(worker: InProcess) -> Iterator[RolloutPool]:
    with RolloutPool.from_urls(**ports_of([worker])) as pool:
        pool.acquire()
        yield pool


@torch.no_grad()
def stepped(model: Any, size: float) -> Any:
    """As an optimizer would change it."""
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter += size * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_a_state_is_as_save_pretrained_writes_it(kind: str, tmp_path: Path) -> None:
    made = model_of(kind)
    made.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for model in (made, loaded(tmp_path)):
        state = state_of(model)
        assert isinstance(state, Unfused)
        assert sorted(state) == sorted(written)
        assert all(torch.equal(state[name], written[name]) for name in sorted(written))
        assert dict(whole_tensors(model)).keys() == written.keys()
        # What is held as it is written is given as it is, and of the rest no more than one layer is there.
        assert state["model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()
        assert state._last is not None
        assert len(state._last[1]) < len(state.made)


def test_a_state_that_needs_nothing_is_given_as_it_is(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(**COMMON)
    model = transformers.Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path)
    for each in (model, loaded(tmp_path)):
        assert type(state_of(each)) is type(each.state_dict())
    stream = iter(model.state_dict().items())
    assert state_of(stream) is stream


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_published_model_makes_the_tokens_that_transformers_makes(
    pool: RolloutPool, worker: InProcess, checkpoint: Path, tmp_path: Path, transport: Any
) -> None:
    model = loaded(checkpoint)
    before = None
    for version in (1, 2):  # by TCP the second one goes as what differs
        stepped(model, 0.1).save_pretrained(tmp_path / str(version))
        pool.publish_weights(version, tensors=model, transport=transport)
        tokens = pool.generate(PROMPT, sampling=GREEDY).token_ids
        assert list(tokens) == Reference(tmp_path / str(version)).greedy(PROMPT, 12)
        assert tokens != before
        before = tokens
    done = pool.publish_weights(3, tensors=model.double(), cast=True, transport=transport)
    assert pool.generate(PROMPT, sampling=GREEDY).token_ids == tokens
    for level in (1, 2):
        worker.control.post("/v1/sleep", json={"level": level})
        worker.control.post("/v1/wake")
        assert pool.generate(PROMPT, sampling=GREEDY).token_ids == tokens
    files = pool.save_and_publish(model.float(), 4, tmp_path / "versions")
    assert files.root_hash == done.root_hash
    assert pool.generate(PROMPT, sampling=GREEDY).token_ids == tokens


def test_without_transformers_reversal_fused_experts_are_refused_with_the_fix() -> None:
    plain = {"model.layers.0.mlp.experts.0.down_proj.weight": torch.ones(1)}
    assert checkpoint_form._unfused_already(plain) is plain
    fused = {"model.layers.0.mlp.experts.down_proj": torch.ones(1)}
    with pytest.raises(LayoutError, match=r"'model\.layers\.0.*no revert_weight_conversion"):
        checkpoint_form._unfused_already(fused)


def test_ranks_that_fsdp_has_given_shards_publish_it_together(
    pool: RolloutPool, worker: InProcess, checkpoint: Path, tmp_path: Path
) -> None:
    stepped(loaded(checkpoint), 0.3).save_pretrained(tmp_path / "model")
    story = {"model": str(tmp_path / "model"), "url": worker.url, "control": worker.control_url}
    with ranks(moe_rank.main, 2, tmp_path, json.dumps(story)) as started:
        for rank in started:
            assert rank.status(120) == 0, rank.said
    roots = {(tmp_path / f"root-{rank}").read_text() for rank in range(2)}
    assert roots == {write_manifest(tmp_path / "model")}
    tokens = pool.generate(PROMPT, sampling=GREEDY).token_ids
    assert list(tokens) == Reference(tmp_path / "model").greedy(PROMPT, 12)


def test_its_state_dict_is_refused_with_what_to_give_instead(
    pool: RolloutPool, checkpoint: Path
) -> None:
    model = loaded(checkpoint)
    with pytest.raises(PublishFailed, match=r"experts\.down_proj.*: publish the model of transf"):
        pool.publish_weights(5, tensors=model.state_dict())
    wrapped = {f"module.{name}": tensor for name, tensor in whole_tensors(model)}
    with pytest.raises(PublishFailed, match=r"is there: publish without the prefix 'module\.'"):
        pool.publish_weights(5, tensors=wrapped)
