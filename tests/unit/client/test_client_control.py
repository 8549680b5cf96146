"""The client of the control port against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from rollout_client.worker_control import ControlError, ControlUnreachable, WorkerControl
from rollout_worker.schemas import (
    AbortRequest,
    CommitRequest,
    DiscardRequest,
    PauseRequest,
    RequireRequest,
    StageRequest,
    WeightsSource,
)
from tests.support.loopback import Loopback, loopback
from tests.support.unit.states import serving_state

ACTIVE = {"epoch": 1, "version": 2, "root_hash": "abc", "labels": {}}
WEIGHTS = {"active": ACTIVE, "previous": None, "staged": None, "required": None, "commit_seq": 1}
STATE = serving_state(weights=WEIGHTS)


async def no_token() -> None:
    return None


@pytest.fixture
async def worker() -> AsyncIterator[Loopback]:
    async with loopback() as server:
        yield server


@pytest.fixture
async def control(worker: Loopback) -> AsyncIterator[WorkerControl]:
    async def token() -> str | None:
        return "secret"

    async with httpx.AsyncClient(trust_env=False) as client:
        yield WorkerControl(worker.url + "/", token, client)


@pytest.mark.parametrize(
    ("given", "sent"),
    [(None, None), ("secret", "Bearer secret"), ("secret\r\n", "Bearer secret")],
    ids=["none", "a token", "the line of a file"],
)
async def test_state_is_read_with_the_token(
    worker: Loopback, given: str | None, sent: str | None
) -> None:
    async def token() -> str | None:
        return given

    worker.answer("GET", "/v1/state", STATE)
    async with httpx.AsyncClient(trust_env=False) as client:
        state = await WorkerControl(worker.url, token, client).state()
    assert state.lifecycle == "Active"
    assert state.weights.active is not None
    assert str(state.weights.active.identity) == "(1, 2)"
    assert worker.headers[0].get("Authorization") == sent


async def test_a_port_that_takes_tls_alone_is_told_from_one_that_is_gone() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async with httpx.AsyncClient(trust_env=False) as client:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            control = WorkerControl(f"http://127.0.0.1:{port}", no_token, client)
            with pytest.raises(ControlUnreachable, match="control_ca, or --control-ca-file"):
                await control.state()
        with pytest.raises(ControlUnreachable) as gone:
            await control.state()
        assert "control_ca" not in str(gone.value)


@pytest.mark.parametrize(
    "given", ["", " \n", "s3cret\ns3cret", "s3cret\x7f", "s3crèt", "s3cret\u200b"]
)
async def test_a_token_that_is_none_is_refused_without_being_quoted(
    worker: Loopback, given: str
) -> None:
    async def token() -> str:
        return given

    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(ControlUnreachable, match="token of the control ports") as refused:
            await WorkerControl(worker.url, token, client).state()
    assert "s3cr" not in str(refused.value) + str(refused.value.__cause__)
    assert worker.headers == []


async def test_verbs_send_what_the_routes_take(worker: Loopback, control: WorkerControl) -> None:
    source = {"path": "/w/2", "checkpoint": None}
    staged = {"epoch": 1, "version": 2, "source": source, "phase": "Staging"}
    committed = {"active": ACTIVE, "previous": None, "commit_seq": 2, "pause_seconds": 0.1}
    committed |= {"finished": 1, "aborted": 0, "kept": 0}
    worker.answer("GET", "/v1/weights", WEIGHTS)
    worker.answer("POST", "/v1/weights/stage", staged, 202)
    worker.answer("POST", "/v1/weights/commit", committed)
    worker.answer("POST", "/v1/abort", {"aborted": ["a"], "unknown": []})
    worker.answer("POST", "/v1/weights/discard", {"outcome": "discarded"})
    worker.answer("POST", "/v1/require", WEIGHTS)
    for path in ("pause", "resume", "sleep", "wake", "cache/reset"):
        worker.answer("POST", f"/v1/{path}", STATE)

    await control.pause(PauseRequest(mode="abort", generation=3))
    await control.resume()
    await control.sleep()
    await control.wake()
    await control.abort(AbortRequest(all=True))
    stage = StageRequest(epoch=1, version=2, source=WeightsSource(path="/w/2"))
    assert (await control.stage(stage)).phase == "Staging"
    assert (await control.commit(CommitRequest(epoch=1, version=2))).commit_seq == 2
    assert (await control.discard(DiscardRequest(epoch=1, version=2))).outcome == "discarded"
    assert (await control.reset_cache()).serving
    await control.require(RequireRequest(epoch=1, min_version=2))

    sent = {path: json.loads(body) for _, path, body in worker.requests if body}
    assert sent["/v1/pause"] == {"mode": "abort", "deadline_seconds": 30, "generation": 3}
    assert sent["/v1/resume"] == {}
    assert sent["/v1/wake"] == {"tags": ["weights", "kv_cache"]}
    assert sent["/v1/abort"] == {"all": True}
    assert sent["/v1/weights/stage"]["source"] == {"path": "/w/2"}
    assert sent["/v1/weights/commit"]["in_flight"] == "Drain"
    assert sent["/v1/require"] == {"epoch": 1, "min_version": 2}


async def test_a_problem_is_told_with_slug_and_facts(
    worker: Loopback, control: WorkerControl
) -> None:
    problem = {
        "type": "urn:rollout:problem:not-staged",
        "title": "Not staged",
        "status": 409,
        "detail": "stage (1, 3) first",
        "active": ACTIVE,
    }
    worker.answer("POST", "/v1/weights/commit", problem, 409)
    with pytest.raises(ControlError, match=r"409 not-staged: stage \(1, 3\) first") as error:
        await control.commit(CommitRequest(epoch=1, version=3))
    assert (error.value.status, error.value.slug) == (409, "not-staged")
    assert error.value.extensions == {"active": ACTIVE}


@pytest.mark.parametrize("body", ["bad gateway", "[1]"], ids=["text", "no object"])
async def test_an_odd_refusal_is_told_as_it_came(
    worker: Loopback, control: WorkerControl, body: str
) -> None:
    worker.answer("GET", "/v1/state", body, 502)
    with pytest.raises(ControlError) as error:
        await control.state()
    assert (error.value.status, error.value.slug, error.value.detail) == (502, "", body)


async def test_an_answer_of_another_shape_names_the_field(
    worker: Loopback, control: WorkerControl
) -> None:
    worker.answer("GET", "/v1/state", {**STATE, "lifecycle": "Dancing"})
    with pytest.raises(ControlError, match="not a WorkerState") as error:
        await control.state()
    assert error.value.slug == "bad-answer"
    assert "lifecycle" in error.value.detail


async def test_no_answer_in_time_and_no_connection_are_unreachable(
    worker: Loopback, control: WorkerControl
) -> None:
    worker.delay("GET", "/v1/state", STATE, 5)
    with pytest.raises(ControlUnreachable, match="/v1/state: "):
        await control.state(timeout=0.05)

    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(
            ControlUnreachable, match=r"127\.0\.0\.1:1/v1/state: .*Connect call failed"
        ):
            await WorkerControl("http://127.0.0.1:1", no_token, client).state()
