"""A pool as a tree: pool, replicas, pods, weights. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from rollout_common.kube.access import Obj

LABEL_REPLICA = "rollout.dev/replica"


def summarize_pool(pool: Obj, pods: Sequence[Obj], now: datetime) -> Obj:
    """Return what `status -o json` prints."""
    status, spec = pool.get("status") or {}, pool.get("spec") or {}
    weights = status.get("weights") or {}
    members = {each["name"]: each for each in status.get("members") or ()}
    # In mode Hybrid the members are the trainer's pods, which do not have the pool's labels.
    known = {pod["metadata"]["name"] for pod in pods}
    others = [_pod_of_member(each) for name, each in members.items() if name not in known]
    ordered = sorted([*pods, *others], key=lambda pod: (_replica_of(pod), pod["metadata"]["name"]))
    return {
        "name": pool["metadata"]["name"],
        "namespace": pool["metadata"]["namespace"],
        "phase": status.get("phase") or "Pending",
        "message": status.get("message") or "the operator has not looked at this pool yet",
        "observed": (status.get("observedGeneration") or 0)
        >= pool["metadata"].get("generation", 0),
        "desiredReplicas": status.get("desiredReplicas", spec.get("replicas", 1)),
        "readyReplicas": status.get("readyReplicas", 0),
        "committed": _identity_of(weights.get("committed")),
        "target": _identity_of((spec.get("weights") or {}).get("target")),
        "targetMoved": _find_target_move(pool, now),
        "update": _summarize_update(weights, now),
        "replicas": [
            {
                "replica": index,
                "pods": [
                    _summarize_pod(pod, members.get(pod["metadata"]["name"], {}), now)
                    for pod in group
                ],
            }
            for index, group in groupby(ordered, key=_replica_of)
        ],
    }


def render_summary(found: Mapping[str, Any]) -> str:
    """Return the summary of a pool as a tree for people."""
    weights = found["committed"] or "of the model"
    if found["target"] and found["target"] != found["committed"]:
        weights += f" → {found['target']}"
    lines = [
        f"pool {found['namespace']}/{found['name']}  {found['phase']}  "
        f"{found['readyReplicas']} of {found['desiredReplicas']} replicas serve  weights {weights}",
        f"  {found['message']}",
    ]
    if moved := found["targetMoved"]:
        ago = format_age(moved["seconds"])
        lines.append(f"  target {found['target']}: set {ago} ago by {moved['manager']}")
    if not found["observed"]:
        lines.append("  the operator has not looked at the latest spec yet")
    if update := found["update"]:
        attempts = f", attempt {update['attempts']}" if update["attempts"] > 1 else ""
        lines.append(
            f"  update {update['weights']}: {update['phase']} for {format_age(update['seconds'])}, "
            f"{update['stagedReplicas']} replicas have staged{attempts}: {update['message']}"
        )
    replicas = found["replicas"]
    for position, replica in enumerate(replicas):
        last = position == len(replicas) - 1
        title = f"replica {replica['replica']}" if replica["replica"] >= 0 else "other members"
        lines.append(f"{'└─' if last else '├─'} {title}")
        for number, pod in enumerate(replica["pods"]):
            branch = "└─" if number == len(replica["pods"]) - 1 else "├─"
            lines.append(f"{'   ' if last else '│  '}{branch} {_pod_line(pod)}")
    return "\n".join(lines)


def render_turns(pool: Obj) -> str:
    """Return who may hold the devices that replicas share with a trainer, one line each."""
    rows = turns_of(pool)
    if not rows:
        return "no replica shares devices with a trainer: only pools of mode Colocated take turns"
    return "\n".join(
        f"{row['name']}  {row['turn']}  on {row['node'] or 'no node'}  {row['message']}".rstrip()
        for row in rows
    )


def turns_of(pool: Obj) -> list[Obj]:
    """Return the members that share devices."""
    members = (pool.get("status") or {}).get("members") or ()
    return [
        {key: each.get(key, "") for key in ("name", "node", "turn", "state", "message")}
        for each in members
        if each.get("turn")
    ]


def conditions_of(obj: Obj) -> dict[str, Obj]:
    """Return the conditions of a pool, a pod or a node by type."""
    return {each["type"]: each for each in (obj.get("status") or {}).get("conditions") or ()}


def has_condition(obj: Obj, kind: str) -> bool:
    """Whether a condition is True."""
    return bool(conditions_of(obj).get(kind, {}).get("status") == "True")


def parse_time(text: str | None) -> datetime | None:
    """Return a time of the API server; None: there is none."""
    return datetime.fromisoformat(text) if text else None


def format_age(seconds: float) -> str:
    """Return a duration as kubectl does: 42s, 5m, 3h, 2d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def _find_target_move(pool: Obj, now: datetime) -> Obj | None:
    """Return which program set the target last, and the seconds since it last wrote the object.

    The API server keeps one time for all fields that a program (a field manager) owns, so the target may be older.
    """
    moves = []
    for entry in pool["metadata"].get("managedFields") or ():
        weights = ((entry.get("fieldsV1") or {}).get("f:spec") or {}).get("f:weights") or {}
        # The target is one value: the program that sets it owns all of it.
        if "f:target" in weights and (at := parse_time(entry.get("time"))):
            moves.append((at, str(entry.get("manager") or "somebody")))
    if not moves:
        return None
    at, manager = max(moves)
    return {"manager": manager, "seconds": (now - at).total_seconds()}


