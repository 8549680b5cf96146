"""Streams whose client reads nothing, or no more: what they cost, and when they end."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import tracemalloc
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout_worker.engines.grammars.grammar_checker import GrammarChecker
from rollout_worker.openai.model_text import ModelText
from rollout_worker.ports.data_routes import make_data_app
from rollout_worker.requests import http_answers
from rollout_worker.requests.http_answers import EventStream
from rollout_worker.schemas import AbortReason
from tests.support.unit import tiny_engine
from tests.support.unit.asgi import Answer, call
from tests.support.unit.tiny_engine import Gate
from tests.support.unit.tiny_worker import TinyWorker, tiny_worker
from tests.support.waiting import until

Message = MutableMapping[str, Any]
STEPS = 2000
GENERATE: dict[str, Any] = {"token_ids": [1], "sampling": {"n": 2}}
COMPLETIONS: dict[str, Any] = {"model": "model", "prompt": [[1], [2]], "max_tokens": STEPS + 9}


@pytest.fixture
async def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TinyWorker]:
    monkeypatch.setattr(tiny_engine, "MAX_LENGTH", 2 * STEPS)

    async def decoder(texts: ModelText) -> Callable[[Sequence[int], bool], str]:
        return lambda ids, special: "x" * len(ids)

    monkeypatch.setattr(ModelText, "make_decoder", decoder)
    async with tiny_worker(tmp_path) as worker:
        yield worker


def ask(worker: TinyWorker, path: str, body: dict[str, Any], **how: Any) -> asyncio.Task[Answer]:
    """Begin a request of a client that is odd in some way."""
    content = json.dumps(body).encode()
    return asyncio.create_task(call(make_data_app(worker.worker), path, content, **how))


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/generate", GENERATE), ("/v1/completions", COMPLETIONS)]
)
async def test_a_client_that_leaves_is_no_error(
    worker: TinyWorker, path: str, body: dict[str, Any]
) -> None:
    said: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: said.append(context["message"]))
    gone = asyncio.Event()
    serving = ask(worker, path, body, gone=gone)
    await until(lambda: len(worker.engine.known) == 2, what="the requests")
    gone.set()
    await asyncio.wait_for(serving, 10)
    assert not worker.engine.known
    del serving
    gc.collect()
    await asyncio.sleep(0)
    assert said == []


async def leave_during(gate: Gate, worker: TinyWorker, path: str, body: dict[str, Any]) -> None:
    """Have a client leave while its request waits at a gate; the engine must never hear of it."""
    gone = asyncio.Event()
    serving = ask(worker, path, body, gone=gone)
    await asyncio.wait_for(gate.reached.wait(), 10)
    gone.set()
    assert (await asyncio.wait_for(serving, 10)).status == 499
    assert worker.engine.asked == 0


@pytest.fixture
async def checks(worker: TinyWorker, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    """A check of a grammar that does not end until it is opened."""
    gate = Gate()

    async def check(*_: Any) -> Any:
        await gate()
        return {"grammar": ""}, math.inf

    able = worker.engine.capabilities.model_copy(update={"structured": True})
    monkeypatch.setattr(worker.engine, "capabilities", able)
    monkeypatch.setattr(GrammarChecker, "_ask_process", check)
    yield gate
    gate.open()


async def test_a_grammar_is_checked_until_the_deadline(worker: TinyWorker, checks: Gate) -> None:
    body = {**GENERATE, "structured": {"choice": ["a"]}, "deadline_seconds": 0.1}
    answer = await ask(worker, "/v1/generate", body)
    assert (answer.status, answer.slug) == (504, "deadline-exceeded")
    assert "deadline_seconds" in answer.body["detail"]
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/generate", {**GENERATE, "structured": {"choice": ["a"]}}),
        ("/v1/completions", {**COMPLETIONS, "response_format": {"type": "json_object"}}),
    ],
)
async def test_a_client_that_leaves_waits_for_no_check(
    worker: TinyWorker, checks: Gate, path: str, body: dict[str, Any]
) -> None:
    await leave_during(checks, worker, path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_a_client_that_leaves_waits_for_no_text(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    gate = Gate()

    async def wait(*_: Any, **__: Any) -> list[int]:
        await gate()
        return [1]

    monkeypatch.setattr(ModelText, "encode_prompt", wait)
    monkeypatch.setattr(ModelText, "render_conversation", wait)
    await leave_during(gate, worker, path, body)


async def test_the_wait_for_texts_counts_for_the_deadline(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait(*_: Any, **__: Any) -> list[int]:
        await asyncio.sleep(0.3)
        return [1]

    monkeypatch.setattr(ModelText, "encode_prompt", wait)
    answer = await ask(worker, "/v1/completions", {"prompt": "a", "deadline_seconds": 0.2})
    assert [each["finish_reason"] for each in answer.body["choices"]] == ["abort"]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/generate", GENERATE), ("/v1/completions", COMPLETIONS)]
)
async def test_an_unread_stream_takes_no_more_than_its_output(
    worker: TinyWorker, path: str, body: dict[str, Any]
) -> None:
    serving = ask(worker, path, {**body, "stream": True}, deaf=True)
    await until(lambda: len(worker.engine.known) == 2, what="the requests")
    outputs = list(worker.flights.unfinished_outputs.values())

    def made() -> int:
        return min(len(output.token_ids) for output in outputs)

    worker.engine.step(8)
    await until(lambda: made() == 8, what="the first tokens")
    gc.collect()
    tracemalloc.start()
    try:
        worker.engine.step(STEPS)
        await until(lambda: made() == 8 + STEPS, what="the tokens")
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] / (2 * STEPS)
    finally:
        tracemalloc.stop()
        serving.cancel()
        await asyncio.wait({serving})
    # A token and its logprob in two lists; a delta of its own takes a thousand.
    assert grown < 100, f"{grown:.0f} bytes a token"
    await until(lambda: all(output.stop_reason for output in outputs), what="the requests to end")
    assert {output.abort_reason for output in outputs} == {AbortReason.CLIENT}


@pytest.mark.parametrize(
    "fields", [{"stream": True}, {"stream": False, "top_logprobs": 1}], ids=["stream", "scores"]
)
async def test_who_never_reads_on_is_dropped_after_the_deadline(
    worker: TinyWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
) -> None:
    monkeypatch.setattr(http_answers, "ANSWER_TIMEOUT_SECONDS", 0.2)
    able = worker.engine.capabilities.model_copy(update={"top_logprobs": 1})
    monkeypatch.setattr(worker.engine, "capabilities", able)
    body = {**GENERATE, **fields, "deadline_seconds": 0.1}
    serving = ask(worker, "/v1/generate", body, deaf=True)
    await until(lambda: len(worker.engine.known) == 2, what="the request")
    worker.engine.step(8)
    await asyncio.wait_for(serving, 10)
    assert "not read to its end within 0.3 s" in caplog.text
    assert len(worker.flights) == 0


async def test_events_are_closed_with_their_stream(worker: TinyWorker) -> None:
    closed = asyncio.Event()

    async def events() -> Any:
        try:
            yield b"one"
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def send(message: Message) -> None:
        if message.get("body"):
            raise OSError("the client is gone")

    with pytest.raises(OSError, match="gone"):
        await EventStream(events(), lambda _: b"", worker.flights, [], 10).stream_response(send)
    assert closed.is_set()
