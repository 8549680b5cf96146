"""The arrows of a push as a sound trainer plays them, and what must hold once something went wrong at one."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from rollout_common.transfer.connections import blocking_connection as connection
from rollout_common.transfer.connections import frame_stream
from rollout_worker.ports import weights_port as port
from rollout_worker.schemas import Lifecycle, Transfer
from rollout_worker.sources.pushed import incoming_version as incoming
from rollout_worker.sources.pushed import peer_route as outward
from rollout_worker.sources.pushed import pushed_source as pushed
from rollout_worker.sources.pushed import trainer_connection as receiving
from rollout_worker.sources.pushed import version_fetching
from tests.support.unit.pushing import Trainer, Version, held, publish, quiet
from tests.support.unit.tiny_worker import TinyWorker, made_by
from tests.support.waiting import until

STEPS = {
    "shared memory": ("HELLO", "LAYOUT", "MEMORY", "FILLED", "END"),
    "TCP": ("HELLO", "LAYOUT", "HAVE", "PIECE", "END"),
    "TCP with a base": ("HELLO", "LAYOUT", "HAVE", "DELTA", "END"),
}
KINDS = {"shared memory": "unix", "TCP": "tcp", "TCP with a base": "tcp"}
DELTA = ("TCP with a base",)
ROOM = ("--staging-memory", "600")
"""For one version at a time: one whose charge is left behind has no other beside it."""
SECONDS = 5.0
"""How soon the weights that serve answer after a fault, on a machine that is busy with other tests."""
NEXT = 9
"""The version, and what its weights are, that comes once all is over."""
_ASKED = itertools.count()


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a worker wait for nobody for long."""
    monkeypatch.setattr(incoming, "LEASE_SECONDS", 1.5)
    monkeypatch.setattr(incoming, "RESUME_SECONDS", 0.2)
    monkeypatch.setattr(port, "LEASE_SECONDS", 1.5)
    monkeypatch.setattr(port, "GREETING_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(outward, "HOP_SECONDS", 0.5)
    monkeypatch.setattr(version_fetching, "PEER_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(receiving, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(pushed, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(connection, "PING_SECONDS", 0.1)
    monkeypatch.setattr(frame_stream, "PING_SECONDS", 0.1)


def do(end: Trainer, transfer: Transfer, step: str) -> None:
    """What a sound trainer does at an arrow."""
    match step:
        case "HELLO":
            end.greet(transfer)
        case "LAYOUT":
            end.tell()
            end.ready()
        case "MEMORY":
            end.memory()
        case "FILLED":
            end.filled()
        case "HAVE":
            end.announce()
        case "PIECE" | "DELTA":
            end.give(end.asked())
        case "END":
            end.end()


async def serves(worker: TinyWorker, number: int, since: float | None = None) -> None:
    """See that these weights alone answer whoever asks, within `SECONDS` of that time, or of now."""
    since = time.monotonic() if since is None else since
    output = await worker.ends(await worker.begin(f"asked-{next(_ASKED)}", tokens=3))
    took = time.monotonic() - since
    assert output.token_ids == [number] * 3
    assert len(made_by(output)) == 1
    assert took < SECONDS, f"the answer came after {took:.2f} s"


async def not_ready_or_serves(worker: TinyWorker, number: int) -> None:
    """See that a worker whose engine died serves nothing, and then these weights."""
    not_ready = worker.worker.readiness_problem
    await until(lambda: not_ready() or len(worker.engines) > 1, SECONDS, what="it to be NotReady")
    await until(lambda: len(worker.engines) > 1, what="another engine")
    await worker.reaches(Lifecycle.ACTIVE)
    await serves(worker, number)


async def left(worker: TinyWorker) -> tuple[int, int]:
    """Return how many descriptors and mappings of pushed weights there are, with no task at them."""
    await quiet()
    await worker.updates.wait_until_freed()
    worker.updates.pushes.spare.drop_memory()
    return len(held()), _mapped()


async def goes_on(worker: TinyWorker, before: tuple[int, int]) -> None:
    """See that the next version comes and serves, and that nothing is left of what was before."""
    await publish(worker, NEXT, Version(NEXT))
    await serves(worker, NEXT)
    await left(worker)
    # A socket that either end has just closed may still be there for a moment.
    await until(
        lambda: len(held()) <= before[0] and _mapped() <= before[1],
        what=f"the end of what was not there before: {before}",
    )


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:rollout-push")
