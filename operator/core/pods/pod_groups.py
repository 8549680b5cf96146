"""What makes the pods of a replica a group to a gang scheduler: marks on pods, the PodGroup. Pure."""

from __future__ import annotations

from rollout_operator.api import gangs, names
from rollout_operator.api.gangs import GangScheduler
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.core.services import child_metadata


def mark_pod(
    pod: Obj, pool: str, replica: int, spec: RolloutReplicaSpec, scheduler: GangScheduler
) -> None:
    """Make a pod a member of its replica's group, and have the group's scheduler schedule it.

    A `schedulerName` that the pod has already stays: an installation may have named its scheduler.
    """
    name, meta = gangs.pod_group_name(pool, replica), pod["metadata"]
    if scheduler is GangScheduler.SCHEDULER_PLUGINS:
        meta["labels"][gangs.PLUGINS_GROUP_LABEL] = name
    elif scheduler is GangScheduler.VOLCANO:
        meta["annotations"][gangs.VOLCANO_GROUP_ANNOTATION] = name
    else:
        meta["labels"][gangs.KUEUE_GROUP_LABEL] = name
        meta["labels"][gangs.KUEUE_QUEUE_LABEL] = spec.scheduling.queue
        meta["annotations"][gangs.KUEUE_COUNT_ANNOTATION] = str(spec.parallelism.nodes)
        # A replica ends whole, so Kueue must not wait for another pod in the place of one that failed.
        meta["annotations"][gangs.KUEUE_RETRY_ANNOTATION] = "false"
    if scheduler in gangs.SCHEDULER_NAMES:
        pod["spec"].setdefault("schedulerName", gangs.SCHEDULER_NAMES[scheduler])


def pod_group(
    pool: str,
    namespace: str,
    uid: str,
    replica: int,
    spec: RolloutReplicaSpec,
    scheduler: GangScheduler,
) -> Obj:
    """Return the PodGroup of a replica, owned by the RolloutReplica, for a scheduler that needs it."""
    wanted: Obj = {"minMember": spec.parallelism.nodes}
    if scheduler is GangScheduler.VOLCANO and spec.scheduling.queue is not None:
        wanted["queue"] = spec.scheduling.queue
    name, labels = gangs.pod_group_name(pool, replica), {names.LABEL_REPLICA: str(replica)}
    return {
        "apiVersion": gangs.GROUP_API_VERSIONS[scheduler],
        "kind": "PodGroup",
        "metadata": child_metadata(name, pool, namespace, uid, labels),
        "spec": wanted,
    }


def queue_trouble(spec: RolloutReplicaSpec, scheduler: GangScheduler) -> str:
    """Return what is wrong with the queue for this scheduler, and the fix; empty: nothing."""
    queue = spec.scheduling.queue
    if scheduler is GangScheduler.KUEUE and queue is None:
        return (
            "spec.scheduling.queue is required, because the cluster's gang scheduler is Kueue: name a "
            "LocalQueue of the pool's namespace"
        )
    if scheduler is GangScheduler.SCHEDULER_PLUGINS and queue is not None:
        return (
            "spec.scheduling.queue must not be set, because the cluster's gang scheduler is "
            "scheduler-plugins, which has no queues: remove it"
        )
    return ""
