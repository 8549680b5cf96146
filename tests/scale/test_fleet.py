"""Thirty pools, gangs, a dead node, a big scale-up, deletion: the operator against a real API server.

The pods have no process; what they would answer is answered for them (`scalelab`). Order matters
for the time only: the dead node's pod is waited for at the end.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.api.apiclient import PODS, POOLS, SERVICES, Obj
from tests.support.cluster.scalelab import GANG, NAMESPACE, Call, Lab, processless_pool
from tests.support.cluster.stuck import GRACE_SECONDS, OTHER, POOL, STUCK_SECONDS, StuckPod
from tests.support.waiting import eventually

POOLS_COUNT, REPLICAS = 30, 4
"""About twice as many pools as are reconciled at once."""
FLEET = {f"fleet-{number:02}" for number in range(POOLS_COUNT)}
HEADS = POOLS_COUNT * REPLICAS
GOING = ("going-0", "going-1")
"""Two more, which are deleted while no operator runs."""
READY_SECONDS = 180.0


@pytest.fixture(scope="module")
def fleet(bare_lab: Lab, stuck: StuckPod) -> set[str]:
    """Thirty pools of four pods, all Ready, and two that will go."""
    names = {*FLEET, *GOING}
    bare_lab.create(*(processless_pool(name, replicas=REPLICAS) for name in sorted(names)))
    bare_lab.await_condition("Ready", names, READY_SECONDS)
    return FLEET


def of_the_fleet(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.name.startswith("fleet-")]


def test_every_pool_of_a_fleet_gets_ready(lab: Lab, fleet: set[str]) -> None:
    pools = lab.pools()
    for name in fleet:
        status = pools[name]["status"]
        assert (status["phase"], status["readyReplicas"]) == ("Ready", REPLICAS)
        assert len(status["members"]) == REPLICAS
    pods = [pod for pod in lab.pods() if pod["metadata"]["name"].startswith("fleet-")]
    assert len(pods) == HEADS


def test_a_restarted_operator_writes_nothing_and_what_was_deleted_leaves_nothing(
    lab: Lab, fleet: set[str]
) -> None:
    eventually("the last writes are done", lambda: not of_the_fleet(lab.writes()), 30, every=2)
    before = {name: lab.pools()[name]["metadata"]["resourceVersion"] for name in fleet}
    lab.stop_operator()
    assert len(children(lab, GOING)) == len(GOING) * (REPLICAS + 2), "pods and Services"
    for name in GOING:
        lab.api.delete(f"{POOLS.format(NAMESPACE)}/{name}")
    eventually("nothing is left", lambda: not children(lab, GOING), 60)
    lab.calls()
    asked = lab.counts()["/v1/state"]
    # Engines have other defaults now, as an upgrade brings them: no pod is made anew for it.
    lab.defaults = {"image": "localhost/another", "podTemplate": {"labels": {"x": "y"}}}
    lab.start_operator()

    def all_are_heard() -> bool:
        return lab.counts()["/v1/state"] >= asked + HEADS

    eventually("all heads are heard", all_are_heard, 60)
    assert [call for call in lab.writes() if call.name.startswith(("fleet-", "going-"))] == []
    asked = lab.counts()["/v1/state"]
    eventually("and once more", all_are_heard, 60)
    time.sleep(1)
    assert of_the_fleet(lab.calls()) == [], "nor does a pool at rest cost a request"
    assert children(lab, GOING) == []
    pools = lab.pools()
    assert {name: pools[name]["metadata"]["resourceVersion"] for name in fleet} == before
    shown = lab.metrics()["rollout_pool_replicas_ready"]
    assert sum(n for key, n in shown.items() if key[1] in fleet) == HEADS


def children(lab: Lab, pools: tuple[str, ...]) -> list[Obj]:
    """Pods and Services of these pools."""
    return [
        child
        for name in pools
        for path in (PODS.format(NAMESPACE), SERVICES.format(NAMESPACE))
        for child in lab.api.items(path, f"rollout.dev/pool={name}")
    ]


def test_new_weights_reach_the_whole_fleet(lab: Lab, fleet: set[str]) -> None:
    target = {"epoch": 1, "version": 7, "source": {"path": "/models/next"}}
    for name in fleet:
        lab.patch(name, weights={"target": target})
    lab.await_condition("WeightsSynced", fleet, READY_SECONDS)
    pools = lab.pools()
    for name in fleet:
        weights = pools[name]["status"]["weights"]
        assert (weights["committed"]["version"], weights["lastUpdate"]["phase"]) == (7, "Complete")


@pytest.fixture(scope="module")
def gangs(bare_lab: Lab, stuck: StuckPod) -> Iterator[str]:
    bare_lab.create(processless_pool("gangs", replicas=2, **GANG))
    bare_lab.await_condition("Ready", {"gangs"}, 60)
    yield "gangs"
    bare_lab.api.delete(f"{POOLS.format(NAMESPACE)}/gangs")


@pytest.mark.parametrize("rank", [0, 1], ids=["head", "member"])
def test_a_gang_that_loses_a_pod_starts_anew_as_a_whole(lab: Lab, gangs: str, rank: int) -> None:
    before = uids(lab, gangs)
    assert sorted(before) == ["gangs-0-0", "gangs-0-1", "gangs-1-0", "gangs-1-1"]
    lab.api.delete(f"{PODS.format(NAMESPACE)}/gangs-0-{rank}")

    def renewed() -> bool:
        now = uids(lab, gangs)
        lost = {name: now.get(name) for name in ("gangs-0-0", "gangs-0-1")}
        return all(uid and uid != before[name] for name, uid in lost.items())

    eventually("both pods of the gang are new", renewed, 30)
    lab.await_condition("Ready", {gangs}, 60)
    after = uids(lab, gangs)
    assert sorted(after) == sorted(before)
    assert all(after[name] == before[name] for name in ("gangs-1-0", "gangs-1-1"))


def uids(lab: Lab, pool: str) -> dict[str, str]:
    """Living pods of a pool."""
    return {
        pod["metadata"]["name"]: pod["metadata"]["uid"]
        for pod in lab.pods(pool)
        if not pod["metadata"].get("deletionTimestamp")
    }


def test_a_big_scale_up_does_not_hold_up_another_pool(lab: Lab) -> None:
    """No pool's reaction waits for more than a second because another one gets 200 pods."""
    lab.create(processless_pool("big", replicas=0), processless_pool("small"))
    lab.await_condition("Ready", {"small"}, 60)
    alone = statistics.median(round_trip(lab, "small") for _ in range(5))
    calm = statistics.median(reaction(lab, "small") for _ in range(3))
    lab.patch("big", replicas=200)
    busy: list[float] = []
    floor: list[float] = []
    while len(lab.pods("big")) < 200 or len(busy) < 3:
        floor.append(round_trip(lab, "small"))
        busy.append(reaction(lab, "small"))
        assert len(busy) < 100, "the scale-up does not end"
    # A reaction is a chain of requests: as many times as long as one takes, so does the chain.
    slower = max(1.0, statistics.median(floor) / alone)
    assert statistics.median(busy) <= calm * slower + 1.0, (calm, slower, busy)
    for name in ("big", "small"):
        lab.api.delete(f"{POOLS.format(NAMESPACE)}/{name}")


