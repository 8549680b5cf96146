"""Whom the client asks whether it serves, what it makes of the answer, and when it cuts off."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rollout_client import WeightsId
from rollout_client.discovery.pool_members import Member
from rollout_client.http_clients import MemberClients
from rollout_client.routing import settings
from rollout_client.routing.balancer import LoadBalancer
from rollout_client.routing.health_checker import HealthChecker, probe_pause_after
from rollout_client.routing.member_records import WeightsBounds
from rollout_client.routing.router import AttemptLease, RequestRouter
from tests.support.loopback import Loopback, loopback
from tests.support.unit.states import worker_info
from tests.support.waiting import until

FLOOR = WeightsBounds(epoch=1, min_version=5)
LOOKS_SECONDS = 0.1
"""Some rounds of checks, as often as they come in these tests."""


def weights(version: int) -> dict[str, Any]:
    active: dict[str, Any] = {"epoch": 1, "version": version, "root_hash": None, "labels": {}}
    return {"active": active, "commit_seq": 1, "said_by_a_newer_worker": 1}


class Watched:
    """A router with one member, and what is asked of it."""

    def __init__(self, server: Loopback) -> None:
        self.server = server
        self.router = RequestRouter(LoadBalancer(), look_seconds=60)
        self.member = Member(server.url, "w0")
        self.router.balancer.set_members([self.member], 0.0)
        self.record = self.router.balancer.records[server.url]
        server.answer("GET", "/ready", {"status": "ready"})
        server.answer("GET", "/v1/weights", weights(4))
        server.answer("GET", "/health", {"status": "ok"})

    def asked(self, path: str) -> int:
        return self.server.requests.count(("GET", path, ""))

    def exclude(self, until: float | None = None) -> None:
        record = self.router.balancer.records[self.member.url]
        record.exclude_until("reset", time.monotonic(), until)


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    async with loopback() as server:
        yield Watched(server)


@asynccontextmanager
async def watching(watched: Watched, **options: float) -> AsyncIterator[HealthChecker]:
    connections = MemberClients()
    health = HealthChecker(watched.router, connections, **options)
    task = asyncio.create_task(health.run_checks())
    try:
        yield health
    finally:
        task.cancel()
        await asyncio.wait({task})
        await connections.close()


# Probes.


@pytest.mark.parametrize("why", ["no cause", "excluded for a time", "asked later", "gone"])
async def test_who_gives_no_reason_is_not_asked(watched: Watched, why: str) -> None:
    if why != "no cause":
        watched.exclude(time.monotonic() + 60 if why == "excluded for a time" else None)
    if why == "asked later":
        watched.record.probe_at = time.monotonic() + 60
    watched.record.present = why != "gone"
    async with watching(watched):
        await asyncio.sleep(LOOKS_SECONDS)
    assert watched.server.requests == []


async def test_who_is_passed_over_is_asked_for_its_weights(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would stay idle, since no request waits for it."""
    monkeypatch.setattr(settings, "PASSED_OVER_SECONDS", 0.0)
    watched.record.active = WeightsId(epoch=1, version=4)
    watched.router.balancer.set_members([watched.member, Member("http://other", "w1")], 0.0)
    for _ in range(2):
        chosen = watched.router.balancer.choose_member(None, time.monotonic(), FLOOR)
        assert chosen is not None
        assert chosen.name == "w1"
    watched.server.answer("GET", "/v1/weights", weights(6))
    async with watching(watched):
        await until(lambda: watched.record.active == WeightsId(epoch=1, version=6), what="its news")
        await asyncio.sleep(LOOKS_SECONDS)
    assert watched.asked("/v1/weights") == 1, "nobody passes it over any more"


async def test_where_requests_run_the_ends_of_outputs_are_asked_for_once(watched: Watched) -> None:
    page = worker_info(eos_token_ids=[2, 9], said_by_a_newer_worker=1)
    watched.server.answer("GET", "/v1/info", page)
    async with watching(watched):
        await watched.router.choose_member(None, time.monotonic())
        with watched.router.lease_member(watched.member):
            await until(lambda: watched.record.info, what="what it is")
            await asyncio.sleep(LOOKS_SECONDS)
        assert watched.record.info is not None
        assert watched.record.info.eos_token_ids == (2, 9)
        assert watched.asked("/v1/info") == 1
        watched.exclude()
        assert watched.record.info is None, "another process may come back"


