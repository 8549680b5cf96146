"""From the facts of a pool to causes and fixes. Pure.

The words come from `fixes.json`, which `make generate` takes from docs/runbook.md: the page and `why` say
the same. Here is only how a cause is recognized.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from rollout_common.kube.access import Obj

from .pool_facts import PoolFacts
from .pool_summary import conditions_of, format_age, has_condition, parse_time
from .settings import LEASE_SECONDS, SPEC_SECONDS, WARNING_SECONDS

TEXT_RULES = {
    "quota": r"exceeded quota",
    "webhook": r"admission webhook|failed calling webhook|ValidatingAdmissionPolicy",
    "image-pull": r"ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull|can't get its image",
    "out-of-memory": r"OOMKilled|out of memory",
    "model-path": r"holds no config\.json|/rollout/model\S* does not exist",
    "weights-missing": r"does not exist: check path and mounts",
    "worker-hangs": r"step has been running for|made no step for|no answer within|supervisor made no progress",
    "no-node": r"(?!.*(?:persistentvolumeclaim|SchedulingGated))(Unschedulable|\d+/\d+ nodes are available)",
}
"""What a message has to contain, by cause; the first that fits says what the message is about."""

ORDER = ("operator-down", "node-lost", *TEXT_RULES)


@dataclass(frozen=True, slots=True)
class FoundCause:
    """Why a pool does not do what it should, what to do, and where it shows, one line each.

    `cause` is its name in the runbook, or the condition and the reason.
    """

    cause: str
    meaning: str
    fix: str
    evidence: tuple[str, ...]


@cache
def runbook_words() -> Obj:
    """Return the meaning and the fix of all causes and reasons."""
    text = (files(__package__) / "fixes.json").read_text(encoding="utf-8")
    words: Obj = json.loads(text)
    return words


def find_causes(facts: PoolFacts) -> list[FoundCause]:
    """Return the causes, most general first; empty: nothing is known to be wrong."""
    evidence: dict[str, list[str]] = {}
    for cause, line in _gather_evidence(facts):
        lines = evidence.setdefault(cause, [])
        if line not in lines:
            lines.append(line)
    words = runbook_words()
    found = [
        FoundCause(cause, **words["causes"][cause], evidence=tuple(evidence[cause]))
        for cause in ORDER
        if cause in evidence
    ]
    explained = "\n".join(line for lines in evidence.values() for line in lines)
    return found + [
        FoundCause(key, **words["reasons"][key], evidence=(message,))
        for key, message in _trouble_conditions(facts.pool)
        if key in words["reasons"] and message not in explained
    ]


def recent_warnings(facts: PoolFacts) -> list[str]:
    """Return the warnings of the last minutes, oldest first."""
    dated = []
    for event in facts.events:
        at = parse_time(event.get("lastTimestamp") or event.get("eventTime"))
        at = at or parse_time(event["metadata"].get("creationTimestamp"))
        age = (facts.now - at).total_seconds() if at else 0.0
        if event.get("type") == "Warning" and age < WARNING_SECONDS:
            who = (event.get("involvedObject") or {}).get("name")
            text = f"{format_age(age)} ago, {who}: {event.get('reason')}: {event.get('message')}"
            dated.append((age, text))
    return [text for _, text in sorted(dated, reverse=True)]


def is_settled(pool: Obj) -> bool:
    """Whether the pool does what its latest spec asks for, and serves the target."""
    conditions = conditions_of(pool)
    wanted = {"Asleep": "Asleep", "Paused": ""}.get(str(pool["spec"].get("state")), "Ready")
    wanted = "Suspended" if pool["spec"].get("suspend") else wanted
    reached = not wanted or has_condition(pool, wanted)
    synced = conditions.get("WeightsSynced", {}).get("status") != "False" or wanted != "Ready"
    return reached and synced and not has_condition(pool, "Degraded")


def _gather_evidence(facts: PoolFacts) -> Iterator[tuple[str, str]]:
    yield from _operator_evidence(facts)
    yield from _node_evidence(facts)
    if is_settled(facts.pool):
        return
    now = list(_match_rules((*_status_messages(facts), *_worker_messages(facts))))
    # What went wrong before counts only if nothing is known of now, such as right after a restart.
    yield from now or _match_rules(_past_messages(facts))


def _match_rules(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        for cause, pattern in TEXT_RULES.items():
            if re.search(pattern, line, re.IGNORECASE):
                yield cause, line
                break


def _operator_evidence(facts: PoolFacts) -> Iterator[tuple[str, str]]:
    ages = []
    for lease in facts.leases:
        renewed = parse_time((lease.get("spec") or {}).get("renewTime"))
        ages.append((facts.now - renewed).total_seconds() if renewed else float("inf"))
    if ages and min(ages) > LEASE_SECONDS:
        name = facts.leases[0]["metadata"]["name"]
        age = min(ages)
        since = f"was renewed {format_age(age)} ago" if age < float("inf") else "has no holder"
        yield "operator-down", f"Lease {name} {since}"
    metadata = facts.pool["metadata"]
    seen = (facts.pool.get("status") or {}).get("observedGeneration") or 0
    writes = [
        at
        for each in metadata.get("managedFields") or ()
        if not each.get("subresource") and (at := parse_time(each.get("time")))
    ]
    age = (facts.now - max(writes)).total_seconds() if writes else 0.0
    if seen < metadata.get("generation", 0) and age > SPEC_SECONDS:
        yield (
            "operator-down",
            f"the spec was changed {format_age(age)} ago, the status is of an older one",
        )


def _node_evidence(facts: PoolFacts) -> Iterator[tuple[str, str]]:
    for name, node in facts.nodes.items():
        if not has_condition(node, "Ready"):
            pods = [p["metadata"]["name"] for p in facts.pods if p["spec"].get("nodeName") == name]
            said = (
                conditions_of(node).get("Ready", {}).get("message", "it reports no condition Ready")
            )
            yield "node-lost", f"node {name} of {', '.join(pods)} is not ready: {said}"
    for pod in facts.pods:
        for each in conditions_of(pod).values():
            if each.get("reason") == "DeletionByTaintManager" and each["status"] == "True":
                yield "node-lost", f"{pod['metadata']['name']}: {each.get('message')}"


def _status_messages(facts: PoolFacts) -> Iterator[str]:
    """Yield what the operator says."""
    status = facts.pool.get("status") or {}
    for kind, each in conditions_of(facts.pool).items():
        if (kind, each["status"]) in (("Degraded", "True"), ("Progressing", "True")):
            yield f"{kind}, {each['reason']}: {each.get('message', '')}"
    for each in status.get("members") or ():
        if each.get("message") and not each.get("ready"):
            yield f"{each['name']}: {each['message']}"
    last = (status.get("weights") or {}).get("lastUpdate") or {}
    if last.get("phase") in ("Staging", "Committing", "Failed"):
        yield f"update ({last['epoch']}, {last['version']}): {last.get('message', '')}"


def _past_messages(facts: PoolFacts) -> Iterator[str]:
    """Yield the newest of the pool's errors, if it is recent."""
    for each in ((facts.pool.get("status") or {}).get("lastErrors") or ())[:1]:
        at = parse_time(each.get("time"))
        if at and (facts.now - at).total_seconds() < WARNING_SECONDS:
            yield each["message"]


