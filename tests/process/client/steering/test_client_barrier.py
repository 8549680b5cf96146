"""All stage before any commits: who is waited for, who leaves, and that a failure leaves nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from rollout_client import EpochLost, PublishFailed, PublishProgress, WeightsId
from rollout_client.discovery.pool_members import Member
from rollout_client.steering import staging_barrier
from rollout_client.steering.control_ports import ControlPorts
from rollout_client.steering.staging_barrier import (
    Barrier,
    Lost,
    Staged,
    Unusable,
    Version,
    progress_of,
)
from rollout_worker.schemas import WeightsSource, WorkerState
from tests.support.unit.scripted_control import ScriptedControl, scripted_controls
from tests.support.unit.states import serving_state
from tests.support.waiting import until

IDENTITY = WeightsId(epoch=1, version=5)
VERSION = Version(IDENTITY, WeightsSource(path="/w/5"))


class Publish:
    """Control ports, and what was told of the barrier over them."""

    def __init__(self, controls: list[ScriptedControl]) -> None:
        self.controls = controls
        self.members = [each.member for each in controls]
        self.ports = ControlPorts(lambda: self.members, None)
        self.told: list[PublishProgress] = []

    def barrier(self, names: Iterable[str] | None = None) -> Barrier:
        names = [member.name for member in self.members] if names is None else names
        return Barrier(self.ports, VERSION, names)

    async def stage(self, barrier: Barrier, seconds: float = 30) -> None:
        await barrier.stage(time.monotonic() + seconds, self.told.append)


@pytest.fixture
async def publish() -> AsyncIterator[Publish]:
    async with scripted_controls(2) as controls:
        made = Publish(controls)
        yield made
        await made.ports.close()


# One look at a worker.


def state(active: tuple[int, int] | None = None, **slot: Any) -> WorkerState:
    weights: dict[str, Any] = {"active": None, "staged": None}
    if active is not None:
        weights["active"] = {"epoch": active[0], "version": active[1], "root_hash": "a"}
    if slot:
        known = {"epoch": 1, "version": 5, "source": {"path": "/w/5"}, "root_hash": "s"}
        weights["staged"] = {**known, **slot}
    return WorkerState.model_validate(serving_state(weights=weights))


@pytest.mark.parametrize(
    ("seen", "progress"),
    [
        (state((1, 4), phase="Staging"), None),
        (state((1, 4), phase="Staged"), Staged("s")),
        (state(None, phase="Staged"), Staged("s")),
        (state((1, 5)), Staged("a")),
        (state((1, 4)), Lost()),
        (state((1, 4), phase="Staged", version=6), Lost()),
        (state((1, 4), phase="Staged", epoch=2), Lost()),
        (state((1, 4), phase="Failed", error="no such tensor"), Unusable("no such tensor")),
        (state((1, 4), phase="Failed"), Unusable("it names no reason")),
    ],
)
def test_how_far_a_worker_is(seen: WorkerState, progress: object) -> None:
    assert progress_of(seen, IDENTITY) == progress


# The barrier.


async def test_all_that_take_part_stage_the_version(publish: Publish) -> None:
    barrier = publish.barrier()
    await publish.stage(barrier)
    assert barrier.staged == {"w0": "h", "w1": "h"}
    first, *_, last = publish.told
    assert first == PublishProgress("Staging", 0, 2, "staging weights (1, 5): 0 of 2 replicas have")
    assert last == PublishProgress("Staging", 2, 2, "staging weights (1, 5): 2 of 2 replicas have")
    for each in publish.controls:
        assert each.verbs == ["stage"]
        sent = each.body("stage")
        assert (sent["epoch"], sent["version"], sent["source"]) == (1, 5, {"path": "/w/5"})
        assert 25 < sent["deadline_seconds"] <= 30


async def test_who_is_slow_is_waited_for(publish: Publish) -> None:
    slow = publish.controls[1]
    slow.phase = "Staging"
    barrier = publish.barrier()
    running = asyncio.create_task(publish.stage(barrier))
    await until(lambda: [told.done for told in publish.told][-2:] == [1, 1], what="one of two")
    asked = publish.controls[0].bodies.count(("state", {}))
    assert not running.done()
    slow.phase = "Staged"
    await asyncio.wait_for(running, 10)
    assert publish.controls[0].bodies.count(("state", {})) == asked, "who has staged is not asked"


async def test_one_that_can_not_use_it_fails_all_and_none_keeps_it(publish: Publish) -> None:
    bad = publish.controls[1]
    bad.phase, bad.error = "Failed", "no such tensor"
    with pytest.raises(PublishFailed) as raised:
        await publish.stage(publish.barrier())
    assert raised.value.replica == "w1"
    assert raised.value.cause == "weights (1, 5) can't be used: no such tensor"
    for each in publish.controls:
        assert each.verbs == ["stage", "discard"]
        assert each.body("discard") == {"epoch": 1, "version": 5}


async def test_bytes_that_differ_are_not_kept(publish: Publish) -> None:
    publish.controls[1].root_hash = "other"
    with pytest.raises(PublishFailed, match="the bytes at /w/5 differ between replicas"):
        await publish.stage(publish.barrier())
    assert [each.verbs[-1] for each in publish.controls] == ["discard", "discard"]


@pytest.mark.parametrize(
    ("verb", "refusal", "error", "cause"),
    [
        ("stage", (409, "stale-epoch"), EpochLost, "no stage: stale-epoch"),
        ("stage", (409, "busy"), PublishFailed, "weights (1, 5): no stage: busy"),
        ("state", (401, "unauthorized"), PublishFailed, "weights (1, 5): no state: unauthorized"),
    ],
    ids=["a newer trainer", "anything else", "its state"],
)
async def test_one_that_refuses_fails_all(
    publish: Publish, verb: str, refusal: tuple[int, str], error: type[Exception], cause: str
) -> None:
    publish.controls[1].refuse[verb] = refusal
    with pytest.raises(error) as raised:
        await publish.stage(publish.barrier())
    assert (raised.value.replica, raised.value.cause) == ("w1", cause)  # type: ignore[attr-defined]
    assert [each.verbs[-1] for each in publish.controls] == ["discard", "discard"]


@pytest.mark.parametrize("seen", ["fence", "slot", "active"])
async def test_a_newer_trainer_ends_the_publish(publish: Publish, seen: str) -> None:
    taken = publish.controls[0]
    taken.phase = publish.controls[1].phase = "Staging"
    running = asyncio.create_task(publish.stage(publish.barrier()))
    await until(lambda: len(publish.told) > 1, what="a look")
    match seen:
        case "fence":
            taken.slot, taken.fence_epoch = None, 2
        case "slot":
            taken.slot = {"epoch": 2, "version": 1, "source": {"path": "/w/1"}}
        case "active":
            taken.slot, taken.active = None, (2, 1)
    with pytest.raises(EpochLost, match="epoch 2 has this worker, this one holds 1") as raised:
        await asyncio.wait_for(running, 10)
    assert raised.value.replica == "w0"


async def test_who_does_not_answer_for_long_leaves(
    publish: Publish, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_barrier, "DEAD_SECONDS", 0.5)
    publish.members.append(Member("http://w2:8000", "w2", "http://127.0.0.1:9"))
    barrier = publish.barrier()
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        await publish.stage(barrier)
    assert time.monotonic() - began >= 0.5
    assert barrier.staged == {"w0": "h", "w1": "h"}
    assert caplog.messages[0].startswith("publishing goes on without w2: GET http://127.0.0.1:9")


async def test_who_is_no_member_any_more_leaves(
    publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_barrier, "DEAD_SECONDS", 0.0)
    barrier = publish.barrier(["w0", "w9"])
    await publish.stage(barrier)
    assert barrier.staged == {"w0": "h"}


async def test_silence_is_counted_from_the_last_answer(publish: Publish) -> None:
    slow = publish.controls[1]
    slow.phase = "Staging"
    barrier = publish.barrier()
    began = barrier._heard_at["w1"]
    running = asyncio.create_task(publish.stage(barrier))
    await until(lambda: barrier._heard_at["w1"] > began + 0.2, what="answers")
    slow.phase = "Staged"
    await asyncio.wait_for(running, 10)


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.7, "0.7 s; not ready: w1"), (-5, "0.001 s; not ready: w0, w1")]
)
async def test_what_takes_too_long_is_given_up_by_all_and_says_who_was_missing(
    publish: Publish, seconds: float, said: str
) -> None:
    publish.controls[1].phase = "Staging"
    with pytest.raises(PublishFailed) as raised:
        await publish.stage(publish.barrier(), seconds)
    assert raised.value.cause == f"weights (1, 5) were not staged within {said}"
    assert [each.slot for each in publish.controls] == [None, None]


async def test_a_publish_that_is_cancelled_leaves_nothing_staged(publish: Publish) -> None:
    publish.controls[1].phase = "Staging"
    running = asyncio.create_task(publish.stage(publish.barrier()))
    await until(lambda: len(publish.told) > 1, what="a look")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [each.slot for each in publish.controls] == [None, None]
