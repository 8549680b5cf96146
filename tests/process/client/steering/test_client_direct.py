"""A pool without an operator, over control ports that do what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from rollout_client import (
    DirectOptions,
    EpochLost,
    PublishFailed,
    PublishProgress,
    SteeringFailed,
    WeightsId,
    http_clients,
)
from rollout_client.discovery.pool_members import Member
from rollout_client.steering import control_ports, direct_steering, pool_keeper
from rollout_client.steering.direct_steering import DirectSteering
from rollout_client.steering.staging_barrier import Version
from rollout_worker.schemas import Pushed, WeightsSource
from tests.support.unit.scripted_control import (
    PUSHED_HASH,
    ScriptedControl,
    pushing,
    scripted_controls,
)
from tests.support.waiting import until

OLD, NEW = WeightsId(epoch=1, version=4), WeightsId(epoch=1, version=5)
SOURCE, HERE = WeightsSource(path="/w/5"), WeightsSource(pushed=Pushed())


class Steered:
    """A pool of two control ports, and what was told of it."""

    def __init__(self, controls: list[ScriptedControl]) -> None:
        self.controls = controls
        self.members = [each.member for each in controls]
        self.serving: list[tuple[str, WeightsId]] = []
        self.told: list[PublishProgress] = []
        options = DirectOptions(in_flight="Abort", drain_seconds=7, sleep_level=2)
        self.direct = DirectSteering(
            lambda: self.members,
            options,
            lambda url, identity: self.serving.append((url, identity)),
        )

    async def publish(self, seconds: float = 30) -> str:
        done = await self.direct.publish_identity(NEW, SOURCE, seconds, self.told.append)
        assert done.identity == NEW
        return done.message


@pytest.fixture
async def steered(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Steered]:
    monkeypatch.setattr(pool_keeper, "KEEP_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(direct_steering, "RETRY_INTERVAL_SECONDS", 0.05)
    async with scripted_controls(2) as controls:
        made = Steered(controls)
        yield made
        await made.direct.close()


async def test_what_was_not_handed_over_to_all_is_not_published_without_an_operator(
    steered: Steered,
) -> None:
    with pytest.raises(PublishFailed, match="were not handed over to it"):
        await steered.direct.publish_identity(NEW, HERE, 0.3, steered.told.append)
    assert [each.verbs for each in steered.controls] == [[], []]


@contextlib.contextmanager
def few_more_files(count: int) -> Iterator[None]:
    """Let this process open so many more files, for now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = set(map(int, os.listdir("/proc/self/fd")))
    free = (number for number in itertools.count() if number not in there)
    limit = next(itertools.islice(free, count, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("allowed", [True, False], ids=["it may raise its limit", "it may not"])
async def test_members_that_this_process_may_not_open_are_not_left_out(
    steered: Steered, monkeypatch: pytest.MonkeyPatch, *, allowed: bool
) -> None:
    """187 of 300 replicas got the weights, and the publish was a success."""
    url = steered.controls[0].member.control_url
    steered.members[:] = [Member(f"http://w{n}:8000", f"w{n}", url) for n in range(200)]
    if not allowed:
        monkeypatch.setattr(http_clients, "allow_connections", lambda workers: None)
    with few_more_files(100):
        if allowed:
            assert await steered.publish() == "200 of 200 replicas serve weights (1, 5)"
        else:
            with pytest.raises(SteeringFailed, match=r"not open enough files for 200 .*ulimit -n"):
                await steered.publish()


# Epochs.


async def test_an_epoch_is_above_all_that_any_worker_has_seen(steered: Steered) -> None:
    first, second = steered.controls
    first.active, first.fence_epoch = (3, 1), 5
    second.required = {"epoch": 7, "version": 1}
    assert await steered.direct.acquire_epoch(10) == 8
    assert [each.body("require") for each in steered.controls] == [{"epoch": 8}] * 2
    second.slot = {"epoch": 11, "version": 1, "source": {"path": "/w"}}
    assert await steered.direct.acquire_epoch(10) == 12


async def test_an_epoch_is_lost_to_one_that_has_a_newer_one_and_not_to_one_that_fails(
    steered: Steered,
) -> None:
    for error, status, slug in (
        (EpochLost, 409, "stale-epoch"),
        (SteeringFailed, 403, "forbidden"),
        (SteeringFailed, 500, "internal"),
    ):
        steered.controls[1].refuse["require"] = status, slug
        with pytest.raises(error, match=f"w1: no require: {slug}") as raised:
            await steered.direct.acquire_epoch(10)
        assert type(raised.value) is error


async def test_without_an_answer_there_is_no_epoch(steered: Steered) -> None:
    steered.controls[0].server.delay("GET", "/v1/state", {}, 5)
    with pytest.raises(SteeringFailed, match=r"the workers did not confirm an epoch in 0\.2 s"):
        await steered.direct.acquire_epoch(0.2)


# Weights.


async def test_all_stage_then_all_commit_and_all_are_fenced(steered: Steered) -> None:
    assert await steered.publish() == "2 of 2 replicas serve weights (1, 5)"
    for each in steered.controls:
        assert each.verbs[:3] == ["stage", "commit", "require"]
        assert each.active == (1, 5)
        commit = each.body("commit")
        assert (commit["epoch"], commit["version"], commit["in_flight"]) == (1, 5, "Abort")
        assert commit["root_hash"] == "h"  # what all have staged
        assert commit["deadline_seconds"] == 7
        assert each.body("require") == {"epoch": 1, "min_version": 5}
    assert steered.serving == [("http://w0:8000", NEW), ("http://w1:8000", NEW)]
    assert steered.direct.lowest_identity == NEW
    assert [told.phase for told in steered.told][-2:] == ["Committing", "Complete"]
    assert (steered.told[-1].done, steered.told[-1].total) == (2, 2)


@pytest.mark.parametrize("answer", [(429, "queue-full"), (503, "auth-unavailable"), (502, "")])
async def test_a_busy_control_port_is_asked_again(
    steered: Steered, answer: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_ports, "ASK_AGAIN_SECONDS", 0.01)
    busy = steered.controls[1].busy
    busy |= {verb: [answer] * 2 for verb in ("state", "stage", "commit", "require")}
    assert await steered.publish() == "2 of 2 replicas serve weights (1, 5)"
    assert not any(busy.values()), "it was busy with each"


async def test_one_that_stays_busy_ends_the_publish(
    steered: Steered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_ports, "ASK_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(control_ports, "BUSY_RETRY_SECONDS", 0.1)
    steered.controls[1].refuse["state"] = (429, "queue-full")
    with pytest.raises(SteeringFailed, match="no state: queue-full"):
        await steered.publish()


async def test_a_commit_drains_as_long_as_the_publish_may_take_and_has_time_to_say_so(
    steered: Steered,
) -> None:
    slow = steered.controls[0]
    slow.waits["commit"] = lambda body: asyncio.sleep(body["deadline_seconds"] + 0.3)
    assert await steered.publish(seconds=2) == "2 of 2 replicas serve weights (1, 5)"
    assert 0.5 < slow.body("commit")["deadline_seconds"] < 2


async def test_who_sleeps_is_fenced_and_gets_them_later(steered: Steered) -> None:
    asleep = steered.controls[1]
    asleep.resident = False
    told = "1 of 2 replicas serve weights (1, 5); 1 get them before they serve again"
    assert await steered.publish() == told
    assert asleep.verbs == ["require"]
    assert steered.serving == [("http://w0:8000", NEW)]
    asleep.resident = True
    await until(lambda: asleep.active == (1, 5), what="the keeper to seed it")
    await until(lambda: len(steered.serving) == 2, what="it to be noted")


@pytest.mark.parametrize("sleeping", [1, 2])
async def test_who_sleeps_keeps_what_is_pushed_for_its_wake(
    steered: Steered, sleeping: int
) -> None:
    for control in steered.controls:
        control.root_hash = PUSHED_HASH
    asleep = steered.controls[-sleeping:]
    for each in asleep:
        each.resident, each.holds = False, ["Asleep"]
    publish = partial(steered.direct.publish_identity, NEW, HERE, 20, steered.told.append)
    async with pushing(steered.controls, publish) as (_, sending):
        done = await sending
        assert (done.replicas, done.root_hash) == (2 - sleeping, PUSHED_HASH)
        assert f"{sleeping} get them before they serve again" in done.message
        for each in asleep:
            assert each.verbs == ["stage", "require"]
            each.phase = "Staged"
        await steered.direct.change_state("Active", 10)
        for each in steered.controls:
            assert each.active == NEW.as_tuple()
            assert each.body("commit")["root_hash"] == PUSHED_HASH
            assert each.verbs.count("stage") == 1, "it has the bytes"
        for each in asleep:
            first = next(body for verb, body in each.bodies if verb == "wake")
            assert first["load"] is False, "the old weights are not read"


async def test_a_commit_that_all_refuse_changes_nothing(steered: Steered) -> None:
    for each in steered.controls:
        each.refuse["commit"] = (409, "stale-epoch")
    with pytest.raises(EpochLost, match="no commit: stale-epoch"):
        await steered.publish()
    assert steered.direct.lowest_identity is None
    for each in steered.controls:
        assert each.verbs == ["stage", "commit", "discard"]


async def test_a_commit_that_one_refuses_goes_on(steered: Steered) -> None:
    bad = steered.controls[1]
    bad.refuse["commit"] = (500, "commit-failed")
    assert (await steered.publish()).startswith("1 of 2 replicas serve")
    assert steered.direct.lowest_identity == NEW
    assert bad.body("require") == {"epoch": 1, "min_version": 5}
    del bad.refuse["commit"]
    await until(lambda: bad.active == (1, 5), what="the keeper to seed it")


@pytest.mark.parametrize(
    ("phase", "why"),
    [
        ("Failed", "no such tensor"),
        ("Staging", "it was not staged in time"),
        ("Staging", "it was restarted while it staged them"),
    ],
)
async def test_who_does_not_stage_what_the_keeper_gives_is_told_of_and_tried_again(
    steered: Steered,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    phase: str,
    why: str,
) -> None:
    await steered.publish()
    monkeypatch.setattr(pool_keeper, "SEED_TIMEOUT_SECONDS", 0.2 if "time" in why else 30)
    behind = steered.controls[0]
    behind.active, behind.phase, behind.error = (1, 3), phase, "no such tensor"
    if "restarted" in why:
        asked = behind.verbs.count("stage")
        await until(lambda: behind.verbs.count("stage") > asked, what="the keeper to seed it")
        behind.slot = None
    said = f"w0 lacks the pool's weights or state: 409 stage-failed: {why}"
    await until(lambda: said in caplog.messages, what=said)
    assert behind.active == (1, 3)
    behind.phase = "Staged"
    await until(lambda: behind.active == (1, 5), what="the keeper to seed it again")


@pytest.mark.parametrize("gone", ["workers", "engines"])
async def test_a_commit_that_nobody_answers_fails_but_holds(steered: Steered, gone: str) -> None:
    """Some may have flipped unheard, so there is no way back."""
    members = list(steered.members)

    def leave(progress: PublishProgress) -> None:
        if progress.phase == "Committing" and gone == "workers":
            steered.members[:] = [
                Member(each.url, each.name, "http://127.0.0.1:9") for each in members
            ]

    for control in steered.controls if gone == "engines" else ():
        control.refuse["commit"] = (503, "failed")
    with pytest.raises(PublishFailed, match="no replica answered to the commit"):
        await steered.direct.publish_identity(NEW, SOURCE, 30, leave)
    assert steered.direct.lowest_identity == NEW
    steered.members[:] = members
    for control in steered.controls:
        control.refuse.clear()
    await until(lambda: steered.controls[1].active == (1, 5), what="the keeper to seed it")


async def test_a_failed_publish_still_cares_for_the_weights_of_before(steered: Steered) -> None:
    await steered.publish()
    behind = steered.controls[0]
    behind.refuse["stage"] = (422, "invalid-request")
    newer = WeightsId(epoch=1, version=6)
    with pytest.raises(PublishFailed, match="no stage: invalid-request"):
        await steered.direct.publish_identity(
            newer, WeightsSource(path="/w/6"), 30, steered.told.append
        )
    assert steered.direct.lowest_identity == NEW
    behind.refuse.clear()
    behind.active = (1, 3)
    await until(lambda: behind.active == (1, 5), what="the keeper to seed it")


# State.


async def test_states_reach_all_that_answer(steered: Steered) -> None:
    assert await steered.direct.wanted_state() is None
    await steered.direct.change_state("Asleep", 10)
    assert await steered.direct.wanted_state() == "Asleep"
    for each in steered.controls:
        sent = each.body("sleep")
        assert (sent["level"], sent["mode"], sent["deadline_seconds"]) == (2, "drain", 7)
    await steered.direct.change_state("Paused", 10)
    for each in steered.controls:
        # Weights, then the KV cache: the order that fits.
        woken = [body for verb, body in each.bodies if verb == "wake"]
        assert woken == [{"tags": ["weights"]}, {"tags": ["kv_cache"]}]
        assert each.body("pause")["deadline_seconds"] == 7
    assert await steered.direct.change_state("Active", 10) == 2
    assert [each.holds for each in steered.controls] == [[], []]
    assert [each.verbs[-1] for each in steered.controls] == ["resume", "resume"]


@pytest.mark.parametrize("able", [True, False])
async def test_who_wakes_with_old_weights_gets_the_new_ones_before_its_cache(
    steered: Steered, monkeypatch: pytest.MonkeyPatch, able: bool
) -> None:
    """And doesn't read the old ones for that, if it can wake without."""
    for control in steered.controls:
        control.wakes_empty = able
    monkeypatch.setattr(pool_keeper, "KEEP_INTERVAL_SECONDS", 60)  # else it may be quicker
    await steered.direct.change_state("Asleep", 10)
    await steered.publish()
    await steered.direct.change_state("Active", 10)
    verbs = [verb for verb in steered.controls[0].verbs if verb in ("wake", "stage", "commit")]
    assert verbs == ["wake", "stage", "commit", "wake"]
    first, last = (body for verb, body in steered.controls[0].bodies if verb == "wake")
    assert first == {"tags": ["weights"], **({"load": False} if able else {})}
    assert last == {"tags": ["kv_cache"]}


async def test_who_woke_without_weights_and_failed_gets_the_published_ones(
    steered: Steered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_keeper, "KEEP_INTERVAL_SECONDS", 60)
    await steered.direct.change_state("Asleep", 10)
    await steered.publish()
    for control in steered.controls:
        control.busy["stage"] = [(500, "engine")]
    with pytest.raises(SteeringFailed, match="no stage: engine"):
        await steered.direct.change_state("Active", 10)
    assert all(control.empty for control in steered.controls)
    await steered.direct.change_state("Active", 10)
    for control in steered.controls:
        assert (control.empty, control.active, control.holds) == (False, (1, 5), [])
        woken = [body for verb, body in control.bodies if verb == "wake"]
        assert woken == [{"tags": ["weights"], "load": False}, {"tags": ["kv_cache"]}]


@pytest.mark.parametrize("others", [[], ["Paused"]], ids=["free", "held by somebody else"])
async def test_who_was_restarted_comes_back_to_the_pools_state(
    steered: Steered, others: list[str]
) -> None:
    await steered.direct.change_state("Paused", 10)
    steered.controls[0].holds_of_others = others
    steered.controls[0].holds = []
    await until(lambda: steered.controls[0].holds == ["Paused"], what="the keeper to pause it")


async def test_who_is_about_to_have_the_state_is_not_told_twice(steered: Steered) -> None:
    """A wake takes its time, and drops the hold that the pause after it brings back."""
    await steered.direct.change_state("Asleep", 10)
    steered.controls[0].waits["pause"] = lambda body: asyncio.sleep(0.3)
    await steered.direct.change_state("Paused", 10)
    await asyncio.sleep(0.3)
    for control in steered.controls:
        assert control.verbs == ["sleep", "wake", "wake", "pause"]


async def test_what_the_keeper_saw_before_an_order_is_no_reason_to_repeat_it(
    steered: Steered,
) -> None:
    await steered.direct.change_state("Asleep", 10)
    control, seen, go = steered.controls[0], asyncio.Event(), asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse:
        answer = await control._answer(request)
        if not seen.is_set():
            seen.set()
            await go.wait()
        return answer

    control.server.answers["GET", "/v1/state"] = late
    await asyncio.wait_for(seen.wait(), 10)
    await steered.direct.change_state("Paused", 10)
    go.set()
    await steered.direct._keeper._check_replicas()  # once that look has ended
    assert control.verbs.count("pause") == 1


async def test_an_order_that_comes_after_a_newer_one_is_undone(steered: Steered) -> None:
    """The keeper pauses a replica that was restarted, while the user resumes the pool."""
    await steered.direct.change_state("Paused", 10)
    control, go = steered.controls[0], asyncio.Event()
    control.waits["pause"] = lambda body: go.wait()
    control.holds = []
    await until(lambda: control.verbs.count("pause") == 2, what="the keeper's order")
    await steered.direct.change_state("Active", 10)
    resumed = control.verbs.count("resume")
    go.set()
    await until(
        lambda: control.verbs.count("resume") > resumed and not control.holds, what="the end"
    )


async def test_the_keeper_leaves_alone_who_sleeps_or_lacks_nothing(steered: Steered) -> None:
    asleep, newer = steered.controls
    await steered.publish()
    await steered.direct.change_state("Active", 10)
    asleep.active, asleep.resident, newer.active = (1, 3), False, (1, 6)
    before = [list(each.verbs) for each in steered.controls]
    count = len(steered.serving)
    await steered.direct._keeper._check_replicas()
    assert [each.verbs for each in steered.controls] == before
    assert len(steered.serving) == count


async def test_a_token_that_can_not_be_read_for_a_while_ends_no_care(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_keeper, "KEEP_INTERVAL_SECONDS", 0.1)
    file = tmp_path / "token"
    file.write_text("t")
    async with scripted_controls(2) as (control, other):
        direct = DirectSteering(
            lambda: [control.member, other.member],
            DirectOptions(token=lambda: file.read_text().strip()),
        )
        await direct.change_state("Paused", 10)
        file.unlink()
        for call in (direct.acquire_epoch(10), direct.change_state("Paused", 0.2)):
            with pytest.raises(SteeringFailed, match="control ports can't be read") as told:
                await call
            assert str(told.value).count("can't be read") == 1, "one cause, whatever the replicas"
        (keeper,) = [t for t in asyncio.all_tasks() if t.get_name() == "keeper of the pool"]
        await asyncio.wait({keeper}, timeout=0.3)  # it looks every tenth of a second
        assert not keeper.done()
        file.write_text("t")
        control.holds = []
        await until(lambda: control.holds == ["Paused"], what="the keeper to pause it")
        await direct.close()


async def test_a_state_that_one_refuses_fails_and_one_that_is_held_does_not(
    steered: Steered,
) -> None:
    steered.controls[0].refuse["wake"] = (409, "held")
    await steered.direct.change_state("Active", 10)
    steered.controls[0].refuse["wake"] = (500, "engine")
    with pytest.raises(SteeringFailed, match="w0: no wake: engine"):
        await steered.direct.change_state("Active", 10)
    steered.controls[0].refuse.clear()
    steered.controls[1].server.delay("POST", "/v1/sleep", {}, 5)
    with pytest.raises(SteeringFailed, match=r"not all replicas were Asleep within 0\.3 s"):
        await steered.direct.change_state("Asleep", 0.3)


@pytest.mark.parametrize("name", ["the same", "another"])
async def test_a_wake_that_meets_another_trainers_sleep_waits_for_its_end(
    steered: Steered, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Who has the same token shares our hold, so a wake in between would end that trainer's sleep."""
    await steered.direct.change_state("Asleep", 10)
    control = steered.controls[0]
    if name == "another":
        control.holds_of_others = ["Asleep"]

    async def meets(request: web.Request) -> web.StreamResponse:
        if name == "the same":
            control.holds = ["Asleep"]
        control.server.answers["POST", "/v1/resume"] = control._answer
        control.busy["resume"] = [(409, "asleep" if name == "the same" else "held")]
        return await control._answer(request)

    control.server.answers["POST", "/v1/resume"] = meets
    waking = asyncio.create_task(steered.direct.change_state("Active", 20))
    await until(lambda: "resume" in control.verbs, what="the wake")
    before = control.verbs
    looks = len(control.bodies)
    await until(lambda: len(control.bodies) > looks + 1, what="two looks")
    assert control.verbs == before
    control.holds = control.holds_of_others = []
    assert await waking == 2
    assert control.verbs[-1] == "resume"


async def test_a_sleep_that_another_trainer_ended_is_asked_for_again(steered: Steered) -> None:
    steered.controls[0].busy["sleep"] = [(409, "changed-meanwhile"), (409, "loading")]
    await steered.direct.change_state("Asleep", 20)
    assert steered.controls[0].holds == ["Asleep"]


async def test_a_state_that_was_asked_for_counts_even_if_nobody_heard_of_it(
    steered: Steered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the keeper would go on with the wish before it."""
    await steered.direct.change_state("Asleep", 10)
    members, steered.members = (
        steered.members,
        [Member("http://w2:8000", "w2", "http://127.0.0.1:9")],
    )
    with pytest.raises(SteeringFailed, match=r"not all .* Active within 0\.2 s: no worker answers"):
        await steered.direct.change_state("Active", 0.2)
    assert await steered.direct.wanted_state() == "Active"
    await steered.direct.ask_state("Asleep", 0.2)
    steered.members = members
    steered.controls[0].holds = []
    await until(lambda: steered.controls[0].holds == ["Asleep"], what="the keeper sees to it")


async def test_a_newer_wish_ends_the_wait_of_an_older_one(steered: Steered) -> None:
    steered.controls[0].refuse["sleep"] = (409, "loading")
    falling = asyncio.create_task(steered.direct.change_state("Asleep", 20))
    await until(lambda: "sleep" in steered.controls[0].verbs, what="the first try")
    await steered.direct.change_state("Active", 10)
    with pytest.raises(SteeringFailed, match="asked to be Active meanwhile"):
        await falling


async def test_one_that_is_dead_is_no_reason_to_fail(steered: Steered) -> None:
    steered.members.append(Member("http://w2:8000", "w2", "http://127.0.0.1:9"))
    assert await steered.direct.change_state("Asleep", 10) == 0, "nobody serves"
    assert [each.holds for each in steered.controls] == [["Asleep"], ["Asleep"]]
    assert await steered.direct.change_state("Active", 10) == 2, "two of three serve"
    message = "2 of 3 replicas serve weights (1, 5); 1 get them before they serve again"
    assert await steered.publish() == message


async def test_a_replica_that_left_delays_nobody_and_is_fenced_by_the_keeper(
    steered: Steered,
) -> None:
    leaver = steered.controls[1]
    leaver.phase = "Staging"
    publishing = asyncio.create_task(steered.publish())
    await until(lambda: len(steered.told) > 1, what="a look")
    leaver.slot = None  # it was restarted; a dead machine leaves the same way
    leaver.slow["require"] = 1
    message = "1 of 2 replicas serve weights (1, 5); 1 get them before they serve again"
    assert await publishing == message
    assert "require" not in leaver.verbs
    leaver.phase = "Staged"
    leaver.slow.clear()
    await until(lambda: leaver.active == (1, 5), what="the keeper's care")
    assert leaver.verbs[-3:] == ["require", "stage", "commit"]


async def test_closing_ends_the_care(steered: Steered) -> None:
    await steered.publish()
    await steered.direct.close()
    steered.controls[0].active = (1, 3)
    await asyncio.sleep(0.3)
    assert steered.controls[0].active == (1, 3)


@pytest.mark.parametrize("kept", [True, False])
async def test_who_was_away_gets_pushed_weights_from_the_others(
    steered: Steered, kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    giver, joiner = steered.controls
    giver.active = NEW.as_tuple()
    for each in steered.controls if not kept else [joiner]:
        each.refuse["offer"] = (409, "no-copy")
    kept_by = steered.direct._keeper
    kept_by.target = Version(NEW, HERE)
    kept_by.start()
    if not kept:
        await until(lambda: "no replica keeps the pushed" in caplog.text, what="a word on it")
        assert "stage" not in joiner.verbs
        return
    await until(lambda: joiner.active == NEW.as_tuple(), what="the keeper to seed it")
    peer = {"host": "127.0.0.1", "port": 8002, "ticket": "f" * 32}
    assert joiner.body("stage")["source"] == {"pushed": {"peers": [peer]}}
    assert "stage" not in giver.verbs
