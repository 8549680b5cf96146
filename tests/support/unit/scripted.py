"""A worker's data port that is odd on purpose: it does one scripted step after the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from tests.support.loopback import Loopback
from tests.support.unit.states import worker_info

Step = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
PROMPT = [1, 2, 3]
END = {"max_tokens": 6, "ignore_eos": True}


class ScriptedWorker:
    """Answers `POST /v1/generate` with one step after the other; the last one again and again."""

    def __init__(self, server: Loopback) -> None:
        self.server = server
        self.steps: list[Step] = []
        self.bodies: list[dict[str, Any]] = []
        server.answers["POST", "/v1/generate"] = self._generate
        self.ready()

    @property
    def url(self) -> str:
        """Of the data port."""
        return self.server.url

    def ready(self, status: int = 200) -> None:
        """Set what `GET /ready` answers."""
        body: dict[str, Any] = {"status": "ready"} if status == 200 else {"detail": "asleep"}
        self.server.answer("GET", "/ready", body, status)

    def says_ends(self, *ids: int, logprobs: Sequence[str] = ("sampling",)) -> None:
        """Set the ids that `GET /v1/info` names as the model's EOS, and its kinds of logprobs."""
        self.server.answer("GET", "/v1/info", worker_info(logprobs, eos_token_ids=ids))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        return await self.steps[min(len(self.bodies), len(self.steps)) - 1](request, body)


def problem(status: int, slug: str, **more: Any) -> Step:
    """Refuse; `retry` is sent as Retry-After, the rest are extensions."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = {"type": f"urn:rollout:problem:{slug}", "title": "t", "detail": "why", **more}
        headers = {"Retry-After": str(more["retry"])} if "retry" in more else {}
        kind = "application/problem+json"
        return web.json_response(text, status=status, headers=headers, content_type=kind)

    return answer


def after(wait: Callable[[], Awaitable[object]], step: Step) -> Step:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await wait()
        return await step(request, body)

    return answer


def raw(*events: bytes) -> Step:
    """Stream these events and nothing else."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for each in events:
            await response.write(each)
        return response

    return answer


def done_event(*outputs: dict[str, Any]) -> bytes:
    """Return the end of a stream that has these outputs, and says nothing of logprobs."""
    usage = {"prompt_tokens": 3, "completion_tokens": len(outputs)}
    timing = {"queued_seconds": 0, "total_seconds": 0}
    done: dict[str, Any] = {"request_id": "r", "logprobs_of": None, "outputs": outputs}
    return event("done", {**done, "usage": usage, "timing": timing})


def event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def tokens(
    ids: Sequence[int],
    stop: str | None = "length",
    version: int | Sequence[int] = 0,
    abort: str | None = None,
    tail: bytes = b"",
    match: int | None = None,
    pause: float = 0.0,
) -> Step:
    """Stream single tokens, then `done`.

    Args:
        ids: Of the tokens.
        stop: Reason of the end; None: the stream is cut off instead.
        version: Of the weights of all tokens, or of each.
        abort: Reason of an abort.
        tail: Bytes before the end.
        match: Id that is named as the end.
        pause: Seconds before each token but the first.
    """
    versions = [version] * len(ids) if isinstance(version, int) else version

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at, token in enumerate(ids):
            await asyncio.sleep(pause if at else 0)
            span = {"epoch": 0, "version": versions[at], "start": at, "end": at + 1}
            delta = {"index": 0, "token_ids": [token], "logprobs": [-0.1], "weights": [span]}
            await response.write(event("delta", {**delta, "new_field": 1}))
        await response.write(tail)
        if stop is None:
            await asyncio.sleep(0.02)
            assert request.transport is not None
            request.transport.abort()
            return response
        ended: dict[str, Any] = {"index": 0, "stop_reason": stop, "abort_reason": abort}
        if match is not None:
            ended["stop_match"] = {"token_id": match}
        usage = {"prompt_tokens": 3, "completion_tokens": len(ids), "cached_tokens": 1}
        timing = {"queued_seconds": 0.1, "total_seconds": 0.2, "preemptions": 1}
        done = {"request_id": body["request_id"], "logprobs_of": "sampling", "outputs": [ended]}
        await response.write(event("done", {**done, "usage": usage, "timing": timing}))
        return response

    return answer
