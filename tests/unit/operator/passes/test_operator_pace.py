"""How often progress is told: pools that move together share the writes out."""

from __future__ import annotations

import pytest

from rollout_operator.api.names import ANNOTATION_PAUSED
from rollout_operator.api.objects import PoolKey
from rollout_operator.passes.settings import MAX_STATUS_PROGRESS_SECONDS, STATUS_PROGRESS_SECONDS
from rollout_operator.passes.status_pace import StatusPace
from tests.support.unit.passlab import (
    PODS,
    PassLab,
    condition,
    head,
    pod,
    worker_of,
)


def let_move(pace: StatusPace, count: int, *, moving: bool = True) -> None:
    for number in range(count):
        pace.note_pool(PoolKey("rl", f"other-{number}"), moving=moving)


def test_the_pace_has_bounds_and_forgets_who_has_arrived() -> None:
    pace = StatusPace()
    assert pace.progress_seconds() == STATUS_PROGRESS_SECONDS
    let_move(pace, 2000)
    assert pace.progress_seconds() == MAX_STATUS_PROGRESS_SECONDS
    let_move(pace, 2000, moving=False)
    assert pace.progress_seconds() == STATUS_PROGRESS_SECONDS


async def test_among_many_pools_progress_waits_and_transitions_do_not(lab: PassLab) -> None:
    lab.has_pool(replicas=2)
    for replica in range(2):
        lab.has_pod(pod(replica))
    let_move(lab.ctx.pace, 99)
    await lab.reconcile()
    lab.clock.steady += 1
    placed = pod()["spec"] | {"nodeName": "n1"}
    lab.has_pod({**pod(resourceVersion="9"), "spec": placed})
    assert await lab.reconcile() == pytest.approx(49), "100 pools, 2 writes a second"
    assert len(lab.written) == 1
    lab.change(state="Paused")
    await lab.reconcile()
    assert len(lab.written) == 2, "at once"
    assert condition(lab.status, "Ready") == ("False", "Paused")


async def test_a_pool_among_thousands_looks_again_whether_they_still_move(lab: PassLab) -> None:
    lab.has_pool(replicas=2)
    for replica in range(2):
        lab.has_pod(pod(replica))
    let_move(lab.ctx.pace, 1999)
    await lab.reconcile()
    lab.has_pod({**pod(resourceVersion="9"), "spec": pod()["spec"] | {"nodeName": "n1"}})
    assert await lab.reconcile() == 60
    let_move(lab.ctx.pace, 1999, moving=False)
    lab.clock.steady += 60
    await lab.reconcile()
    assert len(lab.written) == 2


async def test_a_pool_that_is_gone_does_not_slow_the_others(lab: PassLab) -> None:
    lab.has_pool(replicas=2)
    for replica in range(2):
        lab.has_pod(pod(replica))
    let_move(lab.ctx.pace, 19)
    await lab.reconcile()
    assert lab.ctx.pace.progress_seconds() == 10
    lab.goes()
    await lab.reconcile()
    assert lab.ctx.pace.progress_seconds() == pytest.approx(9.5)


@pytest.mark.parametrize("paused", [True, False], ids=["paused", "refused"])
async def test_a_pool_that_gets_no_further_does_not_slow_the_others(
    lab: PassLab, paused: bool
) -> None:
    lab.has_pool(replicas=2)
    if not paused:
        lab.api.answer("POST", PODS, {"reason": "Forbidden", "message": "exceeded quota"}, 403)
    let_move(lab.ctx.pace, 19)
    await lab.reconcile()
    assert lab.ctx.pace.progress_seconds() == 10
    if paused:
        lab.change(notes={ANNOTATION_PAUSED: "true"})
    await lab.reconcile()
    assert lab.ctx.pace.progress_seconds() == pytest.approx(9.5)


async def test_loaded_weights_of_a_pool_that_starts_are_told_at_the_pace(lab: PassLab) -> None:
    lab.has_pool()
    lab.has_pod(pod())
    await lab.reconcile()
    lab.has_pod(head(resourceVersion="9"), worker_of(required=None))
    await lab.reconcile()
    await lab.polled()
    left = await lab.reconcile()
    assert left is not None
    assert (0 < left <= 1, len(lab.written)) == (True, 1)
    lab.clock.steady += 1
    await lab.reconcile()
    assert condition(lab.status, "WeightsSynced") == ("True", "Synced")
    assert lab.status["weights"]["committed"]["rootHash"] == "hash(0, 0)"


async def test_what_a_commit_rests_on_waits_for_no_pace(lab: PassLab) -> None:
    sleeper = worker_of(foreign_hold="Asleep", woken=True, empty=True)
    lab.has_pool()
    lab.has_pod(head(), sleeper)
    await lab.reconcile()
    await lab.polled()
    await lab.reconcile()
    await lab.called()
    await lab.polled()
    told = len(lab.written)
    assert "rootHash" not in lab.status["weights"]["committed"]
    await lab.reconcile()
    await lab.called()
    assert [verb for _, verb in lab.asked] == ["stage", "commit"]
    assert len(lab.written) == told + 1, "at once"
    assert lab.status["weights"]["committed"]["rootHash"] == "hash(0, 0)"


async def test_a_pool_that_waits_for_a_node_does_not_count_as_moving(lab: PassLab) -> None:
    lab.has_pool(replicas=1)
    lab.has_pod(pod())
    await lab.reconcile()
    assert lab.ctx.pace.moving_count() == 1
    lab.clock.steady += 120
    lab.clock.wall += 120
    no_node = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    since = {"lastTransitionTime": "1970-01-12T13:00:00Z", "message": "0/3 nodes are available"}
    lab.has_pod({**pod(resourceVersion="9"), "status": {"conditions": [no_node | since]}})
    await lab.reconcile()
    assert condition(lab.status, "Progressing") == ("True", "Unschedulable")
    assert lab.ctx.pace.moving_count() == 0
