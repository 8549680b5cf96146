"""The turn for a device from one process to another: our lock against a bare flock.

The clock runs from the moment at which the holder begins to give back, or is killed, until the other one, which
waits, has the turn. Both sides do the same in this run, turn by turn.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.figures import Goal, Options, Result, figure
from tests.support.unit.turn_process import Puppet, puppet

KINDS = ("ours", "bare")
DEVICE = "bench"
WAITING_SECONDS = 0.03
"""Until the process that was ordered to take the turn waits in the kernel; longer waits change nothing."""
GIVEN = Goal(median=0.005, tail=0.05)
KILLED = Goal(median=0.1, tail=0.1)


def run(options: Options) -> Result:
    turns, kills = options.count(300, 4), options.count(100, 2)
    with tempfile.TemporaryDirectory() as folder:
        given = _hand_over(Path(folder), turns)
        killed = _kill(Path(folder), kills)
    figures = [
        figure("hand-over", given["ours"], baseline=given["bare"], against="flock", goal=GIVEN),
        figure(
            "after kill -9", killed["ours"], baseline=killed["bare"], against="flock", goal=KILLED
        ),
    ]
    notes = [
        f"{turns} turns between two processes that wait for each other; {kills} holders killed.",
        f"Greatest hand-over: {max(given['ours']) * 1e3:.1f} ms, with a bare flock"
        f" {max(given['bare']) * 1e3:.1f} ms.",
        "An engine's own wake comes on top of it: see the tables of the engines.",
    ]
    return Result("turn", "The turn for a device", figures, notes)


def _hand_over(folder: Path, turns: int) -> dict[str, list[float]]:
    """Return how long each turn took, by kind."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        pairs = {kind: [_start(stack, folder) for _ in range(2)] for kind in KINDS}
        for kind, (holder, _) in pairs.items():
            holder.ask(_order(folder, kind, "take"))
        for _, (kind, pair) in itertools.product(range(turns), pairs.items()):
            holder, other = pair
            other.tell(_order(folder, kind, "take"))
            time.sleep(WAITING_SECONDS)
            holder.tell(_order(folder, kind, "give"))
            given = holder.answer_time()
            seconds[kind].append(other.answer_time() - given)
            pair.reverse()
    return seconds


def _kill(folder: Path, kills: int) -> dict[str, list[float]]:
    """Return how long each turn took whose holder was killed, by kind."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        holders = {kind: _start(stack, folder) for kind in KINDS}
        for kind, holder in holders.items():
            holder.ask(_order(folder, kind, "take"))
        for _, kind in itertools.product(range(kills), KINDS):
            other = _start(stack, folder)
            other.tell(_order(folder, kind, "take"))
            time.sleep(WAITING_SECONDS)
            killed = time.monotonic()
            holders[kind].kill()
            seconds[kind].append(other.answer_time() - killed)
            holders[kind] = other
    return seconds


def _start(stack: ExitStack, folder: Path) -> Puppet:
    return stack.enter_context(puppet(folder, "bench", DEVICE))


def _order(folder: Path, kind: str, verb: str) -> str:
    return verb if kind == "ours" else f"flock {folder / 'bare'} {verb}"
