"""Events: none is lost, several are posted at once, and what has become old is not posted at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout_operator.kube.event_recorder import CONCURRENT_POSTS, EventRecorder
from rollout_operator.kube.kube_client import KubeClient
from tests.support.loopback import Loopback, kubeconfig, loopback
from tests.support.waiting import until

EVENTS = "/apis/events.k8s.io/v1/namespaces/rl/events"


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loopback]:
    async with loopback() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        server.answer("POST", EVENTS, {"kind": "Event"}, 201)
        yield server


def pool(number: int) -> dict[str, Any]:
    return {"metadata": {"namespace": "rl", "name": f"p{number}", "uid": f"u{number}"}}


async def posted(api: Loopback, recorder: EventRecorder) -> list[tuple[str, str]]:
    """Post what waits; the names of pools and the notes."""
    task = asyncio.create_task(recorder.run())
    await until(lambda: not recorder.waiting_count(), 20, what="the events to be posted")
    await recorder.flush_events(task)
    bodies = [json.loads(body) for _, _, body in api.requests]
    return sorted((b["regarding"]["name"], b["note"]) for b in bodies)


async def test_events_are_posted_several_at_once(api: Loopback) -> None:
    api.delay("POST", EVENTS, {"kind": "Event"}, 0.1)
    async with KubeClient() as kube:
        recorder = EventRecorder(kube, instance="o")
        for number in range(2 * CONCURRENT_POSTS):
            recorder.record_event(pool(number), "Normal", "Ready", "it serves")
        assert len(await posted(api, recorder)) == 2 * CONCURRENT_POSTS
    assert api.most_at_once == CONCURRENT_POSTS


async def test_the_newest_of_one_reason_is_posted(api: Loopback) -> None:
    async with KubeClient() as kube:
        recorder = EventRecorder(kube, instance="o")
        for text in ("one", "two", "three", "one"):
            recorder.record_event(pool(0), "Normal", "Ready", text)
        recorder.record_event(pool(0), "Normal", "NotReady", "two")
        recorder.record_event(pool(1), "Normal", "Ready", "two")
        assert await posted(api, recorder) == [("p0", "one"), ("p0", "two"), ("p1", "two")]


async def test_no_event_is_dropped_or_repeated_for_ten_minutes_however_many_there_are(
    api: Loopback,
) -> None:
    now = 0.0
    async with KubeClient() as kube:
        recorder = EventRecorder(kube, instance="o", clock=lambda: now)
        for _ in range(3):
            for number in range(1100):
                recorder.record_event(pool(number), "Normal", "Ready", "it serves")
            now += 299.0
        now += 10.0
        recorder.record_event(pool(0), "Warning", "BackOff", "again")
        assert len(await posted(api, recorder)) == 1101


async def test_an_event_that_is_refused_holds_no_other_up(api: Loopback) -> None:
    api.answer("POST", EVENTS, {"reason": "Forbidden", "message": "no"}, 403)
    async with KubeClient() as kube:
        recorder = EventRecorder(kube, instance="o")
        for number in range(3):
            recorder.record_event(pool(number), "Normal", "Ready", "it serves")
        assert len(await posted(api, recorder)) == 3
