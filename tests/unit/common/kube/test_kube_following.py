"""How a collection is followed: lists and events in order, and how soon the next list comes."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from rollout_common.kube.access import Obj
from rollout_common.kube.api_client import ApiClient, ApiRequest
from rollout_common.kube.errors import KubeError, Unavailable
from rollout_common.kube.reflector import Collection, ListedValues, WatchedValue, follow_collection
from tests.support.unit import virtualtime

PODS = Collection("pods", "/api/v1/pods", "pods *")


class _Server(ApiClient):
    """An API server with one pod; each watch brings one event, and ends after its time, or at once."""

    def __init__(self, clock: Callable[[], float], *, at_once: bool = False) -> None:
        self.listed_at: list[float] = []
        self._clock = clock
        self._at_once = at_once
        self.down = False

    async def send_request(self, request: ApiRequest) -> Obj:
        self.listed_at.append(self._clock())
        if self.down:
            raise Unavailable(0, "NoAnswer", "it is down")
        return {"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "a"}}]}

    async def stream_objects(self, request: ApiRequest, seconds: float) -> AsyncGenerator[Obj]:
        assert request.params["resourceVersion"] == "7"
        yield {"type": "BOOKMARK", "object": {}}
        yield {"type": "MODIFIED", "object": {"metadata": {"name": "b"}}}
        await asyncio.sleep(0 if self._at_once else seconds)


async def _follow(
    server: _Server, clock: Callable[[], float], until: float, seconds: float, **more: Any
) -> tuple[list[Any], list[KubeError | None]]:
    steps: list[Any] = []
    troubles: list[KubeError | None] = []

    def name(obj: Obj) -> str:
        return str(obj["metadata"]["name"])

    following = follow_collection(server, PODS, name, troubles.append, seconds=seconds, **more)
    try:
        async with asyncio.timeout_at(until), aclosing(following):
            async for step in following:
                steps.append(step)  # noqa: PERF401 - what came before the end counts
    except TimeoutError:
        pass
    return steps, troubles


def test_a_list_is_followed_by_its_events_and_then_by_the_next_list() -> None:
    async def scene(clock: Callable[[], float]) -> None:
        steps, troubles = await _follow(_Server(clock), clock, 15, 10)
        cycle = [ListedValues(["a"], "7"), WatchedValue("MODIFIED", "b")]
        assert steps == [*cycle, *cycle]
        assert troubles == [None, None]

    virtualtime.run(scene)


class _Item(dict[str, Any]):
    """An object of a list that can be referred to weakly."""


def test_no_page_of_a_list_is_kept_while_its_watch_lasts() -> None:
    items: list[weakref.ref[_Item]] = []

    class Server(_Server):
        async def send_request(self, request: ApiRequest) -> Obj:
            item = _Item(metadata={"name": "a"})
            items.append(weakref.ref(item))
            return {"metadata": {"resourceVersion": "7"}, "items": [item]}

    async def scene(clock: Callable[[], float]) -> None:
        following = follow_collection(Server(clock), PODS, len, lambda _: None, seconds=10)
        async with aclosing(following):
            await anext(following)
            assert items[0]() is not None
            await anext(following)
            assert items[0]() is None

    virtualtime.run(scene)


@pytest.mark.parametrize("seconds", [5, 300])
def test_watches_that_last_their_time_follow_each_other_at_once(seconds: float) -> None:
    async def scene(clock: Callable[[], float]) -> None:
        server = _Server(clock)
        await _follow(server, clock, 10 * seconds, seconds)
        assert len(server.listed_at) == 10

    virtualtime.run(scene)


@pytest.mark.parametrize("what", ["ends", "fails"])
def test_what_ends_at_once_is_tried_again_more_and_more_slowly(what: str) -> None:
    async def scene(clock: Callable[[], float]) -> None:
        server = _Server(clock, at_once=True)
        server.down = what == "fails"
        _, troubles = await _follow(server, clock, 100, 300)
        assert 10 < len(server.listed_at) < 30
        assert {type(each) for each in troubles} == {Unavailable if server.down else type(None)}

    virtualtime.run(scene)


def test_where_events_come_another_way_lists_follow_each_other() -> None:
    async def scene(clock: Callable[[], float]) -> None:
        async def wait() -> None:
            await asyncio.sleep(20)

        steps, _ = await _follow(_Server(clock), clock, 50, 300, wait=wait)
        assert steps == [ListedValues(["a"], "7")] * 3

    virtualtime.run(scene)
