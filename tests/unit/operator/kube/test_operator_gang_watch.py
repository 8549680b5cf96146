"""Which gang scheduler is used, and what is said if none is, of an API server that shows one, several or none."""

from __future__ import annotations

import pytest

from rollout_common.kube.errors import Forbidden
from rollout_operator.api.gangs import GangScheduler
from rollout_operator.api.objects import PoolKey
from rollout_operator.kube.gang_watch import GangWatch
from rollout_operator.kube.kube_client import KubeClient
from tests.support.loopback import Loopback

PLUGINS, VOLCANO, KUEUE = (
    GangScheduler.SCHEDULER_PLUGINS,
    GangScheduler.VOLCANO,
    GangScheduler.KUEUE,
)
GROUPS = {
    PLUGINS: "scheduling.x-k8s.io",
    VOLCANO: "scheduling.volcano.sh",
    KUEUE: "kueue.x-k8s.io",
}
VOLCANOS = "/apis/scheduling.volcano.sh/v1beta1/podgroups"
POOL = PoolKey("rl", "p")


def has(api: Loopback, *schedulers: GangScheduler) -> None:
    names = ["apps", *(GROUPS[each] for each in schedulers)]
    api.answer("GET", "/apis", {"groups": [{"name": name} for name in names]})


def lists(api: Loopback, path: str, *names: str) -> None:
    labels = {"rollout.dev/pool": POOL.name}
    items = [
        {"metadata": {"namespace": "rl", "name": n, "uid": f"of {n}", "labels": labels}}
        for n in names
    ]
    api.answer("GET", path, {"metadata": {"resourceVersion": "1"}, "items": items})


@pytest.mark.parametrize(
    ("there", "chosen", "used", "words"),
    [
        ((), None, None, "the cluster has no gang scheduler: install Kueue, Volcano or"),
        ((KUEUE,), None, KUEUE, ""),
        ((KUEUE, VOLCANO), None, None, "the cluster has Kueue and Volcano: name one in --gang-"),
        ((KUEUE, VOLCANO), KUEUE, KUEUE, ""),
        ((VOLCANO,), KUEUE, None, "the cluster lacks Kueue, which --gang-scheduler (extraArgs"),
    ],
)
async def test_the_one_that_is_there_or_named_is_used(
    api: Loopback,
    there: tuple[GangScheduler, ...],
    chosen: GangScheduler | None,
    used: GangScheduler | None,
    words: str,
) -> None:
    has(api, *there)
    woken: list[PoolKey] = []
    async with KubeClient() as kube:
        watch = GangWatch(kube, woken.append, chosen=chosen)
        watch.note_pool(POOL, wants_gang=True)
        assert (watch.found, watch.scheduler, watch.find_trouble()) == (None, None, "")
        await watch.look_again()
    assert watch.scheduler is used
    assert words in watch.find_trouble() if words else not watch.find_trouble()
    assert woken == [POOL]


async def test_a_pool_is_woken_for_groups_that_come_and_go(api: Loopback) -> None:
    has(api, VOLCANO)
    lists(api, VOLCANOS, "p-0", "p-1")
    woken: list[PoolKey] = []
    async with KubeClient() as kube:
        watch = GangWatch(kube, woken.append)
        await watch.look_again()
        assert watch.pool_groups(POOL) == {"p-0": "of p-0", "p-1": "of p-1"}
        await watch.look_again()
        assert woken == [POOL], "nothing has changed"
        watch.note_group(POOL, "p-1", None)
        lists(api, VOLCANOS, "p-0")
        await watch.look_again()
        assert woken == [POOL], "it did that itself"
        lists(api, VOLCANOS)
        await watch.look_again()
        assert woken == [POOL, POOL]
        assert not watch.pool_groups(POOL)
        watch.note_pool(POOL, wants_gang=True)
        has(api)
        await watch.look_again()
    assert woken == [POOL, POOL, POOL]
    assert "no gang scheduler" in watch.find_trouble(), "it has been removed"


async def test_who_may_not_list_groups_still_knows_the_scheduler(api: Loopback) -> None:
    """Then a pool's own write is refused, and its status says why."""
    has(api, VOLCANO)
    api.answer("GET", VOLCANOS, {"reason": "Forbidden"}, 403)
    async with KubeClient() as kube:
        watch = GangWatch(kube, lambda key: None)
        with pytest.raises(Forbidden):
            await watch.look_again()
    assert watch.scheduler is VOLCANO


async def test_a_namespace_that_cant_be_listed_blinds_nobody_for_others(
    api: Loopback, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that was deleted, with the role in it."""
    path = "/apis/scheduling.volcano.sh/v1beta1/namespaces/{}/podgroups"
    has(api, VOLCANO)
    lists(api, path.format("gone"))
    lists(api, path.format("rl"), "p-0", "p-1")
    woken: list[PoolKey] = []
    async with KubeClient() as kube:
        watch = GangWatch(kube, woken.append, ("gone", "rl"))
        watch.note_group(PoolKey("gone", "q"), "q-0", "of q-0")
        await watch.look_again()
        watch.note_group(PoolKey("gone", "q"), "q-0", "of q-0")
        woken.clear()
        api.answer("GET", path.format("gone"), {"reason": "Forbidden"}, 403)
        lists(api, path.format("rl"), "p-0")
        for _ in range(2):
            await watch.look_again()
    assert (watch.pool_groups(POOL), woken) == ({"p-0": "of p-0"}, [POOL])
    assert watch.pool_groups(PoolKey("gone", "q")) == {"q-0": "of q-0"}, "as it was known"
    assert caplog.text.count("can't list the PodGroups of gone") == 1
