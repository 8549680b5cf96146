"""A collection of the API server, listed and then watched: what it holds, and each change of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from .access import Obj
from .api_client import ApiClient, ApiRequest
from .errors import Gone, KubeError, from_answer
from .settings import MAX_RETRY_PAUSE_SECONDS, MIN_RETRY_PAUSE_SECONDS, WATCH_TIMEOUT_SECONDS

T = TypeVar("T")

PAGE_ITEMS = 100
"""Fewer than kubectl asks for: a page is decoded whole, and its memory stays with the process."""


@dataclass(frozen=True, slots=True)
class Collection:
    """What to list or watch; `what` is it in words, `params` has the selectors."""

    resource: str
    path: str
    what: str
    params: Mapping[str, str] = field(default_factory=dict)


class ListPage(NamedTuple):
    """A part of a list; `resource_version` is that of the whole list."""

    items: list[Obj]
    resource_version: str


async def list_pages(
    api: ApiClient, of: Collection, limit: int = PAGE_ITEMS
) -> AsyncGenerator[ListPage]:
    """Yield a list page by page.

    Raises:
        Gone: The continuation expired (the list took minutes): begin again.
    """
    params = {"limit": str(limit), **of.params}
    what = f"list {of.what}"
    while True:
        answer = await api.send_request(ApiRequest("list", of.resource, of.path, what, params))
        try:
            meta = answer["metadata"]
            page = ListPage(list(answer.get("items") or ()), str(meta["resourceVersion"]))
            for item in page.items:
                _check_object(item)
                # The API server says these once for the whole list.
                item.setdefault("apiVersion", answer.get("apiVersion"))
                item.setdefault("kind", str(answer.get("kind")).removesuffix("List"))
        except (KeyError, TypeError) as error:
            text = f"{what}: the answer is not a list of objects: {error!r}"
            raise KubeError(0, "BadAnswer", text) from error
        yield page
        if not meta.get("continue"):
            return
        params["continue"] = meta["continue"]


async def watch_events(
    api: ApiClient, of: Collection, version: str, seconds: float
) -> AsyncGenerator[tuple[str, Obj]]:
    """Yield the events after `version`, as (type, object), for so many seconds.

    Raises:
        Gone: The API server has not kept the events since then: list again.
    """
    params = {
        **of.params,
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": version,
        "timeoutSeconds": f"{seconds:.0f}",
    }
    what = f"watch {of.what}"
    request = ApiRequest("watch", of.resource, of.path, what, params)
    async with aclosing(api.stream_objects(request, seconds)) as events:
        async for event in events:
            try:
                kind, obj = event["type"], event["object"]
                if kind not in ("BOOKMARK", "ERROR"):
                    _check_object(obj)
            except (KeyError, TypeError) as error:
                text = f"{what}: the answer is not an event: {error!r}"
                raise KubeError(0, "BadAnswer", text) from error
            if kind == "ERROR":
                raise from_answer(int(obj.get("code", 500)), json.dumps(obj).encode(), what, None)
            if kind != "BOOKMARK":
                yield kind, obj


def _check_object(obj: Obj) -> None:
    """Raise a KeyError or TypeError unless it has what everybody relies on."""
    str(obj["metadata"]["name"])


def retry_pause(
    attempt: int,
    shortest: float = MIN_RETRY_PAUSE_SECONDS,
    longest: float = MAX_RETRY_PAUSE_SECONDS,
) -> float:
    """Return how long to wait before the n-th try again (from 0), spread over many clients."""
    return min(longest, shortest * 2.0 ** min(attempt, 10)) * random.uniform(0.5, 1.0)


class ListedValues(NamedTuple, Generic[T]):
    """What a collection held at one version."""

    values: list[T]
    resource_version: str


class WatchedValue(NamedTuple, Generic[T]):
    """What an event is about; `kind` is ADDED, MODIFIED or DELETED."""

    kind: str
    value: T


async def follow_collection(
    api: ApiClient,
    of: Collection,
    read: Callable[[Obj], T],
    trouble: Callable[[KubeError | None], None],
    *,
    seconds: float = WATCH_TIMEOUT_SECONDS,
    pauses: tuple[float, float] = (MIN_RETRY_PAUSE_SECONDS, MAX_RETRY_PAUSE_SECONDS),
    wait: Callable[[], Awaitable[None]] | None = None,
    begin: Callable[[], None] = lambda: None,
) -> AsyncGenerator[ListedValues[T] | WatchedValue[T]]:
    """Yield a list, then each event from there, and begin again after some time or whatever ends it.

    So a late or missed event costs time only. Nothing ends it but its consumer, or an error of `read`,
    `trouble` or `wait`.

    Args:
        api: The API server.
        of: What to follow.
        read: Makes what is yielded of an object, as soon as it is decoded.
        trouble: Takes what fails, and None once nothing does.
        seconds: How long a watch follows events before it lists again.
        pauses: The shortest and the longest pause between two watches.
        wait: Awaited between two lists instead of a watch.
        begin: Called before each list is asked for. All that is known then is also in the list.
    """
    attempt, (shortest, longest), clock = 0, pauses, asyncio.get_running_loop().time
    while True:
        began = clock()
        begin()
        try:
            async with aclosing(_list_and_watch(api, of, read, seconds, wait)) as cycle:
                async for step in cycle:
                    if isinstance(step, ListedValues):
                        trouble(None)
                    yield step
        except Gone:
            pass  # the list is too old for its events: take another one
        except KubeError as error:
            trouble(error)
        # However it ended: something between here and there may end each watch at once.
        lasted = clock() - began >= min(longest, seconds / 2)
        attempt = 0 if lasted else attempt + 1
        await asyncio.sleep(retry_pause(max(0, attempt - 1), shortest, longest))


async def _list_and_watch(
    api: ApiClient,
    of: Collection,
    read: Callable[[Obj], T],
    seconds: float,
    wait: Callable[[], Awaitable[None]] | None,
) -> AsyncGenerator[ListedValues[T] | WatchedValue[T]]:
    values: list[T] = []
    version = ""
    async with aclosing(list_pages(api, of)) as pages:
        async for page in pages:
            version = version or page.resource_version
            values.extend(map(read, page.items))
    yield ListedValues(values, version)
    del values, page  # what its consumer replaces or trims is not kept here while the watch lasts
    if wait is not None:
        await wait()
        return
    async with aclosing(watch_events(api, of, version, seconds)) as events:
        async for kind, obj in events:
            yield WatchedValue(kind, read(obj))


class Reflector(Generic[T]):
    """Keeps a value for each object of a collection, by the object's name.

    What is known stays so while the API server is away.

    Args:
        follow: Calls `follow_collection` and returns what that yields: the name of each object, unique among
            them, and its value; None: the object does not count.
    """

    def __init__(
        self,
        follow: Callable[
            [],
            AsyncGenerator[ListedValues[tuple[str, T | None]] | WatchedValue[tuple[str, T | None]]],
        ],
    ) -> None:
        self.values: dict[str, T] = {}
        self.listed = False
        self._follow = follow

    async def changes(self) -> AsyncGenerator[list[tuple[T | None, T | None]]]:
        """Yield, after each list and each event, what has changed: values before and after."""
        async with aclosing(self._follow()) as steps:
            async for step in steps:
                if isinstance(step, ListedValues):
                    yield self._replace_values(step.values)
                    continue
                name, now = step.value
                now = None if step.kind == "DELETED" else now
                was = self.values.get(name)
                if now is not None:
                    self.values[name] = now
                elif was is not None:
                    del self.values[name]
                if was != now:
                    yield [(was, now)]

    def _replace_values(self, named: list[tuple[str, T | None]]) -> list[tuple[T | None, T | None]]:
        found = {name: value for name, value in named if value is not None}
        before, self.values, self.listed = self.values, found, True
        pairs = ((before.get(name), found.get(name)) for name in before.keys() | found.keys())
        return [(was, now) for was, now in pairs if was != now]