async def test_an_older_worker_does_not_say_what_ends_outputs(watched: Watched) -> None:
    page = worker_info()
    del page["eos_token_ids"]
    watched.server.answer("GET", "/v1/info", page)
    async with watching(watched):
        await watched.router.choose_member(None, time.monotonic())
        with watched.router.lease_member(watched.member):
            await until(lambda: watched.record.info_at, what="the answer")
            await asyncio.sleep(LOOKS_SECONDS)
    assert watched.record.info is None
    assert watched.asked("/v1/info") == 1, "not asked again at once"


async def test_who_is_excluded_is_asked_and_readmitted_with_its_weights(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.exclude()
    with caplog.at_level(logging.INFO, "rollout_client"):
        async with watching(watched):
            waiting = asyncio.create_task(watched.router.choose_member(None, time.monotonic() + 30))
            assert (await asyncio.wait_for(waiting, 10)).name == "w0", "who waits is woken"
            await asyncio.sleep(LOOKS_SECONDS)
    assert watched.record.excluded == ""
    assert watched.record.failures == 0
    assert watched.record.active == WeightsId(epoch=1, version=4)
    assert caplog.messages == ["w0 serves again"]
    assert watched.asked("/ready") == 1, "it serves: no more questions"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (({"detail": "asleep"}, 503), "asleep"),
        (({"detail": "x" * 300}, 503), "x" * 200),
        (({"other": 1}, 503), "GET /ready: 503"),
        (("bad gateway", 502), "GET /ready: 502"),
        (([1], 502), "GET /ready: 502"),
    ],
    ids=["a problem", "a long one", "no detail", "no JSON", "no object"],
)
async def test_who_does_not_serve_stays_out_with_its_own_reason(
    watched: Watched, answer: tuple[Any, int], why: str
) -> None:
    watched.exclude()
    watched.server.answer("GET", "/ready", *answer)
    async with watching(watched):
        await until(lambda: watched.record.failures == 3, what="two probes")
    assert (watched.record.excluded, watched.record.excluded_until) == (why, None)
    assert watched.asked("/v1/weights") == 0


def test_the_longer_it_is_out_the_less_often_it_is_asked() -> None:
    pauses = [probe_pause_after(failures) for failures in (0, 1, 2, 3, 4, 5, 6, 2000)]
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0])


async def test_who_does_not_serve_is_not_asked_again_at_once(watched: Watched) -> None:
    watched.server.answer("GET", "/ready", {}, 503)
    watched.exclude()
    watched.record.failures = 2000
    async with watching(watched):
        await until(lambda: watched.record.failures == 2001, what="the probe")
        assert 1.0 < watched.record.probe_at - time.monotonic() <= 3.0
        await asyncio.sleep(LOOKS_SECONDS)
    assert watched.asked("/ready") == 1


async def test_who_is_too_old_for_somebody_is_asked_until_it_is_not(watched: Watched) -> None:
    watched.record.active = WeightsId(epoch=1, version=3)
    began = time.monotonic()
    async with watching(watched):
        waiting = asyncio.create_task(
            watched.router.choose_member(None, time.monotonic() + 30, FLOOR)
        )
        await until(lambda: watched.asked("/v1/weights") == 2, what="two looks at its weights")
        assert watched.record.probe_at >= began + settings.WEIGHTS_PROBE_SECONDS, (
            "not with every look around"
        )
        assert not waiting.done()
        assert watched.record.active == WeightsId(epoch=1, version=4)
        watched.server.answer("GET", "/v1/weights", weights(5))
        await asyncio.wait_for(waiting, 10)
        asked = watched.asked("/v1/weights")
        await asyncio.sleep(2 * settings.WEIGHTS_PROBE_SECONDS)
    assert watched.asked("/v1/weights") == asked


@pytest.mark.parametrize(
    "answer",
    [({"active": None}, 200), ({"active": 5}, 200), ("no JSON", 502)],
    ids=["none yet", "another shape", "an error"],
)
async def test_weights_that_are_not_told_are_unknown(
    watched: Watched, answer: tuple[Any, int]
) -> None:
    watched.exclude()
    watched.record.active = WeightsId(epoch=1, version=3)
    watched.server.answer("GET", "/v1/weights", *answer)
    async with watching(watched):
        await until(lambda: not watched.record.excluded, what="it to be readmitted")
    assert watched.record.active is None


