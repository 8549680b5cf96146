"""`wait`, `publish`, `sleep`, `wake`, `pause` and `resume`."""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Callable

from rollout_client.errors import ClusterError
from rollout_client.hooks import Hook
from rollout_client.steering.cluster_steering import ClusterSteering
from rollout_client.steering.replica_status import ANNOTATION_EPOCH
from rollout_client.steering.steering_protocol import PoolState, PublishProgress
from rollout_client.steering.steering_verbs import SteeringVerbs
from rollout_common.kube.access import Obj

from .command_output import EXIT_FAILED, EXIT_OK, CommandFailed, print_text, progress_report
from .pool_access import PoolAccess
from .pool_summary import conditions_of, has_condition
from .settings import POLL_SECONDS

STATES: dict[str, PoolState] = {
    "sleep": "Asleep",
    "wake": "Active",
    "pause": "Paused",
    "resume": "Active",
}


Holds = Callable[[Obj], bool]
"""Whether a RolloutReplica has what is waited for."""

_CONDITIONS = {"ready": "Ready", "asleep": "Asleep", "suspended": "Suspended"}
_WEIGHTS = re.compile(r"weights=(?:(\d{1,18})/)?(\d{1,18})")


def parse_wait(text: str) -> Holds:
    """Return the condition that a word names.

    Raises:
        argparse.ArgumentTypeError: It names none.
    """
    if text in _CONDITIONS:
        return lambda pool: _is_current(pool, _CONDITIONS[text])
    found = _WEIGHTS.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"give ready, asleep, suspended, weights=VERSION or weights=EPOCH/VERSION, not {text!r}"
        )
    epoch, version = found[1], int(found[2])
    if epoch is None:
        return lambda pool: _committed(pool)[1] >= version
    return lambda pool: _committed(pool) >= (int(epoch), version)


def _is_current(pool: Obj, kind: str) -> bool:
    seen = conditions_of(pool).get(kind, {}).get("observedGeneration", 0)
    return has_condition(pool, kind) and seen >= pool["metadata"].get("generation", 0)


def _committed(pool: Obj) -> tuple[int, int]:
    weights = (pool.get("status") or {}).get("weights") or {}
    found = weights.get("committed") or {"epoch": -1, "version": -1}
    return int(found["epoch"]), int(found["version"])


async def run_wait(given: argparse.Namespace, pool: PoolAccess) -> int:
    """Wait until the pool has what `--for` names; 1: it does not have it in time."""
    report, message = progress_report(given.progress), "the API server did not answer"
    try:
        async with asyncio.timeout(given.timeout):
            while True:
                before = message
                try:
                    found = await pool.read_pool()
                    if given.wanted(found):
                        return EXIT_OK
                    message = str((found.get("status") or {}).get("message") or "no status yet")
                except ClusterError as error:
                    if not error.is_transient:
                        raise
                    message = str(error)
                if message != before:
                    report(message)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        why = f"{message}; ask rollout why {pool.name}"
        raise CommandFailed(f"not reached within {given.timeout:g} s: {why}") from None


async def run_publish(given: argparse.Namespace, pool: PoolAccess) -> int:
    """Move the target to a folder and wait until all replicas serve it."""
    found = await pool.read_pool(given.timeout)
    trainer = (found["metadata"].get("annotations") or {}).get(ANNOTATION_EPOCH, "0")
    if trainer != "0" and not given.take_over:
        raise CommandFailed(
            f"a trainer or an earlier rollout publish took epoch {trainer} of {pool.name}; publishing takes the next "
            "one, which shuts a trainer out: make sure that none runs, then give --take-over"
        )
    version = given.version or _next_version(found)
    path = given.path or str(version)
    report = progress_report(given.progress)

    def tell(progress: PublishProgress) -> None:
        report(f"{progress.phase}: {progress.message}")

    verbs = SteeringVerbs(ClusterSteering(pool.kube, pool.name, pool.namespace), Hook())
    done = await verbs.publish_weights(version, path, seconds=given.timeout, progress=tell)
    print_text(f"weights {done.identity} from {path} serve on {done.replicas} replicas")
    return EXIT_OK


async def run_state(given: argparse.Namespace, pool: PoolAccess) -> int:
    """Ask for a state of the pool and wait until every replica has reached it."""
    state = STATES[given.verb]
    progress_report(given.progress)(f"waiting until {pool.name} is {state}")
    steering = ClusterSteering(pool.kube, pool.name, pool.namespace)
    if given.no_wait:
        await steering.ask_state(state, given.timeout)
        print_text(f"{pool.name} is asked to be {state}")
        return EXIT_OK
    ready = await steering.change_state(state, given.timeout)
    print_text(f"{pool.name} is {state}" + (f": {ready} replicas serve" if ready else ""))
    return EXIT_OK if ready or state != "Active" else EXIT_FAILED


def _next_version(pool: Obj) -> int:
    spec, status = pool.get("spec") or {}, pool.get("status") or {}
    known = [
        (spec.get("weights") or {}).get("target"),
        (status.get("weights") or {}).get("committed"),
    ]
    return max((int(each["version"]) for each in known if each), default=0) + 1