def _worker_messages(facts: PoolFacts) -> Iterator[str]:
    """Yield what the kubelet and the scheduler say of the pods, and what the workers say."""
    for pod in facts.pods:
        yield from _pod_messages(pod)
    for name, state in facts.states.items():
        for key in ("last_error", "detail"):
            if state.get(key):
                yield f"{name} says: {state[key]}"


def _pod_messages(pod: Obj) -> Iterator[str]:
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    # Some schedulers report that they could not bind a pod after another one has bound it.
    waits = status.get("phase") == "Pending" and not (pod.get("spec") or {}).get("nodeName")
    scheduled = conditions_of(pod).get("PodScheduled")
    if waits and scheduled and scheduled["status"] == "False":
        yield f"{name}: {scheduled.get('reason')}: {scheduled.get('message')}"
    containers = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    for container in containers:
        past = (container.get("lastState") or {}).items()
        for kind, state in [*(container.get("state") or {}).items(), *past]:
            if kind != "running" and state.get("reason"):
                said = f"{state['reason']}: {state.get('message', '')}".rstrip(": ")
                yield f"{name}: container {container['name']!r}: {said}"


def _trouble_conditions(pool: Obj) -> Iterator[tuple[str, str]]:
    """Yield the conditions that say what is wrong, or what the pool waits for."""
    conditions = conditions_of(pool)
    for kind, status in (("Degraded", "True"), ("Progressing", "True"), ("WeightsSynced", "False")):
        each = conditions.get(kind)
        if each and each["status"] == status:
            yield f"{kind}={status}/{each['reason']}", str(each.get("message") or each["reason"])
            return
    ready = conditions.get("Ready")
    if ready and ready["status"] == "False" and not is_settled(pool):
        yield f"Ready=False/{ready['reason']}", str(ready.get("message") or ready["reason"])
