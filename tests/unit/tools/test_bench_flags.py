"""Our worker's engine and the engine's own server run with the same settings in comparisons."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).resolve().parents[3]))

from bench.rigs import vllm_weights
from bench.rigs.servers import ONLY_OURS, SGLANG, VLLM, VLLM_CACHE_BYTES, VLLM_FLAGS, Side
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.sglang import model as sglang_model
from rollout_worker.engines.sglang import settings as sglang_settings
from rollout_worker.engines.vllm import launch
from rollout_worker.engines.vllm.settings import VllmSettings
from rollout_worker.settings import add_flags, parse_settings

LISTENING = {"--host", "--port"}
FRONTEND = {*LISTENING, "--enable-scale-out", "--uvicorn-log-level"}
"""What only vLLM's HTTP server has: where it listens, its route for token ids, its log."""
OFF_BY_DEFAULT = {"enable_sleep_mode", "disable_log_stats"}
"""What vLLM leaves off unless it is asked for."""


def model_folder(folder: Path) -> Path:
    """The least that is read of a model before its engine starts."""
    config = {"vocab_size": 5, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"lm_head.weight": torch.zeros(5, 2)}, folder / "model.safetensors")
    return folder


def options_of(side: Side, model: Path, dtype: str) -> EngineOptions:
    """What our worker's command line tells its engine."""
    words = list(side.words(model, dtype, 8000))
    assert words[:3] == ["-m", "rollout_worker", "serve"]
    parser = argparse.ArgumentParser()
    add_flags(parser)
    settings = parse_settings(parser.parse_args(words[3:]), {})
    return EngineOptions(
        model=model,
        dtype=settings.dtype,
        max_length=settings.max_length,
        device=settings.device,
        max_batch_tokens=settings.max_batch_tokens,
        logprobs=settings.logprobs,
        args=settings.engine_arg,
    )


def flags(words: Sequence[str]) -> dict[str, str]:
    """Flags and their values; one that is given twice would be a mistake of ours."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            assert name not in found, f"{name} is given twice"
            found[name] = value
        else:
            found[name] = word
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sglangs_server_gets_the_flags_of_our_child(tmp_path: Path, dtype: str) -> None:
    model = model_folder(tmp_path)
    options = options_of(SGLANG.ours, model, dtype)
    known = sglang_settings.parse_flags(options.args)
    read = sglang_model.read_model(options)
    ours = flags(sglang_settings.child_flags(options, known, read, cpu=True))
    # The child adds this one by itself wherever the benchmark can run.
    ours["--enable-memory-saver"] = ""
    theirs = flags(SGLANG.theirs.words(model, dtype, 8001)[2:])
    assert theirs["--batch-notify-size"] == str(sglang_settings.BATCH_NOTIFY_SIZE)
    assert ours.pop(ONLY_OURS).startswith("rollout_worker.")
    assert {name: value for name, value in theirs.items() if name not in LISTENING} == ours


def test_sglangs_server_gets_the_environment_of_our_child() -> None:
    assert (
        sglang_settings.child_environment(EngineOptions(model=Path()), cpu=True).items()
        <= SGLANG.environ.items()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vllms_server_gets_the_settings_of_our_engine(tmp_path: Path, dtype: str) -> None:
    options = options_of(VLLM.ours, tmp_path, dtype)
    known = VllmSettings(120.0, argparse.Namespace(), frozenset())
    ours = launch._engine_arguments(options, known, cpu=True)
    assert (
        ours.pop("worker_extension_cls") == launch.EXTENSION_PATH
    )  # for updates, of which there are none
    expected = flags(options.args)
    for field, value in ours.items():
        name = field.replace("_", "-")
        if value is True:
            expected[f"--{name}"] = ""
        elif value is not False:
            expected[f"--{name}"] = str(value)
        elif field not in OFF_BY_DEFAULT:
            expected[f"--no-{name}"] = ""
    theirs = flags(VLLM.theirs.words(tmp_path, dtype, 8001)[2:])
    assert {name: value for name, value in theirs.items() if name not in FRONTEND} == expected


def test_weights_go_to_two_engines_of_vllm_with_the_same_settings(tmp_path: Path) -> None:
    dtype = vllm_weights.DTYPE
    theirs = flags(vllm_weights.side("ipc").words(tmp_path, dtype, 8001)[2:])
    assert json.loads(theirs.pop("--weight-transfer-config")) == {"backend": "ipc"}
    assert theirs.pop("--worker-extension-cls").startswith("bench.")
    assert theirs == flags(VLLM.theirs.words(tmp_path, dtype, 8001)[2:])
    start = ["-m", "rollout_worker", "serve", "--engine", "vllm", "--model", str(tmp_path)]
    words = [
        *start,
        *("--dtype", dtype, "--auth", "none", "--control-host", "127.0.0.1"),
        *vllm_weights.FLAGS,
    ]
    ours = replace(VLLM.ours, words=lambda *_: words)
    found, expected = (options_of(each, tmp_path, dtype) for each in (ours, VLLM.ours))
    assert replace(found, staging=expected.staging) == expected  # a budget of its own each time


def test_neither_side_of_vllm_sizes_its_cache_by_itself(tmp_path: Path) -> None:
    """Ours takes the flag only where the worker gives no limit of its own."""
    assert options_of(VLLM.ours, tmp_path, "float32").max_batch_tokens is None
    assert f"--kv-cache-memory-bytes={VLLM_CACHE_BYTES}" in VLLM_FLAGS