def test_a_pool_that_shrinks_and_grows_makes_each_pod_once(lab: Lab) -> None:
    """Nobody deletes the pod that takes the name of one that went: neither the operator nor the simulated nodes."""
    lab.create(processless_pool("again", replicas=60))
    lab.await_condition("Ready", {"again"}, READY_SECONDS)
    lab.calls()
    lab.patch("again", replicas=1)
    eventually("they go", lambda: len(lab.pods("again")) < 30, 60, every=0.05)
    lab.patch("again", replicas=60)
    lab.await_condition("Ready", {"again"}, READY_SECONDS)
    asked = Counter(
        (call.verb, call.name, call.code)
        for call in lab.writes()
        if call.resource == "pods" and call.name.startswith("again-")
    )
    assert set(asked.values()) == {1}, asked.most_common(5)
    lab.api.delete(f"{POOLS.format(NAMESPACE)}/again")


def round_trip(lab: Lab, pool: str) -> float:
    """Seconds of a write and a read, without an operator."""
    began = time.monotonic()
    path = f"{POOLS.format(NAMESPACE)}/{pool}"
    lab.api.patch(path, {"metadata": {"annotations": {"example.org/mark": str(began)}}})
    lab.api.get(path)
    return time.monotonic() - began


def reaction(lab: Lab, pool: str) -> float:
    """Seconds from a change of state until the worker has done it; undone afterwards."""
    address = lab.pods(pool)[0]["status"]["podIP"]

    def lifecycle() -> Any:
        url = f"http://{address}:8001/v1/state"
        return httpx.get(url, timeout=10, trust_env=False).json()["lifecycle"]

    began = time.monotonic()
    lab.patch(pool, state="Paused")
    eventually("it is paused", lambda: lifecycle() == "Paused", 30, every=0.01)
    took = time.monotonic() - began
    lab.patch(pool, state="Active")
    eventually("it is active again", lambda: lifecycle() == "Active", 30, every=0.01)
    return took


def test_a_pod_of_a_dead_node_is_freed_and_made_on_another(lab: Lab, stuck: StuckPod) -> None:
    eventually("the pod is gone", lambda: stuck.uid not in uids_of(lab), 60)
    took = time.monotonic() - stuck.deleted_at
    assert took >= GRACE_SECONDS + STUCK_SECONDS - 1, "the API's times are whole seconds"
    lab.await_condition("Ready", {POOL}, 60)
    (pod,) = lab.pods(POOL)
    assert pod["spec"]["nodeName"] == OTHER


def uids_of(lab: Lab) -> set[str]:
    return {pod["metadata"]["uid"] for pod in lab.pods(POOL)}
