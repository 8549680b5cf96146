"""What the adapters do for GPUs, as far as it shows without one."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rollout_worker.engine import (
    EngineError,
    EngineRequest,
    InvalidRequest,
    TensorEntry,
    TensorSpec,
    WeightsRejected,
)
from rollout_worker.engines import EngineOptions, tested
from rollout_worker.engines.model_folder import checkpoint_dtype
from rollout_worker.engines.sglang import model, settings, spilling
from rollout_worker.engines.sglang.child_connection import ChildConnection
from rollout_worker.engines.sglang.process import SglangProcess
from rollout_worker.engines.sglang.scheduling import RequestScheduler
from rollout_worker.engines.sglang.sglang_engine import SglangEngine
from rollout_worker.engines.sglang.sglang_versions import SglangVersions
from rollout_worker.engines.shared_memory.tensor_views import TORCH_DTYPES
from rollout_worker.engines.vllm.intake import VllmModel, check_request
from rollout_worker.observe.processes import command_line_of
from rollout_worker.schemas import CHECKPOINT, SamplingParams
from tests.support.unit.tiny_engine import write_weights
from tests.support.waiting import until

ROOT = Path(__file__).parents[4]


def entries(*specs: tuple[str, Sequence[int]]) -> list[TensorEntry]:
    return [
        TensorEntry(f"t{n}", TensorSpec(dtype, tuple(shape)))
        for n, (dtype, shape) in enumerate(specs)
    ]


def test_the_dtype_of_a_quantised_checkpoint_is_not_that_of_its_scales() -> None:
    """An fp8 model: a float32 scale for each weight, and bfloat16 where it is not quantised."""
    weights = [("F8_E4M3", (64, 64)), ("F32", (1, 1))] * 9
    assert checkpoint_dtype(entries(*weights, ("BF16", (128, 64)))) == "bfloat16"


def test_every_quantised_dtype_of_a_checkpoint_has_its_torch_dtype() -> None:
    for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0"):
        assert TORCH_DTYPES[name].itemsize == TensorSpec(name, (1,)).nbytes


def request(**sampling: object) -> EngineRequest:
    return EngineRequest("r", (5,), SamplingParams.model_validate(sampling), "sampling")


MANY: dict[str, dict[str, object]] = {
    "sampling.allowed_token_ids": {"allowed_token_ids": list(range(1025))},
    "sampling.logit_bias": {"logit_bias": {str(token): 1.0 for token in range(1025)}},
    "sampling.stop_token_ids": {"stop_token_ids": list(range(10, 138)), "min_tokens": 1},
}


@pytest.mark.parametrize("field", MANY)
def test_what_would_end_vllms_core_is_refused_before(field: str) -> None:
    asked = request(max_tokens=4, **MANY[field])
    with pytest.raises(InvalidRequest, match=r"at most \d+ tokens .* send fewer") as refused:
        check_request(asked, VllmModel(64, 4096, frozenset({2}), None, bounded=True))
    assert refused.value.field == field
    check_request(asked, VllmModel(64, 4096, frozenset({2}), None))


@pytest.mark.parametrize(
    "sampling",
    [
        {"allowed_token_ids": list(range(1024))},
        {"logit_bias": {str(token): 1.0 for token in range(1024)}},
        {"stop_token_ids": list(range(10, 137)), "min_tokens": 1},
        {"stop_token_ids": list(range(10, 200))},
    ],
    ids=["allowed", "biases", "stops", "stops without min_tokens"],
)
def test_what_vllms_sampler_has_room_for_passes(sampling: dict[str, object]) -> None:
    check_request(
        request(max_tokens=4, **sampling), VllmModel(64, 4096, frozenset({2}), None, bounded=True)
    )


@pytest.mark.parametrize(("engine", "pins"), [("vLLM", "vllm"), ("SGLang", "sglang")])
def test_the_tested_versions_are_those_that_are_installed(engine: str, pins: str) -> None:
    locked = [ROOT / "requirements" / f"{name}.txt" for name in (pins, f"{pins}-cpu")]
    found = [re.search(rf"^{pins}(?:-cpu)?==(\S+)", f.read_text(), re.M) for f in locked]
    assert [match and match[1] for match in found] == [tested.TESTED_VERSIONS[engine]] * 2


@pytest.mark.parametrize("engine", tested.TESTED_VERSIONS)
def test_another_version_is_refused_by_name(engine: str) -> None:
    assert tested.untested_version_refusal(engine, f"{tested.TESTED_VERSIONS[engine]}+cpu") is None
    why = tested.untested_version_refusal(engine, "9.9.9")
    assert why is not None
    assert all(
        word in why
        for word in (engine, "9.9.9", tested.TESTED_VERSIONS[engine], tested.ALLOW_UNTESTED_FLAG)
    )


def test_one_flag_lets_another_version_of_sglang_start() -> None:
    given = settings.parse_flags(("--tp-size", "2", tested.ALLOW_UNTESTED_FLAG))
    assert given.any_version
    assert given.flags == ("--tp-size", "2")


def folder(path: Path, **quantisation: object) -> EngineOptions:
    config = {"vocab_size": 8, "quantization_config": quantisation}
    (path / "config.json").write_text(json.dumps(config))
    return EngineOptions(model=path)


def quantised(path: Path) -> SglangEngine:
    options = folder(path, quant_method="compressed-tensors", format="float-quantized")
    write_weights(path, 1)
    return SglangEngine(replace(options, max_length=8, args=("--python", "/nonexistent")))


async def test_a_kind_that_sglang_would_update_wrongly_is_refused_before_it_is_loaded(
    tmp_path: Path,
) -> None:
    engine = quantised(tmp_path)
    with pytest.raises(EngineError, match=r"'compressed-tensors'.*--self-update-check=off"):
        await engine.start(lambda _: None)


async def test_such_a_kind_may_be_served_without_updates(tmp_path: Path) -> None:
    off = quantised(tmp_path)._options
    engine = SglangEngine(replace(off, args=(*off.args, "--self-update-check=off")))
    with pytest.raises(EngineError, match="can't be started"):  # the next thing: no such Python
        await engine.start(lambda _: None)


async def test_weights_that_sglang_would_not_take_are_refused_before_they_are_staged(
    tmp_path: Path,
) -> None:
    """In its own words where it has some: it would say the same of every update."""
    options = folder(tmp_path, quant_method="fp8", weight_block_size=[128, 128])
    write_weights(tmp_path, 1)
    found = model.read_model(replace(options, max_length=8))
    facts = {"no_updates": None, "device": [9, 0], "ranks": 1}
    for more, why in (
        ({"no_updates": "Online weight updates are not supported"}, "Online weight updates"),
        ({"device": [10, 0]}, r"capability 10\.0"),
    ):
        versions = SglangVersions(
            options,
            found,
            ChildConnection(print),
            RequestScheduler(ChildConnection(print), 1, CHECKPOINT),
            facts | more,
            print,
        )
        with pytest.raises(WeightsRejected, match=why):
            await versions.open_slot([])


class Latent(nn.Module):
    """As SGLang's latent attention: plain tensors made of a parameter, one of them transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.rand(4, 6))
        self.w_kc = self.both.detach()[:2].clone().transpose(0, 1)
        self.w_vc = self.both.detach()[2:].clone()
        self.tied = self.both


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """The only rank of its group."""
    where = f"file://{tmp_path / 'meet'}"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_sleeping_keeps_what_a_model_made_of_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Any
) -> None:
    monkeypatch.setenv(settings.SPILL_FOLDER_VARIABLE, str(tmp_path))
    layers = [Latent(), Latent()]
    runner = SimpleNamespace(model=nn.Sequential(*layers))
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), tp_cpu_group=alone)
    tensors = [t for each in layers for t in (each.both, each.w_kc, each.w_vc)]
    before = [t.detach().clone() for t in tensors]
    with torch.no_grad():
        spilling.spill_weights(scheduler)
        for tensor in tensors:
            tensor.zero_()
        spilling.restore_weights(scheduler)
    assert all(torch.equal(was, now) for was, now in zip(before, tensors, strict=True))


