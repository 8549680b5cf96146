"""Streams in which nothing happens for long, such as before the first token: proxies must not cut them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai._streaming import SSEDecoder
from starlette.types import Message, Receive, Scope, Send

from rollout_common.wire.event_frames import FRAMES_TYPE, STREAM_COMMENT, FrameReader
from rollout_common.wire.generate import StreamDelta
from rollout_common.wire.problems import ProblemError
from rollout_worker.openai import openai_routes
from rollout_worker.openai.model_text import ModelText
from rollout_worker.ports.data_routes import make_data_app
from rollout_worker.requests import http_answers
from rollout_worker.requests.in_flight_requests import InFlightRequest
from tests.support.unit.asgi import Answer, call
from tests.support.unit.tiny_worker import TinyWorker, tiny_worker
from tests.support.waiting import until

INTERVAL = 0.03
GENERATE: dict[str, Any] = {"token_ids": [1], "sampling": {"max_tokens": 2}}
COMPLETIONS: dict[str, Any] = {"model": "model", "prompt": [1], "max_tokens": 2}


@pytest.fixture
async def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TinyWorker]:
    for module in (http_answers, openai_routes):
        monkeypatch.setattr(module, "COMMENT_INTERVAL_SECONDS", INTERVAL)

    async def decoder(texts: ModelText) -> Callable[[Sequence[int], bool], str]:
        return lambda ids, special: "x" * len(ids)

    monkeypatch.setattr(ModelText, "make_decoder", decoder)
    async with tiny_worker(tmp_path) as worker:
        yield worker


async def ask_slowly(
    worker: TinyWorker, path: str, body: dict[str, Any], *, comments: int = 0, **how: Any
) -> Answer:
    """Send a request whose tokens come one by one, long after each other, each after so many comments."""
    seen = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def note(message: Message) -> None:
            nonlocal seen
            seen += message.get("body") == STREAM_COMMENT
            await send(message)

        await make_data_app(worker.worker)(scope, receive, note)

    def is_told(count: int) -> bool:
        return seen >= count

    asking = asyncio.create_task(call(app, path, json.dumps(body).encode(), **how))
    await until(lambda: worker.engine.known, what="the request")
    for _ in range(2):
        enough = partial(is_told, seen + comments)
        await asyncio.sleep(3 * INTERVAL)
        await until(enough, what="comments")
        worker.engine.step(1)
    return await asyncio.wait_for(asking, 10)


async def test_a_silent_stream_has_comments_that_every_reader_skips(worker: TinyWorker) -> None:
    answer = await ask_slowly(worker, "/v1/generate", {**GENERATE, "stream": True}, comments=2)
    head, _, rest = answer.content.partition(b"event: delta")
    assert head == STREAM_COMMENT * head.count(STREAM_COMMENT)
    assert head.count(STREAM_COMMENT) >= 2
    assert STREAM_COMMENT in rest
    events = list(SSEDecoder().iter_bytes(iter([answer.content])))
    assert [each.event for each in events] == ["delta", "delta", "done"]


async def test_a_stream_of_openais_begins_before_a_late_first_token(worker: TinyWorker) -> None:
    body = {**COMPLETIONS, "stream": True}
    answer = await ask_slowly(worker, "/v1/completions", body, comments=1)
    assert answer.content.startswith(STREAM_COMMENT)
    assert "x-weights-version" not in answer.headers, "no token says which weights"
    events = [each.data for each in SSEDecoder().iter_bytes(iter([answer.content]))]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(each)["choices"][0]["text"] for each in events) == "xx"


async def test_a_first_token_in_time_names_its_weights(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_routes, "COMMENT_INTERVAL_SECONDS", 10.0)
    answer = await ask_slowly(worker, "/v1/completions", {**COMPLETIONS, "stream": True})
    assert "x-weights-version" in answer.headers
    assert answer.content.startswith(b"data: ")


async def test_an_error_after_the_stream_began_is_its_last_event(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> AsyncIterator[StreamDelta]:
        await asyncio.sleep(2 * INTERVAL)
        raise ProblemError("internal-error", "it broke")
        yield

    monkeypatch.setattr(InFlightRequest, "stream_deltas", fail)
    content = json.dumps({**COMPLETIONS, "stream": True}).encode()
    answer = await asyncio.wait_for(
        call(make_data_app(worker.worker), "/v1/completions", content), 10
    )
    assert answer.status == 200
    *_, error, end = SSEDecoder().iter_bytes(iter([answer.content]))
    assert json.loads(error.data)["error"]["message"].endswith("it broke")
    assert end.data == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_no_stream_of_events_has_no_comments(
    worker: TinyWorker, stream: bool
) -> None:
    accept = {"accept": FRAMES_TYPE}
    answer = await ask_slowly(
        worker, "/v1/generate", {**GENERATE, "stream": stream}, headers=accept
    )
    assert [name for name, _ in FrameReader().push_bytes(answer.content)][-1] == "done"
    answer = await ask_slowly(worker, "/v1/generate", GENERATE)
    assert STREAM_COMMENT not in answer.content
