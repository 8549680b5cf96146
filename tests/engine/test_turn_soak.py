"""A worker and a trainer take turns on one device for a long time, and are killed and stopped at random.

Real processes and real locks: the worker with both ports, an engine's process that joined its turn, the trainer's
client. Only the device is made up: a file, whose flock is its memory.
"""

from __future__ import annotations

import logging
import os
import random
import statistics
from pathlib import Path

import pytest

from tiny_engine import write_weights
from turn_node import Node, turn_node

logger = logging.getLogger(__name__)

MEDIAN_SECONDS, TAIL_SECONDS, KILLED_SECONDS = 0.005, 0.05, 0.1
LOOKS_PER_SECOND = 900 if os.geteuid() == 0 else 300
"""Root's judge goes before other processes."""
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
    for what, samples in (("hand-over", figures.given), ("after kill -9", figures.killed)):
        if samples:
            logger.warning(
                "%s: median %.1f ms, 99th percentile %.1f ms, most %.1f ms of %d", what,
                statistics.median(samples) * 1e3, quantile(samples, 0.99) * 1e3, max(samples) * 1e3, len(samples),
            )  # fmt: skip


def take_turns(node: Node, turns: int, dice: random.Random) -> None:
    """Let accidents happen until so many turns have been had."""
    node.await_turns(3)
    while node.figures().turns < turns:
        node.happen(dice)
        node.await_turns(dice.randint(1, 20))


@pytest.mark.parametrize(
    "turns", [100, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_turns_go_on_without_overlap_whatever_is_killed_or_stopped(
    tmp_path: Path, turns: int
) -> None:
    with turn_node(tmp_path, write_weights(tmp_path / "model", 1)) as node:
        try:
            take_turns(node, turns, random.Random(turns))
        finally:
            tell(node)
        figures, report = node.figures(), node.report()
    assert figures.overlaps == 0
    assert report.overlap == {"node-1/gpu-0": 0.0}
    assert statistics.median(figures.given) <= MEDIAN_SECONDS
    assert report.looks / report.seconds >= LOOKS_PER_SECOND
    if len(figures.given) > ENOUGH * 10:
        assert quantile(figures.given, 0.9) <= TAIL_SECONDS
    if len(figures.killed) >= ENOUGH:
        assert statistics.median(figures.killed) <= KILLED_SECONDS
