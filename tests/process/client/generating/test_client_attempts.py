"""One output over several attempts: where the next one goes, what it asks for, what is noted."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any, Literal

import pytest
from aiohttp import web

from rollout_client import (
    AsyncRolloutPool,
    AttemptReport,
    DeadlineExceeded,
    Hook,
    NoReplica,
    RequestFailed,
    RequestRefused,
    VersionChanged,
    WeightsId,
)
from rollout_client.routing.member_records import MemberRecord
from tests.support.unit.scripted import (
    END,
    PROMPT,
    ScriptedWorker,
    after,
    done_event,
    event,
    problem,
    raw,
    tokens,
)  # fmt: skip


def record(pool: AsyncRolloutPool, worker: ScriptedWorker) -> MemberRecord:
    return pool._router.balancer.records[worker.url]


# Where the next attempt goes.


async def test_after_a_failure_the_next_attempt_goes_elsewhere(
    workers: list[ScriptedWorker],
) -> None:
    """Also where the same key would choose the same replica again, once that answers."""
    for each in workers:
        each.steps = [tokens([], None)]
    urls = [each.url for each in workers]
    async with AsyncRolloutPool.from_urls(urls, deterministic=True, max_failures=3) as pool:
        with pytest.raises(RequestFailed, match="4 attempts broke") as error:
            await pool.generate(PROMPT, session_id="c")
    assert error.value.kept is None
    assert [len(each.bodies) for each in workers] == [2, 2]


async def test_an_abort_is_no_reason_to_go_elsewhere(workers: list[ScriptedWorker]) -> None:
    for each in workers:
        each.steps = [tokens([1], "aborted", abort="weights"), tokens([2], "stop")]
    async with AsyncRolloutPool.from_urls([each.url for each in workers]) as pool:
        await pool.generate(PROMPT, sampling=END, session_id="c")
    assert sorted(len(each.bodies) for each in workers) == [0, 2], "its prefix is cached there"


# Weights that change.


@pytest.mark.parametrize("policy", ["continue", "restart", "fail"])
async def test_weights_that_change_in_mid_stream(
    pool: AsyncRolloutPool, worker: ScriptedWorker, policy: Literal["continue", "restart", "fail"]
) -> None:
    """A worker that keeps running requests through a commit goes on with the new weights."""
    worker.steps = [tokens([1, 2, 3, 4], "stop", version=[4, 4, 5, 5]), tokens([7, 8], "stop", 5)]
    request = pool.generate(PROMPT, sampling=END, on_version_change=policy)
    if policy == "fail":
        with pytest.raises(VersionChanged, match=r"from \(0, 4\) to \(0, 5\)") as error:
            await request
        assert error.value.kept is not None
        assert error.value.kept.attempts[0].outcome == "moved"
        return
    result = await request
    if policy == "continue":
        assert result.token_ids == (1, 2, 3, 4)
        assert len(worker.bodies) == 1
        return
    assert result.token_ids == (7, 8)
    assert [(s.version, s.start, s.end) for s in result.output.weights] == [(5, 0, 2)]
    assert [(a.outcome, a.cause) for a in result.attempts] == [
        ("moved", "the weights changed"),
        ("finished", ""),
    ]
    assert worker.bodies[1]["token_ids"] == PROMPT
    assert "exact_version" not in worker.bodies[1]
    assert worker.bodies[1]["sampling"]["max_tokens"] == 6


@pytest.mark.parametrize("policy", ["restart", "fail"])
async def test_tokens_of_weights_that_are_gone_are_dropped_or_handed_over(
    pool: AsyncRolloutPool, worker: ScriptedWorker, policy: Literal["restart", "fail"]
) -> None:
    async def commit() -> None:
        pool._note_weights(worker.url, WeightsId(epoch=0, version=5))

    gone = after(commit, tokens([], "aborted", abort="weights"))
    worker.steps = [tokens([1], "aborted", 4, abort="weights"), gone, tokens([2], "stop", 5)]
    request = pool.generate(PROMPT, sampling=END, on_version_change=policy)
    if policy == "restart":
        result = await request
        assert result.token_ids == (2,)
        assert worker.bodies[1]["exact_version"] == 4
        assert "exact_version" not in worker.bodies[2]
    else:
        with pytest.raises(VersionChanged) as error:
            await request
        assert error.value.replica is None
        assert error.value.kept is not None
        assert error.value.kept.token_ids == (1,)


@pytest.mark.parametrize("policy", ["restart", "fail", "exact"])
async def test_a_replica_that_died_is_not_waited_for_by_an_output_that_may_move(
    workers: list[ScriptedWorker], policy: Literal["restart", "fail", "exact"]
) -> None:
    """It had the weights of the tokens so far; the other one has committed newer ones."""
    worker, other = workers
    async with AsyncRolloutPool.from_urls([worker.url, other.url]) as pool:
        async with asyncio.timeout(10):
            await pool.wait_serving(2)

        async def commit_on_other() -> None:
            worker.ready(503)
            active = {"epoch": 0, "version": 5, "root_hash": "h"}
            other.server.answer("GET", "/v1/weights", {"active": active})
            pool._note_weights(other.url, WeightsId(epoch=0, version=5))

        worker.steps = [after(commit_on_other, tokens([1], None, 4))]
        other.steps = [tokens([2], "stop", 5)]
        pool._router.balancer._last_url["c"] = worker.url
        request = partial(pool.generate, PROMPT, sampling=END, session_id="c")
        if policy == "restart":
            result = await request(on_version_change=policy, deadline_seconds=10)
            assert result.token_ids == (2,)
        elif policy == "fail":
            with pytest.raises(VersionChanged, match="the weights changed"):
                await request(on_version_change=policy, deadline_seconds=10)
        else:
            with pytest.raises(DeadlineExceeded, match=r"has weights \(0, 5\)"):
                await request(on_version_change="fail", exact_version=4, deadline_seconds=0.3)


async def test_an_exact_version_that_is_gone_is_refused_where_nothing_was_made(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    async with asyncio.timeout(5):
        await pool.wait_serving()
    pool._note_weights(worker.url, WeightsId(epoch=0, version=5))
    for policy in ("continue", "restart"):
        with pytest.raises(RequestRefused, match="beyond the exact version 4") as error:
            await pool.generate(PROMPT, exact_version=4, on_version_change=policy)
        assert (error.value.status, error.value.slug) == (409, "version-not-met")
    assert worker.bodies == []


@pytest.mark.parametrize(("committed", "noted"), [(5, 5), (None, 4), (3, 4)])
async def test_an_output_that_ends_on_old_weights_does_not_hide_the_new_ones(
    pool: AsyncRolloutPool, worker: ScriptedWorker, committed: int | None, noted: int
) -> None:
    """Without a commit in between, the replica may be another process, which serves what it says."""
    async with asyncio.timeout(10):
        await pool.wait_serving()
    pool._note_weights(worker.url, WeightsId(epoch=0, version=6 if committed is None else 2))

    async def commit() -> None:
        if committed is not None:
            pool._note_weights(worker.url, WeightsId(epoch=0, version=committed))

    worker.steps = [after(commit, tokens([1, 2], "stop", [3, 4]))]
    await pool.generate(PROMPT, sampling=END)
    assert record(pool, worker).active == WeightsId(epoch=0, version=noted)


async def test_who_restarts_is_streamed_nothing_before_the_end(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [tokens([1, 2], None, 4), tokens([1], "aborted", [5], abort="weights")]
    worker.steps.append(tokens([7, 8], "stop", 5))
    seen: list[int] = []
    async with pool.stream(PROMPT, sampling=END, on_version_change="restart") as stream:
        async for delta in stream:
            assert len(worker.bodies) == 3
            seen += delta.token_ids
    assert seen == [7, 8]


# Time.


async def test_the_worker_has_time_to_say_that_the_deadline_is_over(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    async def late(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(body["deadline_seconds"] + 0.1)
        return await tokens([1, 2], "aborted", abort="deadline")(request, body)

    worker.steps = [late]
    with pytest.raises(DeadlineExceeded, match="its deadline passed") as error:
        await pool.generate(PROMPT, sampling=END, deadline_seconds=0.3)
    assert 0 < worker.bodies[0]["deadline_seconds"] <= 0.3
    kept = error.value.kept
    assert kept is not None
    assert kept.token_ids == (1, 2)
    assert error.value.replica == worker.server.address
    assert [(a.outcome, a.cause) for a in kept.attempts] == [("aborted", "deadline")]


async def test_a_worker_that_only_refuses_until_the_deadline_took_nothing(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [problem(409, "duplicate-request")]
    began = time.monotonic()
    with pytest.raises(NoReplica, match=f"in time .{worker.server.address}: serves"):
        await pool.generate(PROMPT, deadline_seconds=0.6)
    assert time.monotonic() - began >= 0.6
    assert 1 < len(worker.bodies) < 9, "not one after the other without a pause"


# What is noted of a replica.


async def test_an_output_that_has_ended_is_streamed_whole_though_another_goes_on(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    go = asyncio.Event()
    worker.steps = [tokens([1, 2], "stop"), after(go.wait, tokens([3], "stop"))]
    sampling = {**END, "n": 2}
    got: list[int] = []
    async with pool.stream(PROMPT, sampling=sampling, on_version_change="restart") as stream:
        async for delta in stream:
            got += delta.token_ids
            if got == [1, 2]:
                go.set()
    assert got == [1, 2, 3]


async def test_a_replica_that_is_behind_is_known_by_its_weights(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    await pool.wait_serving()
    active = {"epoch": 0, "version": 3, "root_hash": "h", "labels": {}}
    worker.server.answer("GET", "/v1/weights", {"active": active, "commit_seq": 1})
    worker.steps = [problem(409, "version-not-met", active=active)]
    with pytest.raises(NoReplica, match=r"has weights \(0, 3\)"):
        await pool.generate(PROMPT, min_version=4, deadline_seconds=0.2)
    assert len(worker.bodies) == 1, "it is not asked again for what it does not have"
    assert record(pool, worker).active == WeightsId(epoch=0, version=3)


async def test_a_full_queue_is_left_alone_no_shorter_than_it_said(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [problem(429, "queue-full", retry=50)]
    began = time.monotonic()
    with pytest.raises(NoReplica, match="its queue is full"):
        await pool.generate(PROMPT, deadline_seconds=0.1)
    ends = record(pool, worker).excluded_until
    assert ends is not None
    assert 50 <= ends - began <= 65 + (time.monotonic() - began)


async def test_a_paces_worth_of_tokens_tells_how_fast_a_replica_is(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [tokens(range(15), "stop"), tokens(range(16), "stop", pause=0.005)]
    assert (await pool.generate(PROMPT)).usage.cached_tokens == 1
    assert record(pool, worker).pace is None
    await pool.generate(PROMPT)
    pace = record(pool, worker).pace
    assert pace is not None
    assert 0.0045 < pace < 1


# What is reported.


class Recording(Hook):
    def __init__(self) -> None:
        self.reports: list[AttemptReport] = []

    def attempt(self, report: AttemptReport) -> None:
        self.reports.append(report)


async def test_each_attempt_is_reported_with_its_share(worker: ScriptedWorker) -> None:
    long = "x" * 500
    worker.steps = [
        tokens([1, 2], None),
        tokens([], "aborted", abort="control"),
        problem(500, "internal-error", detail=long),
        tokens([3], "stop", pause=0.0),
    ]
    hook = Recording()
    async with AsyncRolloutPool.from_urls([worker.url], hook=hook) as pool:
        result = await pool.generate(PROMPT, sampling=END)
    assert [(a.outcome, a.tokens) for a in hook.reports] == [
        ("broken", 2),
        ("aborted", 0),
        ("refused", 0),
        ("finished", 1),
    ]
    assert result.attempts == tuple(hook.reports)
    assert {a.replica for a in hook.reports} == {worker.server.address}
    assert hook.reports[2].cause == f"500 internal-error: {long}"[:300]
    assert all(0 < a.seconds < 5 for a in hook.reports)
    # Whoever ended a stream said how long it queued; the cache is that of the first attempt.
    assert result.timing.queued_seconds == pytest.approx(0.2)
    assert result.timing.preemptions == 2
    assert result.usage.cached_tokens == 0
    assert result.logprobs_of == "sampling"


async def test_the_first_token_is_timed_from_the_call(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [after(partial(asyncio.sleep, 0.2), tokens([1, 2], "stop", pause=0.1))]
    timing = (await pool.generate(PROMPT, sampling=END)).timing
    assert timing.first_token_seconds is not None
    assert 0.2 <= timing.first_token_seconds <= timing.total_seconds - 0.09


@pytest.mark.parametrize("kind", ["sampling", "none"])
async def test_what_was_received_has_logprobs_if_they_were_asked_for(
    pool: AsyncRolloutPool, worker: ScriptedWorker, kind: Literal["sampling", "none"]
) -> None:
    span = {"epoch": 0, "version": 0, "start": 0, "end": 1}
    delta: dict[str, Any] = {"index": 0, "token_ids": [1], "weights": [span]}
    if kind == "sampling":
        delta["logprobs"] = [-0.5]
    worker.steps = [raw(event("delta", delta), done_event({"index": 0, "stop_reason": "stop"}))]
    result = await pool.generate(PROMPT, logprobs=kind)
    assert result.logprobs == ((-0.5,) if kind == "sampling" else None)
