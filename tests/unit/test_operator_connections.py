"""The operator's connections against real servers on loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from loopback import Loopback, loopback
from rollout_client.control import ControlError, ControlUnreachable, WorkerControl
from rollout_operator.workers.connections import Connections
from rollout_worker.schemas import RequireRequest


async def no_token() -> str | None:
    return None


@pytest.fixture
async def worker() -> AsyncIterator[Loopback]:
    async with loopback() as running:
        yield running


@pytest.fixture
async def control(worker: Loopback) -> AsyncIterator[WorkerControl]:
    connections = Connections()
    yield WorkerControl(worker.url, no_token, connections.send)
    await connections.close()


async def test_a_body_goes_out_and_an_answer_comes_back(
    worker: Loopback, control: WorkerControl
) -> None:
    worker.answer("POST", "/v1/require", {"active": None, "required": {"epoch": 2, "version": 3}})
    answer = await control.require(RequireRequest(epoch=2, min_version=3))
    assert answer.required is not None
    assert answer.required.as_tuple() == (2, 3)
    assert worker.requests == [("POST", "/v1/require", '{"epoch":2,"min_version":3}')]
    assert worker.headers[0]["Content-Type"] == "application/json"


async def test_a_problem_is_a_control_error(worker: Loopback, control: WorkerControl) -> None:
    problem = {"type": "urn:rollout:problem:stale-epoch", "detail": "too old", "epoch": 4}
    worker.answer("POST", "/v1/require", problem, 409)
    with pytest.raises(ControlError, match="409 stale-epoch: too old") as caught:
        await control.require(RequireRequest(epoch=2))
    assert caught.value.extensions == {"epoch": 4}


async def test_silence_ends_at_the_deadline(worker: Loopback, control: WorkerControl) -> None:
    worker.delay("GET", "/v1/state", {}, 5)
    began = time.monotonic()
    with pytest.raises(ControlUnreachable, match=r"no answer within 0\.2 s"):
        await control.state(timeout=0.2)
    assert time.monotonic() - began < 2


async def test_nobody_there_is_named_with_the_reason() -> None:
    connections = Connections()
    with pytest.raises(ControlUnreachable, match=r"GET http://127\.0\.0\.1:1/v1/state: .*refused"):
        await WorkerControl("http://127.0.0.1:1", no_token, connections.send).state()
    await connections.close()


async def test_a_worker_that_went_away_between_two_requests_is_unreachable() -> None:
    connections = Connections()
    async with loopback() as worker:
        worker.answer("POST", "/v1/require", {"active": None})
        control = WorkerControl(worker.url, no_token, connections.send)
        await control.require(RequireRequest(epoch=1))
    await asyncio.sleep(0)
    with pytest.raises(ControlUnreachable):
        await control.require(RequireRequest(epoch=1))
    await connections.close()
