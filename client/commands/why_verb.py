"""`why`: what is wrong with a pool, and what to do."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rollout_common.kube.access import Obj

from .cause_finding import FoundCause, find_causes, is_settled, recent_warnings
from .command_output import EXIT_FAILED, EXIT_OK, print_json, print_text, progress_report
from .pool_access import PoolAccess
from .pool_facts import FactReader, PoolFacts

LOG_LINES = 20


async def run_why(given: argparse.Namespace, pool: PoolAccess) -> int:
    """Print the causes; the exit status is 0 only if nothing is wrong and nothing is awaited."""
    progress_report(given.progress)(f"reading {pool.namespace}/{pool.name}, its pods and nodes")
    facts = await FactReader(
        pool, given.operator_namespace, LOG_LINES, token_file=given.token_file
    ).read_facts()
    causes = find_causes(facts)
    if given.output == "json":
        print_json(explain_facts(facts, causes))
    else:
        print_text(render_causes(facts, causes))
    return EXIT_FAILED if causes or not is_settled(facts.pool) else EXIT_OK


def explain_facts(facts: PoolFacts, causes: list[FoundCause]) -> Obj:
    """Return what `why -o json` prints."""
    status = facts.pool.get("status") or {}
    return {
        "phase": status.get("phase"),
        "message": status.get("message"),
        "causes": [asdict(each) for each in causes],
        "warnings": recent_warnings(facts),
        "states": dict(facts.states),
        "unread": facts.unread,
    }


def render_causes(facts: PoolFacts, causes: list[FoundCause]) -> str:
    """Return the causes for people."""
    status = facts.pool.get("status") or {}
    metadata = facts.pool["metadata"]
    phase, message = status.get("phase", "Pending"), status.get("message", "it has no status yet")
    lines = [f"{metadata['namespace']}/{metadata['name']} is {phase}: {message}"]
    if not causes:
        lines.append("nothing is known to be wrong")
    for each in causes:
        lines += ["", f"cause: {each.meaning} [{each.cause}]"]
        lines += [f"  seen: {line}" for line in each.evidence[:5]]
        lines += [f"  fix: {each.fix}"] if each.fix else []
    if not is_settled(facts.pool):
        lines += _trouble_details(facts)
    lines += [f"not read: {line}" for line in facts.unread[:10]]
    return "\n".join(lines)


def _trouble_details(facts: PoolFacts) -> list[str]:
    lines = []
    if warnings := recent_warnings(facts):
        lines += ["", "recent warnings:", *(f"  {line}" for line in warnings[-5:])]
    for name, log in facts.logs.items():
        if not _is_ready(facts, name):
            lines += ["", f"end of the log of {name}:"]
            lines += [f"  {line[:300]}" for line in log.splitlines()[-5:]]
    return lines


def _is_ready(facts: PoolFacts, name: str) -> bool:
    members = (facts.pool.get("status") or {}).get("members") or ()
    return any(each["name"] == name and each.get("ready") for each in members)
