"""A collection of the API server, listed and then watched: what it holds, and each change of it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from .access import Obj
from .api_client import ApiClient, ApiRequest
from .errors import Gone, KubeError, from_answer
from .settings import MAX_RETRY_PAUSE_SECONDS, MIN_RETRY_PAUSE_SECONDS, WATCH_TIMEOUT_SECONDS

T = TypeVar("T")

PAGE_ITEMS = 500
"""As kubectl asks for."""


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


class Reflector(Generic[T]):
    """Keeps a value for each object of a collection, by the object's name.

    A watch lists, follows the events from there, and begins again after some time or whatever ends it:
    a late or missed event costs time only. What is known stays so while the API server is away.

    Args:
        api: The API server.
        of: What to follow; of one namespace, or of none, because names must be unique.
        read: Makes the value of an object; None: the object does not count.
        trouble: Takes what fails, and None once nothing does; what it raises ends `changes`.
        seconds: How long a watch follows events before it lists again.
        pauses: The shortest and the longest pause between two watches.
    """

    def __init__(
        self,
        api: ApiClient,
        of: Collection,
        read: Callable[[Obj], T | None],
        trouble: Callable[[KubeError | None], None],
        *,
        seconds: float = WATCH_TIMEOUT_SECONDS,
        pauses: tuple[float, float] = (MIN_RETRY_PAUSE_SECONDS, MAX_RETRY_PAUSE_SECONDS),
    ) -> None:
        self.values: dict[str, T] = {}
        self.listed = False
        self._api, self._of, self._read, self._trouble = api, of, read, trouble
        self._seconds, self._pauses = seconds, pauses

    async def changes(self) -> AsyncGenerator[list[tuple[T | None, T | None]]]:
        """Yield, after each list and each event, what has changed: values before and after.

        Nothing ends it but its consumer, or an error of `read` or `trouble`.
        """
        attempt, (shortest, longest) = 0, self._pauses
        while True:
            began = time.monotonic()
            try:
                async with aclosing(self._list_and_watch()) as cycle:
                    async for changed in cycle:
                        yield changed
            except Gone:
                pass  # the list is too old for its events: take another one
            except KubeError as error:
                self._trouble(error)
            # However it ended: something between here and there may end each watch at once.
            attempt = 0 if time.monotonic() - began >= longest else attempt + 1
            await asyncio.sleep(retry_pause(max(0, attempt - 1), shortest, longest))

    async def _list_and_watch(self) -> AsyncGenerator[list[tuple[T | None, T | None]]]:
        found: dict[str, T] = {}
        version = ""
        async with aclosing(list_pages(self._api, self._of)) as pages:
            async for page in pages:
                version = version or page.resource_version
                for obj in page.items:
                    self._put_object(found, obj)
        before, self.values, self.listed = self.values, found, True
        self._trouble(None)
        both = ((before.get(name), found.get(name)) for name in before.keys() | found.keys())
        yield [(was, now) for was, now in both if was != now]
        events = watch_events(self._api, self._of, version, self._seconds)
        async with aclosing(events):
            async for kind, obj in events:
                name = obj["metadata"]["name"]
                was = self.values.get(name)
                if kind == "DELETED":
                    self.values.pop(name, None)
                else:
                    self._put_object(self.values, obj)
                now = self.values.get(name)
                if was != now:
                    yield [(was, now)]

    def _put_object(self, found: dict[str, T], obj: Obj) -> None:
        value, name = self._read(obj), obj["metadata"]["name"]
        if value is None:
            found.pop(name, None)
        else:
            found[name] = value