async def test_an_answer_for_a_member_that_was_replaced_is_dropped(watched: Watched) -> None:
    release = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.json_response({"status": "ready"})

    watched.server.answers["GET", "/ready"] = slow
    watched.exclude()
    async with watching(watched):
        await until(lambda: watched.asked("/ready") == 1, what="the probe")
        watched.router.balancer.set_members([], 0.0)
        watched.router.balancer.set_members([watched.member], 0.0)
        watched.exclude()
        again = watched.router.balancer.records[watched.member.url]
        again.probe_at = time.monotonic() + 60
        release.set()
        await asyncio.sleep(LOOKS_SECONDS)
    assert again.excluded == "reset"


# Silence.


class Attempts:
    """Attempts on a member that hear nothing."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.cut: list[str] = []
        self.leases: list[AttemptLease] = []

    async def run(self, seconds: float = 30) -> None:
        self.watched.record.in_flight += 1
        with self.watched.router.lease_member(self.watched.member) as lease:
            self.leases.append(lease)
            try:
                async with asyncio.timeout(seconds) as scope:
                    lease.watch_timeout(scope)
                    await asyncio.sleep(60)
            except TimeoutError:
                self.cut.append(lease.cut)
            finally:
                lease.watch_timeout(None)


async def test_who_is_silent_but_alive_is_waited_for(watched: Watched) -> None:
    attempts = Attempts(watched)
    began = time.monotonic()
    running = asyncio.create_task(attempts.run())
    async with watching(watched, silent_seconds=0.1):
        await until(lambda: watched.asked("/health") == 3, what="three questions")
        assert time.monotonic() - began >= 3 * 0.1, "one in so many seconds"
    assert attempts.cut == []
    running.cancel()
    await asyncio.wait({running})


async def test_who_is_silent_and_not_alive_is_left(watched: Watched) -> None:
    watched.server.answer("GET", "/health", {"status": "bad"}, 503)
    attempts = Attempts(watched)
    began = time.monotonic()
    running = [asyncio.create_task(attempts.run()) for _ in range(2)]
    await until(lambda: len(attempts.leases) == 2, what="both attempts")
    for lease in attempts.leases:
        lease.heard_at = began
    async with watching(watched, silent_seconds=0.3):
        await asyncio.wait_for(asyncio.gather(*running), 10)
    assert attempts.cut == ["silent for 0.3 s, and then GET /health: 503"] * 2
    assert watched.asked("/health") == 1, "one question for all of them"
    assert time.monotonic() - began >= 0.3


async def test_nobody_is_asked_about_an_attempt_that_is_cut(watched: Watched) -> None:
    """It ends one turn of the loop later, and a check may come first."""
    with watched.router.lease_member(watched.member) as lease:
        async with asyncio.timeout(30) as scope:
            lease.watch_timeout(scope)
            lease.heard_at, lease.cut = time.monotonic() - 10, "silent"
            async with watching(watched, silent_seconds=0.1):
                await asyncio.sleep(0.5)
            lease.watch_timeout(None)
    assert watched.asked("/health") == 0


async def test_who_speaks_while_it_is_asked_is_not_left(watched: Watched) -> None:
    attempts = Attempts(watched)

    async def bad(request: web.Request) -> web.StreamResponse:
        attempts.leases[0].note_heard()
        return web.json_response({}, status=503)

    watched.server.answers["GET", "/health"] = bad
    async with watching(watched, silent_seconds=0.3):
        await attempts.run(0.5)
    assert attempts.cut == [""]


async def test_attempts_on_a_member_that_is_gone_end_after_a_shorter_silence(
    watched: Watched,
) -> None:
    attempts = Attempts(watched)
    running = asyncio.create_task(attempts.run())
    async with watching(watched, silent_seconds=60, gone_seconds=0.3):
        await asyncio.sleep(0.35)
        assert attempts.cut == [], "it is there: its silence means nothing yet"
        attempts.leases[0].note_heard()
        watched.router.balancer.set_members([], 0.0)
        left = time.monotonic()
        await asyncio.wait_for(running, 10)
    assert attempts.cut == ["its replica is gone"]
    assert time.monotonic() - left >= 0.25
    assert not watched.asked("/health")