def _summarize_update(weights: Obj, now: datetime) -> Obj | None:
    last = weights.get("lastUpdate")
    if not last or last.get("phase") in ("Complete", "Superseded"):
        return None
    began = parse_time(last.get("commitStartedAt") or last.get("startedAt"))
    return {
        "weights": _identity_of(last),
        "phase": last.get("phase"),
        "seconds": (now - began).total_seconds() if began else 0.0,
        "attempts": last.get("attempts") or 0,
        "stagedReplicas": weights.get("stagedReplicas") or 0,
        "message": last.get("message") or "",
    }


def _summarize_pod(pod: Obj, member: Obj, now: datetime) -> Obj:
    status = pod.get("status") or {}
    began = parse_time(pod["metadata"].get("creationTimestamp"))
    gone = "deletionTimestamp" in pod["metadata"]
    return {
        "name": pod["metadata"]["name"],
        "phase": "Terminating" if gone else status.get("phase") or "Pending",
        "node": (pod.get("spec") or {}).get("nodeName"),
        "ready": has_condition(pod, "Ready"),
        "ageSeconds": (now - began).total_seconds() if began else 0.0,
        "state": member.get("state"),
        "weights": _identity_of(member) if "version" in member else None,
        "restarts": member.get("restarts", 0),
        "message": member.get("message") or "",
    }


def _pod_of_member(member: Obj) -> Obj:
    ready = [{"type": "Ready", "status": str(bool(member.get("ready")))}]
    return {
        "metadata": {"name": member["name"]},
        "spec": {"nodeName": member.get("node")},
        "status": {"phase": "Member", "conditions": ready},
    }


def _pod_line(pod: Obj) -> str:
    words = [pod["name"], pod["phase"], f"on {pod['node'] or 'no node'}"]
    words += [f"is {pod['state']}"] if pod["state"] else []
    words += [f"weights {pod['weights']}"] if pod["weights"] else []
    words += ["ready" if pod["ready"] else "not ready"]
    words += [format_age(pod["ageSeconds"])] if pod["ageSeconds"] else []
    words += [f"restarts {pod['restarts']}"] if pod["restarts"] else []
    words += [pod["message"]] if pod["message"] else []
    return "  ".join(words)


def _identity_of(value: Obj | None) -> str | None:
    return f"({value['epoch']}, {value['version']})" if value else None


def _replica_of(pod: Obj) -> int:
    text = str((pod["metadata"].get("labels") or {}).get(LABEL_REPLICA, ""))
    return int(text) if text.isdecimal() else -1
