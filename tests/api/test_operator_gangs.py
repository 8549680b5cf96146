"""Gang schedulers against a real API server: what pods say, which PodGroups there are, and when none can be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import pytest_asyncio

from localkube import Cluster
from rollout_common.kube.errors import KubeError
from rollout_operator.api.gangs import GangScheduler
from tests.support.api.apiclient import ApiError, Obj
from tests.support.api.gang_installs import (
    group_path,
    install_gang_scheduler,
    remove_gang_scheduler,
)
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


@contextmanager
def installed(lab: PoolLab, *schedulers: GangScheduler) -> Iterator[None]:
    for each in schedulers:
        install_gang_scheduler(lab.api, each)
    try:
        yield
    finally:
        for each in schedulers:
            remove_gang_scheduler(lab.api, each)


async def known(lab: PoolLab, *schedulers: GangScheduler) -> None:
    """Have the operator look until it knows of exactly these."""
    for _ in range(100):
        with suppress(KubeError):  # a new kind's storage takes some seconds
            await lab.context.gangs.look_again()
        if lab.context.gangs.found == frozenset(schedulers):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the operator knows {lab.context.gangs.found}")


def create_gangs(lab: PoolLab, name: str, replicas: int = 1, queue: str | None = None) -> None:
    scheduling = {"gang": "PodGroup"} | ({"queue": queue} if queue else {})
    lab.create(
        name,
        replicas=replicas,
        engine={"type": "vllm", "image": "localhost/none"},
        parallelism={"tensor": 2, "nodes": 2},
        accelerator={"resource": "example.com/gpu"},
        scheduling=scheduling,
    )


def degraded(lab: PoolLab, name: str) -> tuple[str, str]:
    conditions = lab.get(name).get("status", {}).get("conditions", ())
    found = next((c for c in conditions if c["type"] == "Degraded"), None)
    return ("", "") if found is None else (found["reason"], found["message"])


def groups(lab: PoolLab, scheduler: GangScheduler) -> dict[str, Obj]:
    found = lab.api.get(group_path(scheduler, lab.namespace))["items"]
    return {each["metadata"]["name"]: each for each in found}


async def test_without_a_gang_scheduler_there_are_no_pods_and_a_word_on_it(lab: PoolLab) -> None:
    await known(lab)
    create_gangs(lab, "none")
    await lab.until("it is told", lambda: degraded(lab, "none")[0] == "NoGangScheduler")
    assert "install Kueue, Volcano or scheduler-plugins" in degraded(lab, "none")[1]
    assert lab.pods("none") == {}

    def told() -> bool:
        events = lab.api.get(f"/apis/events.k8s.io/v1/namespaces/{lab.namespace}/events")["items"]
        return any(e["reason"] == "NoGangScheduler" and e["type"] == "Warning" for e in events)

    await lab.until("there is an event", told)
    with installed(lab, KUEUE, VOLCANO):
        await known(lab, KUEUE, VOLCANO)
        await lab.until("two are told", lambda: "Kueue and Volcano" in degraded(lab, "none")[1])
        assert lab.pods("none") == {}
        lab.api.delete(lab.path("pools", "none"))
    await known(lab)


async def test_scheduler_plugins_get_a_group_for_each_replica(lab: PoolLab) -> None:
    with installed(lab, PLUGINS):
        await known(lab, PLUGINS)
        create_gangs(lab, "plug", replicas=2)
        await lab.until("there are two gangs", lambda: len(lab.pods("plug")) == 4)
        made = groups(lab, PLUGINS)
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
        assert groups(lab, PLUGINS)["plug-0"]["metadata"]["uid"] == first["metadata"]["uid"]
        lab.api.delete(group_path(PLUGINS, lab.namespace, "plug-1"))
        await lab.context.gangs.look_again()
        await lab.until("the group is back", lambda: sorted(groups(lab, PLUGINS)) == [*made])

        lab.patch("plug", replicas=1)
        await lab.until("its group is gone", lambda: sorted(groups(lab, PLUGINS)) == ["plug-0"])
        lab.patch("plug", suspend=True)
        await lab.until("no group is left", lambda: groups(lab, PLUGINS) == {})
        assert lab.pods("plug") == {}
        lab.api.delete(lab.path("pools", "plug"))


async def test_a_strangers_group_and_a_queue_that_nobody_has_are_told(lab: PoolLab) -> None:
    with installed(lab, PLUGINS):
        await known(lab, PLUGINS)
        stranger = {"metadata": {"name": "odd-0"}, "spec": {"minMember": 1}}
        body = {"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup", **stranger}
        lab.api.create(group_path(PLUGINS, lab.namespace), body)
        create_gangs(lab, "odd")
        await lab.until("it is told", lambda: degraded(lab, "odd")[0] == "NameConflict")
        assert "podgroup/odd-0 exists but is not ours" in degraded(lab, "odd")[1]
        assert lab.pods("odd") == {}
        assert groups(lab, PLUGINS)["odd-0"]["spec"]["minMember"] == 1
        create_gangs(lab, "queue", queue="team")
        await lab.until("it is told", lambda: degraded(lab, "queue")[0] == "NoGangScheduler")
        assert "spec.scheduling.queue must not be set" in degraded(lab, "queue")[1]
        for name in ("odd", "queue"):
            lab.api.delete(lab.path("pools", name))
    await known(lab)


async def test_volcano_gets_the_queue_in_its_group(lab: PoolLab) -> None:
    with installed(lab, VOLCANO):
        await known(lab, VOLCANO)
        create_gangs(lab, "volc", queue="team-a")
        await lab.until("there is a gang", lambda: len(lab.pods("volc")) == 2)
        assert groups(lab, VOLCANO)["volc-0"]["spec"] == {"minMember": 2, "queue": "team-a"}
        for pod in lab.pods("volc").values():
            assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "volc-0"
            assert pod["spec"]["schedulerName"] == "volcano"
        lab.patch("volc", scheduling={"queue": "team-b"})

        def moved() -> bool:
            found = groups(lab, VOLCANO).get("volc-0", {"spec": {}})
            return bool(found["spec"].get("queue") == "team-b")

        await lab.until("the group is in the other queue", moved)
        lab.api.delete(lab.path("pools", "volc"))
    await known(lab)


async def test_kueue_is_told_by_the_pods_alone(lab: PoolLab) -> None:
    with installed(lab, KUEUE):
        await known(lab, KUEUE)
        create_gangs(lab, "kue")
        await lab.until("it is told", lambda: degraded(lab, "kue")[0] == "NoGangScheduler")
        assert "spec.scheduling.queue is required" in degraded(lab, "kue")[1]
        lab.patch("kue", scheduling={"queue": "team"})
        await lab.until("there is a gang", lambda: len(lab.pods("kue")) == 2)
        for pod in lab.pods("kue").values():
            meta: dict[str, Any] = pod["metadata"]
            assert meta["labels"]["kueue.x-k8s.io/queue-name"] == "team"
            assert meta["labels"]["kueue.x-k8s.io/pod-group-name"] == "kue-0"
            assert meta["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"
            assert pod["spec"]["schedulerName"] == "default-scheduler"
        lab.api.delete(lab.path("pools", "kue"))
    await known(lab)


async def test_a_queue_needs_a_gang(lab: PoolLab) -> None:
    with pytest.raises(ApiError, match=r"spec.scheduling.queue needs spec.scheduling.gang"):
        lab.create("alone", scheduling={"queue": "team"})
