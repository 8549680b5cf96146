"""A worker and a trainer take turns on one device for a long time, and are killed and stopped at random.

Real processes and real locks: the worker with both ports, an engine's process that joined its turn, the trainer's
client. Only the device is made up: a file, whose flock is its memory.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
from pathlib import Path

import pytest

from tests.support.engine.turn_node import Node, turn_node
from tests.support.unit.tiny_engine import write_weights

logger = logging.getLogger(__name__)

MEDIAN_SECONDS, TAIL_SECONDS, KILLED_SECONDS = 0.005, 0.05, 0.1
HOPS = 10
"""So many times other work may hold up a hand-over, by as much as it holds up a sleep."""
LOOKS_PER_SECOND = 300
"""On a machine that does as much other work as it can; else it is a thousand."""
ENOUGH = 10
"""So many kills of a holder say something about the time that they take on a busy machine."""


def quantile(samples: list[float], share: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * share))]


def tell(node: Node) -> None:
    """Print the figures."""
    figures = node.figures()
    logger.warning(
        "%d turns, %d overlaps, %d kills; judge: %s", figures.turns, figures.overlaps, len(node.kills),
        "; ".join(node.report().lines()),
    )  # fmt: skip
    logger.warning("this machine is late by %.1f ms, median", statistics.median(node.late) * 1e3)
    logger.warning(
        "the trainer went ahead of the waiting worker: median %d times, most %d",
        statistics.median(figures.passed_over), max(figures.passed_over),
    )  # fmt: skip
    for what, samples in (("hand-over", figures.given), ("after kill -9", figures.killed)):
        if samples:
            logger.warning(
                "%s: median %.1f ms, 99th percentile %.1f ms, most %.1f ms of %d", what,
                statistics.median(samples) * 1e3, quantile(samples, 0.99) * 1e3, max(samples) * 1e3, len(samples),
            )  # fmt: skip


def take_turns(node: Node, turns: int, seconds: float, dice: random.Random) -> None:
    """Let accidents happen until so many turns have been had, or the time is up."""
    node.await_turns(3)
    until = time.monotonic() + seconds
    while node.figures().turns < turns and time.monotonic() < until:
        node.happen(dice)
        node.await_turns(dice.randint(1, 20))


@pytest.mark.parametrize(
    ("turns", "seconds"),
    [
        (100, 15),
        pytest.param(1000, 3000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_turns_go_on_without_overlap_whatever_is_killed_or_stopped(
    tmp_path: Path, turns: int, seconds: float
) -> None:
    with turn_node(tmp_path, write_weights(tmp_path / "model", 1)) as node:
        try:
            take_turns(node, turns, seconds, random.Random(turns))
        except AssertionError:
            logger.warning("%s", node.last_words())
            raise
        finally:
            tell(node)
        figures, report = node.figures(), node.report()
    assert figures.turns > 10
    assert figures.overlaps == 0
    assert report.overlap == {"node-1/gpu-0": 0.0}
    assert report.looks / report.seconds >= LOOKS_PER_SECOND
    busy = HOPS * statistics.median(node.late)
    assert statistics.median(figures.given) <= MEDIAN_SECONDS + busy
    if len(figures.given) >= 10 * ENOUGH:
        assert quantile(figures.given, 0.9) <= TAIL_SECONDS + busy
    if len(figures.killed) >= ENOUGH:
        assert statistics.median(figures.killed) <= KILLED_SECONDS + busy
