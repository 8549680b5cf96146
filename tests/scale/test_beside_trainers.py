"""32 rollout pods beside eight trainer pods of eight devices each: real scheduler, real claims, no processes.

Two of the devices belong to each rollout pod, four of them share a claim. One node is lost before the trainers
restart; what comes of that is in test_lost_node.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.cluster.gpujob import DEVICES, POOL, SLOTS, TRAINERS, Job, rollout_pods
from tests.support.cluster.scalelab import Lab
from tests.support.waiting import eventually


@contextmanager
def moves(job: Job, *trainers: int) -> Iterator[None]:
    """What happens here makes just the pods beside these of the trainer's anew, on its new claims."""
    before = {name: uid for name, (uid, _) in job.seats().items()}
    wanted = set[str]().union(*map(rollout_pods, trainers))

    def fresh() -> set[str]:
        now = {name: uid for name, (uid, _) in job.seats().items()}
        return {name for name, uid in now.items() if before.get(name) != uid}

    yield
    eventually("the pods are made anew", lambda: fresh() >= wanted, 30, 0.2, seen=fresh)
    assert fresh() == wanted


def test_each_has_its_share_whatever_came_first(lab: Lab, job: Job) -> None:
    job.await_places()
    devices = {device for _, seat in job.seats().values() for device in seat.devices}
    assert len(devices) == TRAINERS * DEVICES
    status = lab.pools()[POOL]["status"]
    assert (status["readyReplicas"], status.get("restarts", 0)) == (TRAINERS * SLOTS, 0)
    for pod in lab.pods(POOL):
        written = [e for e in pod["metadata"]["managedFields"] if e["manager"] != "kube-scheduler"]
        assert "f:nodeName" not in str(written), "the scheduler places pods, nobody else"


def test_pods_follow_a_generated_claim_and_outlive_the_trainer_on_one_that_stays(
    job: Job, lost_node: str
) -> None:
    stays, goes = 4, 5
    with moves(job, goes):
        for index in (stays, goes):
            job.remove_pod(index)
        eventually("the trainer's pods are gone", lambda: job.gone(stays) and job.gone(goes), 30)
        for index in (goes, stays):
            job.add_pod(index)


def test_pods_follow_a_claim_that_is_replaced(job: Job, lost_node: str) -> None:
    with moves(job, 0):
        job.remove_claim(0)
        job.remove_pod(0)
        eventually("the claim is gone", lambda: job.gone(0), 30)
        job.add_pod(0)
        job.add_claim(0)
