"""Calls to an application without sockets: its body comes in pieces, as from a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

PIECE = 2**16

GOOD_BODIES: dict[str, dict[str, Any]] = {
    "/v1/generate": {"token_ids": [5], "sampling": {"max_tokens": 1}},
    "/v1/completions": {"prompt": [5], "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/abort": {"request_ids": ["none"]},
    "/v1/weights/stage": {"epoch": 1, "version": 1, "source": {"checkpoint": {}}},
    **{
        f"/v1/weights/{verb}": {"epoch": 1, "version": 1} for verb in ("commit", "discard", "offer")
    },
    "/v1/require": {"epoch": 1},
    **{f"/v1/{verb}": {} for verb in ("pause", "resume", "sleep", "wake", "cache/reset")},
}
"""One for each POST route of a worker's ports."""
DATA_PATHS = ("/v1/generate", "/v1/completions", "/v1/chat/completions")
"""Those of the data port."""


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> Any:
        """The content, which must be JSON."""
        return json.loads(self.content)

    @property
    def slug(self) -> str:
        """The kind of problem; of OpenAI's routes, its code."""
        if "error" in self.body:
            return str(self.body["error"]["code"])
        return str(self.body["type"]).removeprefix("urn:rollout:problem:")


async def call(
    app: ASGIApp,
    path: str,
    body: bytes = b"",
    method: str = "POST",
    *,
    client: str = "127.0.0.1",
    stays: bool = False,
    gone: asyncio.Event | None = None,
    deaf: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send a request and return its answer.

    Args:
        app: The application.
        path: Of the route.
        body: All of it.
        method: Of the request.
        client: The caller's address.
        stays: The body never ends.
        gone: The client disconnects once this is set; None: it never does.
        deaf: The client reads nothing of the answer's body.
        headers: In lower case; `host` is the loopback's unless given.
    """
    given = {"host": "127.0.0.1", **(headers or {})}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(k.encode(), v.encode("latin-1")) for k, v in given.items()],
        "client": (client, 50000),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }
    pieces = [body[at : at + PIECE] for at in range(0, len(body), PIECE)] or [b""]
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.sleep(0)
        if pieces:
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces) or stays}
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if deaf and message["type"] == "http.response.body":
            await asyncio.Event().wait()

    await app(scope, receive, send)
    start, *rest = sent
    found = {k.decode(): v.decode("latin-1") for k, v in start["headers"]}
    return Answer(start["status"], found, b"".join(each.get("body", b"") for each in rest))
