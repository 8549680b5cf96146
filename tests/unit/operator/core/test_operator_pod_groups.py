"""What a gang scheduler reads: the marks of pods, PodGroups, and queues that it needs or has not."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_operator.api.gangs import GangScheduler, pod_group_name
from rollout_operator.api.names import MAX_NAME_LENGTH
from rollout_operator.config import EngineDefaults
from rollout_operator.core.pods.builder import PodBuilder
from rollout_operator.core.pods.pod_groups import pod_group, queue_trouble
from tests.support.unit.poolspecs import GANG, spec_of

PLUGINS, VOLCANO, KUEUE = (
    GangScheduler.SCHEDULER_PLUGINS,
    GangScheduler.VOLCANO,
    GangScheduler.KUEUE,
)
SCHEDULED = GANG | {"scheduling": {"gang": "PodGroup", "queue": "team"}}


def build(scheduler: GangScheduler | None, defaults: Any = None, **spec: Any) -> Any:
    base = EngineDefaults.model_validate({"image": "w:1", "podTemplate": defaults or {}})
    builder = PodBuilder(
        "pool", "ns", "uid", "", spec_of(**SCHEDULED | spec), base, gang_scheduler=scheduler
    )
    return builder.build_pod(1, 1, 0)


@pytest.mark.parametrize(
    ("scheduler", "labels", "annotations", "name"),
    [
        (None, {}, {}, None),
        (PLUGINS, {"scheduling.x-k8s.io/pod-group": "pool-1"}, {}, "scheduler-plugins-scheduler"),
        (VOLCANO, {}, {"scheduling.k8s.io/group-name": "pool-1"}, "volcano"),
        (
            KUEUE,
            {"kueue.x-k8s.io/pod-group-name": "pool-1", "kueue.x-k8s.io/queue-name": "team"},
            {
                "kueue.x-k8s.io/pod-group-total-count": "2",
                "kueue.x-k8s.io/retriable-in-group": "false",
            },
            None,
        ),
    ],
)
def test_a_pod_says_to_which_group_it_belongs(
    scheduler: GangScheduler | None, labels: Any, annotations: Any, name: str | None
) -> None:
    pod, plain = build(scheduler), build(None)
    for what, marks in (("labels", labels), ("annotations", annotations)):
        assert pod["metadata"][what] == plain["metadata"][what] | marks
    assert pod["spec"].get("schedulerName") == name
    template = {"schedulerName": "ours"}
    assert build(scheduler, template)["spec"]["schedulerName"] == "ours"


def test_each_replica_has_a_group_whose_name_fits_into_a_label() -> None:
    group = pod_group("pool", "ns", "uid", 1, spec_of(**SCHEDULED), VOLCANO)
    assert (group["apiVersion"], group["kind"]) == ("scheduling.volcano.sh/v1beta1", "PodGroup")
    assert group["spec"] == {"minMember": 2, "queue": "team"}
    assert group["metadata"]["name"] == "pool-1"
    assert group["metadata"]["ownerReferences"][0]["uid"] == "uid"
    plugins = pod_group("pool", "ns", "uid", 1, spec_of(**SCHEDULED), PLUGINS)
    assert plugins["apiVersion"] == "scheduling.x-k8s.io/v1alpha1"
    assert plugins["spec"] == {"minMember": 2}
    assert len(pod_group_name("p" * MAX_NAME_LENGTH, 9999)) <= 63


@pytest.mark.parametrize(
    ("scheduler", "queue", "words"),
    [
        (KUEUE, None, "spec.scheduling.queue is required, because the cluster's gang scheduler is"),
        (PLUGINS, "team", "spec.scheduling.queue must not be set, because the cluster's gang"),
        (KUEUE, "team", ""),
        (VOLCANO, "team", ""),
        (VOLCANO, None, ""),
        (PLUGINS, None, ""),
    ],
)
def test_a_queue_that_a_scheduler_needs_or_has_not_is_told(
    scheduler: GangScheduler, queue: str | None, words: str
) -> None:
    spec = spec_of(**SCHEDULED | {"scheduling": {"gang": "PodGroup", "queue": queue}})
    trouble = queue_trouble(spec, scheduler)
    assert trouble.startswith(words) if words else not trouble
