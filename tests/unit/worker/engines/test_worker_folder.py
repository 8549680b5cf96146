"""What all engines read of a model's folder, and how they say that it can't be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout_common.wire.root_hash import LEAF_BYTES
from rollout_worker.engine import EngineError, TensorEntry, TensorSpec
from rollout_worker.engines.model_folder import (
    checkpoint_dtype,
    decode_tokens,
    has_redundant_head,
    load_tokenizer,
    read_config,
    read_eos_ids,
    resolve_max_length,
)
from rollout_worker.engines.shared_memory.tensor_views import TORCH_DTYPES
from rollout_worker.sources.checkpoint_files import open_source


@pytest.mark.parametrize(
    ("generation", "own", "expected"),
    [
        ({"eos_token_id": 7}, 5, {7}),
        ({"eos_token_id": [7, 0]}, None, {7, 0}),
        ({"eos_token_id": []}, 5, set()),
        ({"eos_token_id": None}, 5, {5}),
        ({}, [5, 6], {5, 6}),
        (None, 5, {5}),
        (None, None, set()),
    ],
)
def test_eos_ids(tmp_path: Path, generation: Any, own: object, expected: set[int]) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_ids(tmp_path, own) == expected


def test_eos_ids_that_the_vocabulary_lacks_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_eos_ids(tmp_path, [1, 50256, -1], 128) == {1}
    assert "its vocabulary has 128 tokens" in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not JSON", r"generation_config.json' cannot be read: .*; repair or remove it"),
        ("[2]", r"generation_config.json' holds no JSON object: repair or remove it"),
        ('{"eos_token_id": "</s>"}', r"is '</s>': it must be a token id or a list of them"),
        ('{"eos_token_id": [2, true]}', r"is \[2, True\]: it must be a token id"),
    ],
)
def test_a_broken_generation_config_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(EngineError, match=said):
        read_eos_ids(tmp_path, 5)


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"holds no config.json: point to a model folder"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match=r"config.json' cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    assert read_config(tmp_path) == {"vocab_size": 5}


def test_the_maximum_length_is_asked_for_or_known() -> None:
    assert resolve_max_length(None, 2048) == 2048
    assert resolve_max_length(512, 2048) == resolve_max_length(512, None) == 512
    with pytest.raises(EngineError, match="names no maximum length"):
        resolve_max_length(None, None)
    with pytest.raises(EngineError, match="2049 is above the model's 2048"):
        resolve_max_length(2049, 2048)


def test_a_tokenizer_is_none_or_whole(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(EngineError, match="holds no tokenizer: token ids only"):
        decode_tokens(None, [1], special=True)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(EngineError, match=r"cannot be loaded: .*; repair its files"):
        load_tokenizer(tmp_path)


def test_the_dtype_of_a_quantised_checkpoint_is_not_that_of_its_scales() -> None:
    """An fp8 model: a float32 scale for each weight, and bfloat16 where it is not quantised."""
    specs = [("F8_E4M3", (64, 64)), ("F32", (1, 1))] * 9 + [("BF16", (128, 64))]
    entries = [TensorEntry(f"t{n}", TensorSpec(*spec)) for n, spec in enumerate(specs)]
    assert checkpoint_dtype(entries) == "bfloat16"


def test_every_quantised_dtype_of_a_checkpoint_has_its_torch_dtype() -> None:
    for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0"):
        assert TORCH_DTYPES[name].itemsize == TensorSpec(name, (1,)).nbytes


@pytest.mark.parametrize(("head", "redundant"), [("equal", True), ("other", False), (None, False)])
def test_a_head_that_is_the_embedding_once_more_is_found(
    tmp_path: Path, head: str | None, redundant: bool
) -> None:
    embedding = torch.arange(3 * LEAF_BYTES // 4 + 5, dtype=torch.int32).reshape(1, -1)
    tensors = {"model.embed_tokens.weight": embedding}
    if head is not None:
        tensors["lm_head.weight"] = embedding.clone()
        tensors["lm_head.weight"][0, -1] += head == "other"
    save_file(tensors, tmp_path / "model.safetensors")
    assert has_redundant_head(open_source(tmp_path), lambda: False) is redundant
