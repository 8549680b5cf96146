"""What is wrong with a pod, or what it waits for, as its status says: in words for a person. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from rollout_operator.api import names
from rollout_operator.api.objects import Obj

MAX_CAUSE_LENGTH = 300
"""Maximum characters of a container's log in one of our sentences."""

MAX_LAST_LOG_LENGTH = 4096
"""Maximum characters of a container's log that are kept; the kubelet's own limit in a pod, in bytes."""

OOM_REASON = "OOMKilled"
IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
NO_IMAGE_TEXT = " can't get its image"
IMAGE_FIX = "check spec.engine.image and spec.podTemplate.imagePullSecrets"
CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError")


def parse_timestamp(text: str | None) -> float | None:
    """Seconds since the epoch of a Kubernetes time, None for none."""
    if not text:
        return None
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _cause_from_log(log: str) -> str:
    """Return why a container ended, as the end of its log says: one line, often none.

    Our workers log JSON: the last line of level error counts. Of anything else, such as a
    traceback, the last line does; the other lines are in the log.
    """
    plain, error = "", ""
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # the latter for a thousand brackets
            plain = line.strip() or plain
            continue
        if isinstance(entry, dict) and entry.get("level") in ("error", "critical"):
            error = str(entry.get("message", ""))
    # The kubelet cuts the log at its beginning, which leaves a piece of a line of ours.
    return (error or ("" if plain.endswith("}") else plain))[:MAX_CAUSE_LENGTH]


def memory_limits(obj: Obj) -> Mapping[str, str]:
    """Memory limits by container of a pod, init containers too; without those that have none."""
    spec = obj.get("spec") or {}
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    limits = {
        each["name"]: ((each.get("resources") or {}).get("limits") or {}).get("memory")
        for each in containers
    }
    return {name: str(limit) for name, limit in limits.items() if limit is not None}


def describe_trouble(
    status: Obj, conditions: Mapping[str, Any], limits: Mapping[str, str] | None = None
) -> str:
    """Return one sentence on what is wrong with the pod, empty if nothing is."""
    for container in container_statuses(status):
        state = container.get("state") or {}
        # An init container that did its work is not at fault, whatever became of the worker.
        is_workers = container in (status.get("containerStatuses") or ())
        if _has_container_failed(status, container, is_workers=is_workers):
            return _describe_container_end(container["name"], state["terminated"], limits or {})
        waiting = state.get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return _describe_container_wait(container["name"], waiting)
    if status.get("reason"):
        return f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason', 'not scheduled')}: {scheduled.get('message', '')}"
    return ""


def _has_container_failed(status: Obj, container: Obj, *, is_workers: bool) -> bool:
    ended = (container.get("state") or {}).get("terminated")
    failed = is_workers and status.get("phase") == "Failed"
    return bool(ended and (ended.get("exitCode") or failed))


def _describe_container_end(name: str, ended: Obj, limits: Mapping[str, str]) -> str:
    text = f"container {name!r} ended: {ended.get('reason', 'Error')}, exit code {ended.get('exitCode')}"
    why = _cause_from_log(ended.get("message") or "")
    text += f"{why and ': '}{why}"
    if ended.get("reason") != OOM_REASON:
        return text
    of = "spec.resources" if name == names.WORKER_CONTAINER else "its resources"
    if name in limits:
        return f"{text}; it needs more memory than its limit of {limits[name]}: raise {of}.limits.memory"
    return f"{text}; its node ran out of memory, and it has no limit: set {of}.requests.memory"


def _describe_container_wait(name: str, waiting: Obj) -> str:
    reason, message = waiting["reason"], waiting.get("message", "")
    if reason in IMAGE_REASONS:
        return f"container {name!r}{NO_IMAGE_TEXT}: {reason} {message}".rstrip() + f"; {IMAGE_FIX}"
    if reason in CONFIG_REASONS:
        return (
            f"container {name!r}: {reason} {message}".rstrip()
            + "; create what it names, or change "
            "spec.engine.env and spec.podTemplate"
        )
    return f"container {name!r}: {reason} {message}".rstrip()


def failed_container_log(status: Obj) -> str:
    """Return the end of the log of the first container that failed, as the kubelet keeps it."""
    for container in container_statuses(status):
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            return str(ended.get("message") or "")[-MAX_LAST_LOG_LENGTH:]
    return ""


def unscheduled_since(conditions: Mapping[str, Any]) -> float | None:
    """Return since when the pod is held back, or finds no node; None: it does, or the scheduler has not tried."""
    if not is_unschedulable(conditions):
        return None
    return parse_timestamp(conditions["PodScheduled"].get("lastTransitionTime"))


def is_unschedulable(conditions: Mapping[str, Any]) -> bool:
    """Return whether the scheduler finds no node for the pod, or gates hold it back."""
    return _unscheduled_reason(conditions) in ("Unschedulable", "SchedulingGated")


def is_gated(conditions: Mapping[str, Any]) -> bool:
    """Return whether scheduling gates hold the pod back, as Kueue's do while it waits in a queue."""
    return _unscheduled_reason(conditions) == "SchedulingGated"


def _unscheduled_reason(conditions: Mapping[str, Any]) -> str | None:
    found = conditions.get("PodScheduled", {})
    return found.get("reason") if found.get("status") == "False" else None


def is_booting(status: Obj) -> bool:
    """Whether the kubelet says that the worker has not passed its startup probe; silence is no."""
    return any(
        container["name"] == names.WORKER_CONTAINER and container.get("started") is False
        for container in status.get("containerStatuses") or ()
    )


def describe_startup_wait(obj: Obj, conditions: Mapping[str, Any]) -> str:
    """What a scheduled pod does before its worker starts."""
    sidecars = {
        container["name"]
        for container in (obj.get("spec") or {}).get("initContainers") or ()
        if container.get("restartPolicy") == "Always"
    }
    for container in (obj.get("status") or {}).get("initContainerStatuses") or ():
        # Once a sidecar has started, nothing waits for it.
        waits = not (container["name"] in sidecars and container.get("started"))
        if waits and "running" in (container.get("state") or {}):
            return (
                f"waits for its init container {container['name']!r}: `kubectl logs` with -c "
                f"{container['name']} shows what it does"
            )
    if conditions.get("PodReadyToStartContainers", {}).get("status") == "False":
        return (
            "waits for its volumes and its network: `kubectl describe pod` names what can't be mounted "
            "(FailedMount, FailedAttachVolume)"
        )
    return ""


def container_statuses(status: Obj) -> Iterable[Obj]:
    """Yield the containers, the worker's first: the end of the others often follows from its own."""
    yield from status.get("containerStatuses") or ()
    yield from status.get("initContainerStatuses") or ()
