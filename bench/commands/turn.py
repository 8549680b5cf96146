"""The turn for a device from one process to another: our lock against a bare flock.

The clock runs from the moment at which the holder begins to give back, or is killed, until the other one, which
waits, has the turn. Both sides do the same in this run, turn by turn.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.options import Options
from bench.reporting.figures import Goal, Result, figure
from bench.rigs.turn_process import TurnProcess

WAITING_SECONDS = 0.03
"""Until the process that was ordered to take the turn waits in the kernel; longer waits change nothing."""
GIVEN = Goal(median=0.005, tail=0.05)
KILLED = Goal(median=0.1, tail=0.1)


def run(options: Options) -> Result:
    turns, kills = options.count(300, 4), options.count(100, 2)
    given: dict[str, list[float]] = {"ours": [], "bare": []}
    killed: dict[str, list[float]] = {"ours": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        for kind in given:
            _hand_over(Path(folder), kind, turns, given[kind])
            _kill(Path(folder), kind, kills, killed[kind])
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


def _hand_over(folder: Path, kind: str, turns: int, seconds: list[float]) -> None:
    with ExitStack() as stack:
        pair = [TurnProcess(folder, kind) for _ in range(2)]
        for each in pair:
            stack.callback(each.close)
        holder, other = pair
        holder.send_order("take")
        holder.read_time()
        for _ in range(turns):
            other.send_order("take")
            time.sleep(WAITING_SECONDS)
            holder.send_order("give")
            given = holder.read_time()
            seconds.append(other.read_time() - given)
            holder, other = other, holder


def _kill(folder: Path, kind: str, kills: int, seconds: list[float]) -> None:
    with ExitStack() as stack:
        holder = _one(stack, folder, kind)
        holder.send_order("take")
        holder.read_time()
        for _ in range(kills):
            other = _one(stack, folder, kind)
            other.send_order("take")
            time.sleep(WAITING_SECONDS)
            killed = holder.kill()
            seconds.append(other.read_time() - killed)
            holder = other


def _one(stack: ExitStack, folder: Path, kind: str) -> TurnProcess:
    made = TurnProcess(folder, kind)
    stack.callback(made.close)
    return made