def test_who_has_no_room_for_its_weights_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Any
) -> None:
    monkeypatch.setenv(settings.SPILL_FOLDER_VARIABLE, str(tmp_path / "gone"))
    runner = SimpleNamespace(model=Latent())
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), tp_cpu_group=alone)
    with pytest.raises(OSError, match="gone': No such file or directory"):
        spilling.spill_weights(scheduler)


CHILD = """#!/bin/bash
(exec -a sglang::scheduler_TP0 sleep 300) &
sleep 300 &
wait
"""


def named(process: SglangProcess, name: str) -> list[int]:
    return [pid for pid in process.session_pids() if command_line_of(pid).startswith(name)]


async def test_only_the_end_of_what_sglang_names_ends_the_engine(tmp_path: Path) -> None:
    """Torch's compile workers quit after a minute without work."""
    python = tmp_path / "python"
    python.write_text(CHILD)
    python.chmod(0o755)
    ends: list[str] = []
    process = SglangProcess(ends.append, lambda _: None)
    process.start(str(python), (), {}).close()
    try:
        await until(lambda: named(process, "sglang::") and named(process, "sleep"))
        process.watch_schedulers()
        (helper,), (scheduler,) = named(process, "sleep"), named(process, "sglang::")
        os.kill(helper, signal.SIGKILL)
        await until(lambda: not named(process, "sleep"))
        os.kill(scheduler, signal.SIGKILL)
        await until(lambda: ends)
        assert f"pid {scheduler})" in ends[0]
    finally:
        await process.stop()


async def test_an_interpreter_that_is_not_there_is_named() -> None:
    process = SglangProcess(lambda _: None, lambda _: None)
    try:
        with pytest.raises(EngineError, match="--python '/nowhere/python' can't be started"):
            process.start("/nowhere/python", (), {})
    finally:
        await process.stop()
