"""Connections to `MemoryApi`: routes, lists in pages, watches with bookmarks, and all that can go wrong with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rollout_common.kube.api_client import Answer, ApiRequest, Connections, Headers
from rollout_operator.api.objects import Obj
from tests.support.faults.memory_api import Change, Key, MemoryApi, Refused, status_body

BOOKMARK_SECONDS = 60.0
PAGE_ITEMS = 2
"""Of each list, so that all of them have several pages."""

Act = Callable[[], tuple[int, bytes]]
"""Does what is asked for, and returns code and body."""


@dataclass(eq=False)
class Watch:
    """An open watch: what it is about, what it is to bring, and how it stands."""

    resource: str
    namespace: str | None
    selector: str
    since: int
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    stalled: bool = False

    def take(self, change: Change) -> None:
        """Send what the change is to this watch; None: nothing."""
        if self.stalled or change.resource != self.resource or change.version <= self.since:
            return
        if self.namespace not in (None, change.obj["metadata"].get("namespace")):
            return
        now = change.kind != "DELETED" and selects(self.selector, change.obj)
        before = change.before is not None and selects(self.selector, change.before)
        if now or before:
            kind = ("MODIFIED" if before else "ADDED") if now else "DELETED"
            self.send(kind, change.obj)

    def send(self, kind: str, obj: Obj) -> None:
        self.lines.put_nowait(json.dumps({"type": kind, "object": obj}).encode() + b"\n")


def selects(selector: str, obj: Obj) -> bool:
    """Whether a label selector of equalities selects an object."""
    labels = obj["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        name, _, value = term.partition("=")
        if name.endswith("!"):
            if labels.get(name[:-1]) == value:
                return False
        elif labels.get(name) != value:
            return False
    return True


class MemoryServer:
    """One API server over a `MemoryApi`, and its troubles.

    Attributes:
        up: False: connections are refused.
        bookmarks: Whether watches get any.
        refused_watches: So many watches are answered by 410.
        cut_lists: So many lists end in the middle.
    """

    def __init__(self, api: MemoryApi) -> None:
        self.api = api
        self.up = True
        self.bookmarks = True
        self.refused_watches = 0
        self.cut_lists = 0
        self.watches: list[Watch] = []
        self._pages: dict[str, tuple[int, list[Obj]]] = {}
        api.on_change.append(self._tell)

    def _tell(self, change: Change) -> None:
        for watch in self.watches:
            watch.take(change)

    def end_watches(self) -> None:
        """End all streams, as a server that ends does; continuations of lists are lost, too."""
        for watch in self.watches:
            watch.lines.put_nowait(None)
        self._pages.clear()

    def answer(self, request: ApiRequest) -> tuple[int, bytes]:
        """Do a request that is no watch."""
        try:
            return 200, json.dumps(self._do(request)).encode()
        except Refused as refused:
            text = status_body(refused.code, refused.reason, str(refused))
            return refused.code, json.dumps(text).encode()

    def _do(self, request: ApiRequest) -> Obj:
        resource, namespace, name, sub = split_path(request)
        body = json.loads(request.content() or b"null")
        key: Key = (resource, namespace or "", name)
        match request.verb:
            case "create":
                return self.api.create(resource, body)
            case "get":
                return self.api.get(key)
            case "list":
                return self._page(request, resource, namespace)
            case "delete":
                uid = (body.get("preconditions") or {}).get("uid")
                return self.api.delete(key, uid=uid, grace=body.get("gracePeriodSeconds"))
        kind = request.content_type.removeprefix("application/").partition("-patch")[0]
        return self.api.patch(key, body, kind, sub, request.params.get("fieldManager", ""))

    def _page(self, request: ApiRequest, resource: str, namespace: str | None) -> Obj:
        params, token = request.params, request.params.get("continue", "")
        if token and token not in self._pages:
            raise Refused(410, "Expired", "The provided continue parameter is too old")
        selector = params.get("labelSelector", "")
        found = [o for o in self.api.of(resource, namespace) if selects(selector, o)]
        version, left = self._pages.pop(token, (self.api.version, found))
        meta: Obj = {"resourceVersion": str(version)}
        if left[PAGE_ITEMS:]:
            meta["continue"] = f"{version}/{len(left)}/{len(self._pages)}"
            self._pages[meta["continue"]] = version, left[PAGE_ITEMS:]
        return {"kind": "List", "metadata": meta, "items": left[:PAGE_ITEMS]}

    async def stream(self, request: ApiRequest) -> AsyncIterator[bytes]:
        """Yield the lines of a watch."""
        resource, namespace, _, _ = split_path(request)
        since = int(request.params["resourceVersion"])
        watch = Watch(resource, namespace, request.params.get("labelSelector", ""), since)
        if self.refused_watches or since < self.api.compacted:
            self.refused_watches = max(0, self.refused_watches - 1)
            watch.send("ERROR", status_body(410, "Expired", "too old resource version"))
            watch.lines.put_nowait(None)
        for change in self.api.history:
            watch.take(change)
        self.watches.append(watch)
        loop = asyncio.get_running_loop()
        end = loop.time() + float(request.params["timeoutSeconds"])
        try:
            while (left := end - loop.time()) > 0:
                try:
                    async with asyncio.timeout(min(left, BOOKMARK_SECONDS)):
                        line = await watch.lines.get()
                except TimeoutError:
                    if watch.stalled:
                        end = float("inf")  # nobody hears of its end either
                    elif self.bookmarks:
                        meta = {"resourceVersion": str(max(since, self.api.version))}
                        watch.send("BOOKMARK", {"kind": "x", "metadata": meta})
                    continue
                if line is None:
                    return
                yield line
        finally:
            self.watches.remove(watch)


def split_path(request: ApiRequest) -> tuple[str, str | None, str, str]:
    """Return resource, namespace, name and subresource of a request."""
    _, found, rest = request.path.partition("/namespaces/")
    if not found:
        return request.resource, None, "", ""
    namespace, _, name, sub, *_ = [*rest.split("/"), "", "", ""]
    return request.resource, namespace, name, sub


async def _one(chunk: bytes) -> AsyncIterator[bytes]:
    yield chunk


class MemoryConnections(Connections):
    """The connections of one process.

    Args:
        server: At their other end.
        send: Takes what a write is and does, and may let something happen to it.
    """

    def __init__(
        self, server: MemoryServer, send: Callable[[str, Act], Awaitable[tuple[int, bytes]]]
    ) -> None:
        self._server = server
        self._send = send

    @asynccontextmanager
    async def open_response(self, request: ApiRequest, headers: Headers) -> AsyncIterator[Answer]:
        await asyncio.sleep(0.001)
        if not self._server.up:
            raise ConnectionRefusedError("connection refused")
        if request.verb == "watch":
            yield Answer(200, None, self._server.stream(request))
            return
        if request.verb in ("get", "list"):
            code, body = self._server.answer(request)
            if request.verb == "list" and self._server.cut_lists:
                self._server.cut_lists -= 1
                body = body[: len(body) // 2]
        else:
            code, body = await self._send(request.what, lambda: self._server.answer(request))
        yield Answer(code, None, _one(body))

    async def close(self) -> None:
        """See the base class."""
