"""Gang schedulers against a real API server: what pods say, which PodGroups there are, and when none can be.

The tests install one after the other, and remove none: see `install_schedulers`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from localkube import Cluster
from rollout_operator.api.gangs import GangScheduler
from tests.support.api.apiclient import Obj
from tests.support.api.gang_installs import TWO_PODS, await_known, group_path, install_schedulers
from tests.support.api.poollab import PoolLab, pool_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLUGINS, VOLCANO, KUEUE = (
    GangScheduler.SCHEDULER_PLUGINS,
    GangScheduler.VOLCANO,
    GangScheduler.KUEUE,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(crd: Cluster) -> AsyncIterator[PoolLab]:
    async with pool_lab(crd, "gangs") as made:
        yield made


def create_gangs(lab: PoolLab, name: str, replicas: int = 1, queue: str | None = None) -> None:
    scheduling = {"gang": "PodGroup"} | ({"queue": queue} if queue else {})
    lab.create(name, replicas=replicas, scheduling=scheduling, **TWO_PODS)


def degraded(lab: PoolLab, name: str) -> tuple[str, str]:
    return lab.condition(name, "Degraded")[1:]


def uids(lab: PoolLab, name: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in lab.pods(name).values()}


def groups(lab: PoolLab, scheduler: GangScheduler, pool: str) -> dict[str, Obj]:
    path, selector = group_path(scheduler, lab.namespace), f"rollout.dev/pool={pool}"
    found = lab.api.get(path, labelSelector=selector)["items"]
    return {each["metadata"]["name"]: each for each in found}


async def test_without_a_gang_scheduler_there_are_no_pods_and_a_word_on_it(lab: PoolLab) -> None:
    await await_known(lab)
    create_gangs(lab, "none")
    await lab.until("it is told", lambda: degraded(lab, "none")[0] == "NoGangScheduler")
    assert "install Kueue, Volcano or scheduler-plugins" in degraded(lab, "none")[1]
    assert lab.pods("none") == {}
    await lab.until("there is an event", lambda: "NoGangScheduler" in lab.events("none"))
    assert lab.events("none")["NoGangScheduler"][0] == "Warning"
    install_schedulers(lab.api, PLUGINS)
    await await_known(lab, PLUGINS)
    await lab.until("its gang is there", lambda: len(lab.pods("none")) == 2)
    lab.api.delete(lab.path("pools", "none"))


async def test_scheduler_plugins_get_a_group_for_each_replica(lab: PoolLab) -> None:
    install_schedulers(lab.api, PLUGINS)
    await await_known(lab, PLUGINS)
    create_gangs(lab, "plug", replicas=2)
    await lab.until("there are two gangs", lambda: len(lab.pods("plug")) == 4)
    made = groups(lab, PLUGINS, "plug")
    assert sorted(made) == ["plug-0", "plug-1"]
    first = made["plug-0"]
    assert first["spec"]["minMember"] == 2
    owner = first["metadata"]["ownerReferences"][0]
    assert owner["uid"] == lab.get("plug")["metadata"]["uid"]
    for name, pod in lab.pods("plug").items():
        assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == name[:6]
        assert pod["spec"]["schedulerName"] == "scheduler-plugins-scheduler"

    # A gang that is made again is the same group, and a group that somebody deletes comes back.
    before = lab.pods("plug")["plug-0-0"]["metadata"]["uid"]
    lab.api.delete(lab.path("pods", "plug-0-0"), gracePeriodSeconds=0)

    def again() -> bool:
        found = lab.pods("plug")
        return len(found) == 4 and found["plug-0-0"]["metadata"]["uid"] != before

    await lab.until("the gang is back", again)
    assert groups(lab, PLUGINS, "plug")["plug-0"]["metadata"]["uid"] == first["metadata"]["uid"]
    lab.api.delete(group_path(PLUGINS, lab.namespace, "plug-1"))
    await lab.context.gangs.look_again()
    await lab.until("the group is back", lambda: sorted(groups(lab, PLUGINS, "plug")) == [*made])

    # Which one stays depends on whether the gang that was made again serves by now.
    lab.patch("plug", replicas=1)
    await lab.until("a group is gone", lambda: len(groups(lab, PLUGINS, "plug")) == 1)
    assert {name[:6] for name in lab.pods("plug")} == set(groups(lab, PLUGINS, "plug"))
    lab.patch("plug", suspend=True)
    await lab.until("no group is left", lambda: groups(lab, PLUGINS, "plug") == {})
    assert lab.pods("plug") == {}
    lab.api.delete(lab.path("pools", "plug"))


async def test_a_strangers_group_and_a_queue_that_nobody_has_are_told(lab: PoolLab) -> None:
    install_schedulers(lab.api, PLUGINS)
    await await_known(lab, PLUGINS)
    stranger = {"metadata": {"name": "odd-0"}, "spec": {"minMember": 1}}
    body = {"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup", **stranger}
    lab.api.create(group_path(PLUGINS, lab.namespace), body)
    create_gangs(lab, "odd")
    await lab.until("it is told", lambda: degraded(lab, "odd")[0] == "NameConflict")
    assert "podgroup/odd-0 exists but is not ours" in degraded(lab, "odd")[1]
    assert lab.pods("odd") == {}
    assert lab.api.get(group_path(PLUGINS, lab.namespace, "odd-0"))["spec"]["minMember"] == 1

    create_gangs(lab, "queue")
    await lab.until("there is a gang", lambda: len(lab.pods("queue")) == 2)
    before = uids(lab, "queue")
    lab.patch("queue", scheduling={"queue": "team"})
    await lab.until("it is told", lambda: degraded(lab, "queue")[0] == "NoGangScheduler")
    assert "spec.scheduling.queue must not be set" in degraded(lab, "queue")[1]
    assert uids(lab, "queue") == before, "what can't be made again stays"
    for name in ("odd", "queue"):
        lab.api.delete(lab.path("pools", name))


async def test_of_two_none_is_used_unless_the_operator_is_told_which(
    lab: PoolLab, crd: Cluster
) -> None:
    install_schedulers(lab.api, VOLCANO)
    await await_known(lab, PLUGINS, VOLCANO)
    create_gangs(lab, "two")
    await lab.until("it is told", lambda: degraded(lab, "two")[0] == "NoGangScheduler")
    assert "the cluster has SchedulerPlugins and Volcano: name one" in degraded(lab, "two")[1]
    assert lab.pods("two") == {}
    lab.api.delete(lab.path("pools", "two"))

    async with pool_lab(crd, "gangs-volcano", gang_scheduler=VOLCANO) as other:
        await await_known(other, PLUGINS, VOLCANO)
        create_gangs(other, "volc", queue="team-a")
        await other.until("there is a gang", lambda: len(other.pods("volc")) == 2)
        assert groups(other, VOLCANO, "volc")["volc-0"]["spec"] == {
            "minMember": 2,
            "queue": "team-a",
        }
        for pod in other.pods("volc").values():
            assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "volc-0"
            assert pod["spec"]["schedulerName"] == "volcano"
        other.patch("volc", scheduling={"queue": "team-b"})

        def moved() -> bool:
            found = groups(other, VOLCANO, "volc").get("volc-0", {"spec": {}})
            return bool(found["spec"].get("queue") == "team-b")

        await other.until("the group is in the other queue", moved)


async def test_kueue_is_told_by_the_pods_alone(lab: PoolLab, crd: Cluster) -> None:
    install_schedulers(lab.api, PLUGINS, VOLCANO, KUEUE)
    async with pool_lab(crd, "gangs-kueue", gang_scheduler=KUEUE) as other:
        await await_known(other, PLUGINS, VOLCANO, KUEUE)
        create_gangs(other, "kue")
        await other.until("it is told", lambda: degraded(other, "kue")[0] == "NoGangScheduler")
        assert "spec.scheduling.queue is required" in degraded(other, "kue")[1]
        other.patch("kue", scheduling={"queue": "team"})
        await other.until("there is a gang", lambda: len(other.pods("kue")) == 2)
        for pod in other.pods("kue").values():
            meta: dict[str, Any] = pod["metadata"]
            assert meta["labels"]["kueue.x-k8s.io/queue-name"] == "team"
            assert meta["labels"]["kueue.x-k8s.io/pod-group-name"] == "kue-0"
            assert meta["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"
            assert pod["spec"]["schedulerName"] == "default-scheduler"
