"""What a pool's facts say, for people. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

from .pool_facts import PoolFacts, event_time
from .settings import UNSEEN_SECONDS

TROUBLE = (
    ("Degraded", "True"),
    ("Progressing", "False"),
    ("Progressing", "True"),
    ("WeightsSynced", "False"),
    ("Ready", "False"),
)
"""Conditions that may explain a pool, those that explain most first."""
_SILENT = frozenset({"Complete", "NotServing", "Synced"})
"""Reasons that say nothing which another condition doesn't."""
WARNINGS = 5


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that a pool waits for or suffers from.

    Attributes:
        reason: Of the condition, such as `Degraded/CrashLooping`.
        says: The operator's sentence.
        means: What the reason means in general.
        fix: What to do.
        seconds: How long it has been so; None: unknown.
    """

    reason: str
    says: str
    means: str = ""
    fix: str = ""
    seconds: float | None = None


@cache
def known_fixes() -> dict[str, dict[str, dict[str, str]]]:
    """Return what the runbook says of each reason, by condition and status."""
    text = resources.files(__package__).joinpath("reason_fixes.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, dict[str, str]]] = json.loads(text)
    return found


def explain_pool(facts: PoolFacts) -> list[Cause]:
    """Return what keeps a pool from serving what it should, the most telling first; empty: nothing."""
    unseen = _unseen_cause(facts)
    if unseen is not None:
        return [unseen]
    found, said = list[Cause](), set[str]()
    for kind, status in TROUBLE:
        condition = facts.find_condition(kind)
        reason, message = condition.get("reason", ""), condition.get("message", "")
        if condition.get("status") != status or reason in _SILENT or message in said:
            continue
        known = known_fixes().get(f"{kind}={status}", {}).get(reason, {})
        since = facts.age_of(condition.get("lastTransitionTime"))
        said.add(message)
        found.append(
            Cause(f"{kind}/{reason}", message, known.get("means", ""), known.get("fix", ""), since)
        )
    return found


def _unseen_cause(facts: PoolFacts) -> Cause | None:
    """Return that no operator has looked at the pool, or at its latest change."""
    meta = facts.pool["metadata"]
    behind = facts.status.get("observedGeneration") != meta.get("generation")
    age = facts.age_of(meta.get("creationTimestamp")) or 0.0
    if not behind or (not facts.status and age < UNSEEN_SECONDS):
        return None
    what = "has looked at this pool" if not facts.status else "has seen its latest change"
    fix = (
        "check that the operator runs and leads: `kubectl get deploy,lease -A | grep rollout-operator`, then its log; that it watches"
        " this namespace (watchNamespaces), and that spec.operatorClass is its class (docs/runbook.md#the-operator-is-down)"
    )
    return Cause("Unseen", f"no operator {what}", fix=fix)


def describe_status(facts: PoolFacts) -> Iterator[str]:
    """Yield the lines of a pool: itself, its update, its replicas and their pods."""
    status, spec = facts.status, facts.pool["spec"]
    ready, wanted = status.get("readyReplicas", 0), status.get("desiredReplicas", 0)
    kind = f"{spec.get('mode', 'Standalone')}, {spec['engine']['type']}"
    yield f"{facts.name} ({kind}): {status.get('phase', 'Unseen')}, {ready} of {wanted} replicas serve"
    if status.get("message"):
        yield f"  {status['message']}"
    yield f"  weights: {_describe_weights(facts)}"
    heads = {member["name"]: member for member in status.get("members") or ()}
    by_replica: dict[str, list[str]] = {}
    for name in sorted(facts.pods, key=_pod_order):
        by_replica.setdefault(name.rpartition("-")[0], []).append(name)
    for replica, names in by_replica.items():
        yield f"  {replica}"
        for name in names:
            yield f"    {_describe_pod(facts.pods[name], heads.get(name))}"


def _pod_order(name: str) -> tuple[int, ...]:
    numbers = name.rsplit("-", 2)[1:]
    return tuple(int(each) if each.isdecimal() else 0 for each in numbers)


def _describe_weights(facts: PoolFacts) -> str:
    weights = facts.status.get("weights") or {}
    committed = weights.get("committed") or {}
    text = f"({committed.get('epoch', 0)}, {committed.get('version', 0)}) committed"
    update = weights.get("lastUpdate") or {}
    if update.get("phase") in ("Staging", "Committing", "Failed"):
        text += f"; ({update['epoch']}, {update['version']}) {update['phase']}"
        if (age := facts.age_of(update.get("startedAt"))) is not None:
            text += f" for {describe_seconds(age)}"
        if staged := weights.get("stagedReplicas"):
            text += f", {staged} staged"
    return text


def _describe_pod(pod: dict[str, Any], member: dict[str, Any] | None) -> str:
    name, node = pod["metadata"]["name"], pod["spec"].get("nodeName", "no node")
    phase = "Terminating" if "deletionTimestamp" in pod["metadata"] else pod["status"].get("phase")
    text = f"{name}  {phase}  {node}"
    if member is None:
        return text
    serves = "serves" if member.get("ready") else "does not serve"
    version = f"({member.get('epoch', '?')}, {member.get('version', '?')})"
    text += f"  {member['state']}  {serves} {version}"
    if member.get("restarts"):
        text += f"  {member['restarts']} restarts"
    return f"{text}  {member['message']}" if member.get("message") else text


def describe_causes(facts: PoolFacts) -> Iterator[str]:
    """Yield what `why` prints: causes with their fixes, the last errors, warnings."""
    causes = explain_pool(facts)
    if not causes:
        yield f"{facts.name}: nothing is wrong: {facts.status.get('message', '')}"
        return  # what was wrong earlier misleads now
    for number, cause in enumerate(causes, 1):
        since = f", for {describe_seconds(cause.seconds)}" if cause.seconds is not None else ""
        yield f"{number}. {cause.reason}{since}: {cause.says}"
        if cause.means:
            yield f"   means:  {cause.means}"
        if cause.fix:
            yield f"   do:     {cause.fix}"
    for error in facts.status.get("lastErrors") or ():
        yield f"error of {error['time']}: {error['message']}"
        for line in (error.get("log") or "").splitlines():
            yield f"   | {line}"
    warnings = [event for event in facts.events if event.get("type") == "Warning"]
    for event in warnings[-WARNINGS:]:
        about = (event.get("regarding") or {}).get("name", "")
        yield f"warning of {event_time(event)}, {about}: {event.get('reason')}: {event.get('note', '')}"


def describe_seconds(seconds: float) -> str:
    """Return a duration as kubectl writes it."""
    whole = int(max(seconds, 0))
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m"
    return f"{whole // 3600}h" if whole < 172_800 else f"{whole // 86_400}d"


def facts_document(facts: PoolFacts) -> dict[str, Any]:
    """Return what `-o json` prints."""
    return {
        "name": facts.name,
        "namespace": facts.pool["metadata"]["namespace"],
        "status": facts.status,
        "causes": [asdict(cause) for cause in explain_pool(facts)],
        "pods": {name: pod["status"].get("phase") for name, pod in sorted(facts.pods.items())},
    }
