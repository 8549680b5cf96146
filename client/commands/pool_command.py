"""The verbs of `rollout` about a pool in a cluster, which are those of `kubectl rollout-pool`.

Exit status: 0: done, or the condition holds; 1: it doesn't, or something failed, which the last line says; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence

from rollout_client.cluster_client import ClusterClient, load_access
from rollout_client.errors import ClusterError

from .pool_facts import POOLS, CommandFailed, PoolFacts, list_pools, read_facts
from .pool_report import describe_causes, describe_status, explain_pool, facts_document
from .settings import LOOK_SECONDS, WAIT_SECONDS

STATES = {"sleep": "Asleep", "pause": "Paused", "wake": "Active", "resume": "Active"}
"""By verb: `spec.state`."""
CONDITIONS = {"Asleep": "Asleep", "Paused": "Paused", "Active": "Ready"}
"""By state: what to wait for; Paused is a phase."""


def add_pool_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs about a pool to a command."""
    where = _where_parser()
    reading = argparse.ArgumentParser(add_help=False)
    reading.add_argument("-o", "--output", choices=("text", "json"), default="text", help="format")
    status = verbs.add_parser(
        "status", parents=[where, reading], help="show pools, replicas, pods and weights"
    )
    status.add_argument("pool", nargs="?", help="default: all pools of the namespace")
    status.add_argument("--watch", action="store_true", help="show each change, until Ctrl-C")
    why = verbs.add_parser(
        "why", parents=[where, reading], help="say what keeps a pool from serving, and what to do"
    )
    why.add_argument("pool")
    wait = verbs.add_parser("wait", parents=[where], help="wait until a pool is as you say")
    wait.add_argument("pool")
    wait.add_argument(
        "--for",
        dest="wanted",
        type=_parse_wish,
        default="Ready",
        metavar="WHAT",
        help="a condition (Ready, WeightsSynced, Asleep, Suspended), a phase (phase=Paused) or committed weights"
        " (weights=EPOCH,VERSION or later); default: Ready",
    )
    _add_timeout(wait)
    for verb, state in STATES.items():
        change = verbs.add_parser(
            verb, parents=[where], help=f"set spec.state to {state}, and wait until it is so"
        )
        change.add_argument("pool")
        _add_timeout(change)


def _where_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(add_help=False)
    group = made.add_argument_group("the cluster, as kubectl has it")
    group.add_argument("-n", "--namespace", help="default: that of the context")
    group.add_argument("--context", help="of the kubeconfig; default: its current one")
    group.add_argument(
        "--kubeconfig", help="default: $KUBECONFIG, ~/.kube/config, or the pod's account"
    )
    return made


def _add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=float,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help=f"how long to wait; default: {WAIT_SECONDS:g}",
    )


def _parse_wish(text: str) -> str:
    if not re.fullmatch(r"Ready|WeightsSynced|Asleep|Suspended|phase=\w+|weights=\d+,\d+", text):
        raise argparse.ArgumentTypeError(
            "must be Ready, WeightsSynced, Asleep, Suspended, phase=PHASE or weights=EPOCH,VERSION"
        )
    return text


def run_pool_verb(given: argparse.Namespace) -> int:
    """Run one of the verbs; return the exit status."""
    try:
        return asyncio.run(_run_verb(given))
    except (CommandFailed, ClusterError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 0 if getattr(given, "watch", False) else 130


async def _run_verb(given: argparse.Namespace) -> int:
    access = load_access(given.kubeconfig, given.context)
    namespace = given.namespace or access.namespace
    async with ClusterClient(access) as client:
        if given.verb == "status":
            return await _show_status(client, namespace, given)
        if given.verb == "why":
            return await _show_causes(client, namespace, given)
        if given.verb == "wait":
            return await _wait_for(client, namespace, given.pool, given.wanted, given.timeout)
        state = STATES[given.verb]
        await _change_state(client, namespace, given.pool, state)
        wanted = "phase=Paused" if state == "Paused" else CONDITIONS[state]
        return await _wait_for(client, namespace, given.pool, wanted, given.timeout)


async def _show_status(client: ClusterClient, namespace: str, given: argparse.Namespace) -> int:
    shown = ""
    while True:
        names = [given.pool] if given.pool else []
        if not names:
            names = [pool["metadata"]["name"] for pool in await list_pools(client, namespace)]
        if not names and not given.watch:
            raise CommandFailed(f"namespace {namespace!r} has no pools: name another one with -n")
        facts = [await read_facts(client, namespace, name) for name in names]
        if given.output == "json":
            documents = [facts_document(each) for each in facts]
            text = json.dumps(documents[0] if given.pool else documents, indent=1)
        else:
            text = "\n".join(line for each in facts for line in describe_status(each))
        # The ages of updates change all the time.
        if re.sub(r" for \d+\w", "", text) != re.sub(r" for \d+\w", "", shown):
            _print_lines(text)
        if not given.watch:
            return 0
        shown = text
        await asyncio.sleep(LOOK_SECONDS)


def _print_lines(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


async def _show_causes(client: ClusterClient, namespace: str, given: argparse.Namespace) -> int:
    facts = await read_facts(client, namespace, given.pool)
    if given.output == "json":
        _print_lines(json.dumps(facts_document(facts), indent=1))
    else:
        _print_lines(*describe_causes(facts))
    return 1 if explain_pool(facts) else 0


async def _change_state(client: ClusterClient, namespace: str, name: str, state: str) -> None:
    await read_facts(client, namespace, name)  # says what is wrong in better words
    await client.merge_patch(f"{POOLS.format(namespace)}/{name}", {"spec": {"state": state}})


async def _wait_for(
    client: ClusterClient, namespace: str, name: str, wanted: str, seconds: float
) -> int:
    """Wait; on a terminal each new sentence of the pool's status is shown."""
    until, said = time.monotonic() + seconds, ""
    while True:
        facts = await read_facts(client, namespace, name)
        message = str(facts.status.get("message", ""))
        if is_as_wanted(facts, wanted):
            _print_lines(f"{name}: {message}")
            return 0
        if message != said and sys.stderr.isatty():
            sys.stderr.write(f"{message}\n")
        said = message
        if time.monotonic() > until:
            raise CommandFailed(
                f"{name} is not {wanted} after {seconds:g} s: {message or 'no status'}; ask `rollout why {name}`"
            )
        await asyncio.sleep(LOOK_SECONDS)


def is_as_wanted(facts: PoolFacts, wanted: str) -> bool:
    """Return whether a pool is as `--for` says, by a status of its latest generation."""
    if facts.status.get("observedGeneration") != facts.pool["metadata"].get("generation"):
        return False
    kind, _, value = wanted.partition("=")
    if kind == "phase":
        return bool(facts.status.get("phase") == value)
    if kind == "weights":
        committed = (facts.status.get("weights") or {}).get("committed") or {}
        there = (committed.get("epoch", 0), committed.get("version", 0))
        epoch, version = map(int, value.split(","))
        return there >= (epoch, version)
    return bool(facts.find_condition(wanted).get("status") == "True")


def kubectl_main(arguments: Sequence[str] | None = None) -> int:
    """Run as kubectl's plugin `kubectl rollout-pool`."""
    parser = argparse.ArgumentParser(
        prog="kubectl rollout-pool",
        description="Pools of rollout workers.",
        epilog=__doc__.partition("\n\n")[2],
    )
    add_pool_verbs(parser.add_subparsers(dest="verb", required=True, metavar="VERB"))
    return run_pool_verb(parser.parse_args(arguments))
