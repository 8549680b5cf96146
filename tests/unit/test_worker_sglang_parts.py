"""The parts of the SGLang adapter that need no SGLang."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import pytest

from rollout_worker.engine import (
    EngineCrashed,
    EngineError,
    EngineRequest,
    InvalidRequest,
    Layout,
)
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.sglang import settings
from rollout_worker.engines.sglang.bridge import Bridge, frame
from rollout_worker.engines.sglang.checks import check
from rollout_worker.engines.sglang.desk import Desk
from rollout_worker.engines.sglang.model import Model
from rollout_worker.engines.sglang.streams import Stream, child_tokens
from rollout_worker.schemas import CHECKPOINT, SamplingParams

MODEL = Model(None, Layout({}, {}, {}), frozenset({2}), 64, 100, "float32", 0)


def asked(temperature: float) -> EngineRequest:
    sampling = SamplingParams(temperature=temperature, max_tokens=4)
    return EngineRequest("r", (5,), sampling, "sampling")


@pytest.mark.parametrize("temperature", [9e-7, 1e-300])
def test_what_sglang_would_draw_at_another_temperature_is_refused(temperature: float) -> None:
    """It sets such a temperature to 1 and `top_k`, which our sampler does not read, to 1."""
    with pytest.raises(InvalidRequest) as refused:
        check(asked(temperature), MODEL)
    assert refused.value.field == "sampling.temperature"


@pytest.mark.parametrize("temperature", [0, 1e-6, 100])
def test_what_sglang_draws_as_asked_passes(temperature: float) -> None:
    check(asked(temperature), MODEL)


@asynccontextmanager
async def desk() -> AsyncIterator[tuple[Desk, Stream, socket.socket]]:
    """A desk with one request, and the other end of its bridge, where a child would be."""
    here, there = socket.socketpair()
    bridge = Bridge(lambda frames: found.take(frames))
    found = Desk(bridge, 4, CHECKPOINT)
    reading = asyncio.create_task(bridge.run(here))
    await asyncio.sleep(0.01)
    stream = Stream(asked(1), 0, frozenset({2}), None)
    found.add(stream)
    yield found, stream, there
    there.close()
    await reading


async def test_a_child_that_does_not_come_to_rest_is_stuck() -> None:
    async with desk() as (found, _, child):
        pausing = asyncio.create_task(found.pause())
        await asyncio.sleep(0.06)
        assert found.stuck(60) is None
        wrong = found.stuck(0.05)
        assert wrong is not None
        assert "rest" in wrong
        child.sendall(frame({"id": 1, "result": {}}))
        await pausing
        await asyncio.sleep(0.06)
        assert found.stuck(0.05) is None, "it rests as it was told"


@pytest.mark.parametrize(
    ("error", "kind"),
    [("ValueError: too many ids", InvalidRequest), ("RuntimeError: lost", EngineCrashed)],
)
async def test_an_error_of_one_request_is_no_crash(error: str, kind: type[EngineError]) -> None:
    async with desk() as (_, stream, child):
        child.sendall(frame({"tokens": [[stream.rid, [], None, {"error": error}]]}))
        failure = await asyncio.wait_for(stream.deltas.get(), 5)
    assert type(failure) is kind
    assert error.partition(": ")[2] in str(failure)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(HTTPStatus.BAD_REQUEST, InvalidRequest), (HTTPStatus.INTERNAL_SERVER_ERROR, EngineCrashed)],
)
async def test_how_sglang_ended_a_request_tells_whose_fault_it_was(
    status: HTTPStatus, kind: type[EngineError]
) -> None:
    """An abort of its own, as its scheduler passes it on."""
    finish = {"type": "abort", "message": "the grammar is broken", "status_code": status}
    async with desk() as (_, stream, child):
        assert stream.rid is not None
        told = child_tokens(stream.rid, {"meta_info": {"finish_reason": finish}, "output_ids": []})
        child.sendall(frame({"tokens": [told]}))
        failure = await asyncio.wait_for(stream.deltas.get(), 5)
    assert type(failure) is kind
    assert "the grammar is broken" in str(failure)


@pytest.mark.parametrize(
    "flag",
    [
        *("--config", "--config=f.yaml", "--dtype", "--speculative-algo=X"),
        *("--pp-size=2", "--pipeline-parallel-size"),
    ],
)
def test_a_flag_of_the_workers_own_is_refused(flag: str) -> None:
    with pytest.raises(EngineError, match=flag.partition("=")[0]):
        settings.parse((flag,))


def test_other_flags_pass() -> None:
    assert settings.parse(("--tp-size", "2")).flags == ("--tp-size", "2")


def flags_of(*args: str) -> list[str]:
    options = EngineOptions(model=Path("m"), args=args)
    return settings.child_flags(options, settings.parse(args), MODEL, cpu=False)


def test_a_pools_tensor_ranks_reach_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--tp-size" not in flags_of()
    monkeypatch.setenv("ROLLOUT_TENSOR", "8")
    flags = flags_of("--tp-size", "2")
    assert flags[flags.index("--tp-size") + 1] == "8"
    assert flags[-2:] == ["--tp-size", "2"], "the last one wins: the user's"


@pytest.mark.parametrize("part", ["pipeline", "data", "nodes"])
def test_a_shape_that_sglang_can_not_have_is_refused(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignored, each pod would take the accelerators of all ranks and use one."""
    monkeypatch.setenv(f"ROLLOUT_{part.upper()}", "1")
    settings.parse(())
    monkeypatch.setenv(f"ROLLOUT_{part.upper()}", "2")
    with pytest.raises(EngineError, match=rf"parallelism\.{part} must be 1: "):
        settings.parse(())
