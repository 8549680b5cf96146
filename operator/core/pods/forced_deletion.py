"""Pods that outlive their deletion: when one is removed by force, and why one is not. Pure."""

from __future__ import annotations

from rollout_operator.core.observed_pool import Pod
from rollout_operator.core.pass_plan import DeletePod, RequeueAfter
from rollout_operator.core.settings import FORCED_DELETION_SECONDS


def plan_forced_deletion(pod: Pod, now: float, wait: RequeueAfter) -> DeletePod | None:
    """Return the deletion by force of a pod that outlived its grace period, if it is due.

    Never of a colocated pod: its container may run on after it, with the trainer's devices.
    """
    if pod.deletion_at is None:
        return None
    left = _seconds_until_forced(pod, now)
    wait.at_most(left if left > 0 else FORCED_DELETION_SECONDS)
    if left > 0 or pod.colocated:
        return None
    return DeletePod(pod.name, pod.uid, 0, "it outlived its grace period", forced=True)


def stuck_message(pod: Pod, now: float) -> str | None:
    """Say what keeps a pod that outlived its grace period, and what helps; None: nothing that is known."""
    late = pod.forced_ago is not None or _seconds_until_forced(pod, now) <= 0
    if pod.deletion_at is None or not late:
        return None
    where = f" on node {pod.node!r}" if pod.node else ""
    # While an engine may run next to a trainer, that comes first: its node is to be mended, finalizers or not.
    if pod.finalizers and (not pod.colocated or pod.finished_at is not None):
        return (
            f"pod {pod.name!r}{where} outlived its grace period, and finalizers of somebody else keep it "
            f"({', '.join(pod.finalizers)}): mend the controller that sets them, or, if it is gone, remove them by "
            f'`kubectl patch pod {pod.name} --type merge -p \'{{"metadata":{{"finalizers":null}}}}\'`'
        )
    if not pod.colocated:
        return None
    return (
        f"pod {pod.name!r}{where} outlived its grace period and is not removed by force, because its engine "
        "may hold the trainer's devices: mend the node, or delete the Node object once it is off"
    )


def _seconds_until_forced(pod: Pod, now: float) -> float:
    """Seconds until a terminating pod is deleted by force: first, or once more.

    Only what this process has seen of the pod counts: by a clock that is ahead, a pod that has just
    begun to drain would be removed, and with it the requests that it runs.
    """
    if pod.forced_ago is not None:
        return FORCED_DELETION_SECONDS - pod.forced_ago
    if pod.grace is None:
        return FORCED_DELETION_SECONDS + (pod.deletion_at or now) - now
    return FORCED_DELETION_SECONDS + pod.grace - pod.seen_seconds
