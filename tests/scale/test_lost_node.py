"""Colocated pods of a lost node: told, never removed by force, and made anew once the node is off.

The node is lost before the other files' tests, so that what is waited for here has almost passed.
"""

from __future__ import annotations

from tests.support.api.apiclient import POOLS
from tests.support.cluster.gpujob import (
    LOST,
    POOL,
    SLOTS,
    SPARE,
    TRAINERS,
    Job,
    rollout_pods,
)
from tests.support.cluster.scalelab import NAMESPACE, Lab
from tests.support.cluster.stuck import GRACE_SECONDS, STUCK_SECONDS
from tests.support.waiting import eventually


def test_its_pods_are_told_and_not_forced(lab: Lab, job: Job, lost_node: str) -> None:
    def message() -> str:
        return str(lab.pools()[POOL]["status"]["message"])

    told = f"on node {lost_node!r} outlived its grace period and is not removed by force"
    # An operator that was restarted meanwhile counts anew what it sees itself.
    seconds = 2 * (GRACE_SECONDS + STUCK_SECONDS) + 15
    eventually("status tells", lambda: told in message(), seconds, 0.2, seen=message)
    there = {pod["metadata"]["name"] for pod in lab.pods(POOL)}
    assert there > rollout_pods(LOST)
    said = Lab(lab.cluster, lab.api).writes()  # from the beginning
    deleted = {each.name for each in said if each.verb == "delete" and each.resource == "pods"}
    assert not deleted & rollout_pods(LOST), "whoever lost the node evicted them, and nobody else"


def test_once_the_node_is_off_its_pods_go_where_the_trainer_goes(
    lab: Lab, job: Job, lost_node: str
) -> None:
    before = job.seats()
    job.give_up(lost_node)
    job.add_node(SPARE)
    job.publish(SPARE)
    eventually("the trainer's pod is gone", lambda: job.gone(LOST), 30)
    job.add_pod(LOST)
    job.await_places()
    after = job.seats()
    assert {name for name in after if after[name][0] != before[name][0]} == rollout_pods(LOST)
    assert {after[name][1].node for name in rollout_pods(LOST)} == {f"gpus-{SPARE}"}
    status = lab.pools()[POOL]["status"]
    assert (status["readyReplicas"], status.get("restarts", 0)) == (TRAINERS * SLOTS, 0)
    lab.api.delete(f"{POOLS.format(NAMESPACE)}/{POOL}")
