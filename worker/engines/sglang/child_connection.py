"""The protocol between worker and child, and the worker's end of it.

One socket pair, one JSON object a line. From the worker: `{"id", "op", "args"}`; `generate` and the commands about
pictures before it (`scheduling.SentPixels`) are not answered, every other `op` is, with `{"id", "result"}` or `{"id", "error"}`. From the child:
`{"ready": facts}` once, and then
`{"tokens": [[rid, ids, logprobs or null, about], …]}`, everything that a step made in one line, in
order. `about` holds `finish` (SGLang's reason, null before the end), `cached`, `retractions`,
`queued`, perhaps `top`, `prompt`, `masks` and `routes` (`sglang_records`), or `error`: the exception's class, a colon, and its text.

A socket pair has no port to race for and no name by which anybody else could connect, and its end is
noticed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Callable
from typing import Any

from rollout_worker.engine import EngineCrashed, EngineError

MAX_LINE_BYTES = 256 << 20
"""Longest line, in bytes: a pause lists every running request, a page of metrics is one line."""


def encode_frame(message: Any) -> bytes:
    """Return a message as it goes over the wire."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class CallFailed(Exception):
    """The child refused a command or failed at it."""


class ChildConnection:
    """The worker's end."""

    def __init__(self, on_tokens: Callable[[list[Any]], None]) -> None:
        self._on_tokens = on_tokens
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._why: str | None = None
        self._metrics = ""
        self._fetching: asyncio.Task[None] | None = None
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def run(self, sock: socket.socket) -> None:
        """Read until the child's end closes."""
        reader, self._writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_LINE_BYTES)
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._take_message(json.loads(line))

    def _take_message(self, message: dict[str, Any]) -> None:
        if "tokens" in message:
            self._on_tokens(message["tokens"])
        elif "id" in message:
            call = self._calls.pop(message["id"], None)
            if call is None or call.done():
                return
            if "error" in message:
                call.set_exception(CallFailed(message["error"]))
            else:
                call.set_result(message["result"])
        elif "ready" in message and not self.ready.done():
            self.ready.set_result(message["ready"])

    def send_command(self, op: str, /, **args: Any) -> int:
        """Send a command without waiting for an answer; return its number."""
        if self._writer is None or self._why is not None:
            raise EngineCrashed(self._why or "SGLang's process has not started")
        number = next(self._ids)
        self._writer.write(encode_frame({"id": number, "op": op, "args": args}))
        return number

    async def call_child(self, op: str, /, **args: Any) -> Any:
        """Send a command and return its result.

        Raises:
            CallFailed: the child could not do it.
            EngineCrashed: the child has ended.
        """
        number = self.send_command(op, **args)
        call = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            return await call
        finally:
            self._calls.pop(number, None)

    def fail_calls(self, why: str) -> None:
        """Fail the calls that wait, and all later ones."""
        if self._why is not None:
            return
        self._why = why
        for call in [*self._calls.values(), self.ready]:
            if not call.done():
                call.set_exception(EngineCrashed(why))
        if self.ready.done() and not self.ready.cancelled():
            self.ready.exception()  # retrieved, as nobody may be waiting for it
        if self._writer is not None:
            self._writer.close()

    def latest_metrics(self) -> str:
        """Return SGLang's latest page of metrics, empty at first, and fetch the next, which takes a while."""
        if self._fetching is None or self._fetching.done():
            with contextlib.suppress(RuntimeError):  # called outside the loop: no newer page
                self._fetching = asyncio.get_running_loop().create_task(self._fetch_metrics())
        return self._metrics

    async def _fetch_metrics(self) -> None:
        with contextlib.suppress(EngineError, CallFailed):
            self._metrics = await self.call_child("metrics")
