"""Who gets a member, who waits for one and why, and what ends an attempt from outside."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import pytest

from rollout_client import NoReplica, PoolClosed, WeightsId
from rollout_client.discovery.pool_members import Member
from rollout_client.routing.balancer import LoadBalancer
from rollout_client.routing.member_records import WeightsBounds
from rollout_client.routing.router import AttemptLease, RequestRouter
from tests.support.waiting import until

URL = "http://w0:8000"
FLOOR = WeightsBounds(epoch=1, min_version=5)


def members(count: int) -> list[Member]:
    return [Member(f"http://w{i}:8000", f"w{i}") for i in range(count)]


def router(count: int, trouble: str = "") -> RequestRouter:
    """A router whose requests look again only when they are woken."""
    made = RequestRouter(LoadBalancer(), lambda: trouble, look_seconds=60)
    made.balancer.set_members(members(count), 0.0)
    return made


def later(seconds: float) -> float:
    return time.monotonic() + seconds


# Choosing.


async def test_a_member_is_counted_as_soon_as_it_is_chosen() -> None:
    made = router(1)
    member = await made.choose_member(None, later(1))
    assert member.url == URL
    assert made.balancer.records[URL].in_flight == 1
    with made.lease_member(member) as lease:
        assert made.leases == {lease}
        assert lease.member is member
    assert made.leases == set()
    assert made.balancer.records[URL].in_flight == 0


async def test_who_waits_gets_the_first_member_that_comes() -> None:
    made = router(0)
    waiting = asyncio.create_task(made.choose_member(None, later(30), FLOOR))
    await until(lambda: made.waiting_bounds, what="the request to wait")
    assert made.waiting_bounds == [FLOOR]
    made.balancer.set_members(members(1), 0.0)
    made.notify_waiting()
    assert (await asyncio.wait_for(waiting, 10)).url == URL, "at once, not at its next look"
    assert made.waiting_bounds == []


@pytest.mark.parametrize("refused", [False, True])
async def test_a_member_that_comes_back_by_time_alone_is_found(*, refused: bool) -> None:
    """Also where discovery may not list the members any more."""
    made = RequestRouter(LoadBalancer(), look_seconds=0.05, refused=lambda: refused)
    made.balancer.set_members(members(1), 0.0)
    now = time.monotonic()
    made.balancer.records[URL].exclude_until("its queue is full", now, now + 0.2)
    assert (await asyncio.wait_for(made.choose_member(None, later(30)), 10)).url == URL
    assert time.monotonic() - now >= 0.2


async def test_who_waits_is_woken_by_the_end_of_a_lease() -> None:
    made = router(1)
    other = asyncio.create_task(made.choose_member(None, later(30), FLOOR))
    made.balancer.records[URL].active = WeightsId(epoch=1, version=4)
    await until(lambda: made.waiting_bounds, what="the request to wait")
    with made.lease_member(members(1)[0]):
        made.balancer.records[URL].active = WeightsId(epoch=1, version=5)
    assert (await asyncio.wait_for(other, 10)).url == URL


async def test_a_request_that_gives_up_waits_no_more() -> None:
    made = router(0)
    waiting = asyncio.create_task(made.choose_member(None, later(30)))
    await until(lambda: made.waiting_bounds, what="the request to wait")
    waiting.cancel()
    await asyncio.wait({waiting})
    assert made.waiting_bounds == []


async def test_at_its_time_a_request_is_told_why_nobody_took_it() -> None:
    made = router(1, "discovery: cannot list")
    made.balancer.records[URL].exclude_until("asleep", 0.0)
    began = time.monotonic()
    with pytest.raises(NoReplica) as error:
        await made.choose_member(None, began + 0.2)
    assert error.value.cause == (
        "no replica could take the request in time (w0: asleep; discovery: cannot list)"
    )
    assert 0.2 <= time.monotonic() - began < 10, "at its own time, not at the next look"
    with pytest.raises(NoReplica):
        await made.choose_member(None, time.monotonic() - 1)
    assert router(0).refusal_reasons() == "no members have been discovered"
    assert (
        router(0, "no such host").refusal_reasons()
        == "no members have been discovered; no such host"
    )
    assert router(1).refusal_reasons(FLOOR) == "w0: serves"


async def test_a_closed_router_refuses_even_what_could_be_served() -> None:
    made = router(1)
    made.closed = True
    with pytest.raises(PoolClosed, match="the pool was closed"):
        await made.choose_member(None, later(30))


async def test_closing_ends_the_wait() -> None:
    made = router(0)
    waiting = asyncio.create_task(made.choose_member(None, later(30)))
    await until(lambda: made.waiting_bounds, what="the request to wait")
    made.closed = True
    made.notify_waiting()
    with pytest.raises(PoolClosed):
        await asyncio.wait_for(waiting, 10)


async def test_who_left_is_told_of_when_its_last_request_has_ended() -> None:
    gone: list[str] = []
    made = RequestRouter(LoadBalancer(), on_gone=gone.append)
    made.balancer.set_members(members(1), 0.0)
    first, second = [await made.choose_member(None, later(1)) for _ in range(2)]
    with made.lease_member(first):
        with made.lease_member(second):
            made.balancer.set_members([], 0.0)
        assert gone == []
    assert gone == [URL]


# Words.


def test_the_log_says_now_and_again_why_requests_wait(caplog: pytest.LogCaptureFixture) -> None:
    made = router(1)
    made.balancer.records[URL].exclude_until("asleep", 0.0)
    now = time.monotonic()
    with caplog.at_level(logging.WARNING):
        made.warn_if_waiting(now - 9.5)
        assert caplog.messages == []
        made.warn_if_waiting(now - 12.3)
        made.warn_if_waiting(now - 50)
        assert caplog.messages == ["waited 12 s for a replica so far: w0: asleep"]
        made._warned_at = now - 10.5
        made.warn_if_waiting(now - 22.8, FLOOR)
    assert caplog.messages[1:] == ["waited 23 s for a replica so far: w0: asleep"]


# Cutting off.


async def attempt(lease: AttemptLease) -> str:
    """What an attempt does under its lease; returns why it was cut off."""
    try:
        async with asyncio.timeout(30) as scope:
            lease.watch_timeout(scope)
            await asyncio.sleep(60)
    except TimeoutError:
        return lease.cut
    finally:
        lease.watch_timeout(None)
    raise AssertionError


async def test_an_attempt_that_is_cut_off_ends_at_once_and_knows_why() -> None:
    lease = AttemptLease(members(1)[0])
    running = asyncio.create_task(attempt(lease))
    await asyncio.sleep(0.01)
    lease.cut_off("its replica is gone")
    lease.cut_off("the pool was closed")
    assert await asyncio.wait_for(running, 1) == "its replica is gone", "the first reason counts"
    lease.cut_off("too late")
    assert lease.cut == "its replica is gone"


async def test_an_attempt_that_has_not_begun_or_is_over_is_not_cut_off() -> None:
    lease = AttemptLease(members(1)[0])
    lease.cut_off("not begun")
    with suppress(TimeoutError):
        async with asyncio.timeout(0.01) as scope:
            lease.watch_timeout(scope)
            await asyncio.sleep(60)
    lease.cut_off("its replica is gone")
    assert lease.cut == ""
