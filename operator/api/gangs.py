"""Gang schedulers: their API groups, and how a pod says to which group it belongs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypeGuard


class GangScheduler(StrEnum):
    """What starts the pods of a replica together or not at all."""

    KUEUE = "Kueue"
    VOLCANO = "Volcano"
    SCHEDULER_PLUGINS = "SchedulerPlugins"


API_GROUPS: Final[Mapping[str, GangScheduler]] = {
    "kueue.x-k8s.io": GangScheduler.KUEUE,
    "scheduling.volcano.sh": GangScheduler.VOLCANO,
    "scheduling.x-k8s.io": GangScheduler.SCHEDULER_PLUGINS,
}
"""API groups by which a cluster shows what it has."""

GROUP_API_VERSIONS: Final[Mapping[GangScheduler, str]] = {
    GangScheduler.VOLCANO: "scheduling.volcano.sh/v1beta1",
    GangScheduler.SCHEDULER_PLUGINS: "scheduling.x-k8s.io/v1alpha1",
}
"""Of the PodGroup that a scheduler needs; Kueue makes its Workload itself from what the pods say."""

SCHEDULER_NAMES: Final[Mapping[GangScheduler, str]] = {
    GangScheduler.VOLCANO: "volcano",
    GangScheduler.SCHEDULER_PLUGINS: "scheduler-plugins-scheduler",
}
"""`schedulerName` of the pods unless a template has one: the names in the projects' own charts."""

PLUGINS_GROUP_LABEL = "scheduling.x-k8s.io/pod-group"
VOLCANO_GROUP_ANNOTATION = "scheduling.k8s.io/group-name"
KUEUE_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
KUEUE_GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
KUEUE_COUNT_ANNOTATION = "kueue.x-k8s.io/pod-group-total-count"
KUEUE_RETRY_ANNOTATION = "kueue.x-k8s.io/retriable-in-group"


def needs_groups(scheduler: GangScheduler | None) -> TypeGuard[GangScheduler]:
    """Return whether there is a scheduler, and one to which PodGroups show the gangs."""
    return scheduler in GROUP_API_VERSIONS


def group_resource(scheduler: GangScheduler) -> str:
    """Return the resource of its PodGroups, as `KubeClient` names it."""
    return f"podgroups.{GROUP_API_VERSIONS[scheduler].partition('/')[0]}"


def pod_group_name(pool: str, replica: int) -> str:
    """Name of a replica's group; at most 55 characters, so that it fits into a label."""
    return f"{pool}-{replica}"
