"""A thousand pushed updates while workers and trainers are killed: nothing is kept, and every answer is right."""

from __future__ import annotations

import logging
import random
import statistics
import tempfile
from pathlib import Path

import pytest

from tests.support.engine.push_rig import (
    Rig,
    Stream,
    Victim,
    accidents,
    push_rig,
    settled,
    wrong_answers,
)
from tests.support.engine.tinymodels import TinyModels

logger = logging.getLogger(__name__)

LATEST = 1.5
"""A kill comes within so many times the time of an update."""


def block(
    rig: Rig,
    dice: random.Random,
    updates: int,
    kills: int,
    spared: Victim,
    *,
    trainer: bool,
    at_once: int,
) -> None:
    """Let updates and kills happen; `spared` survives them all, and without `trainer` the trainer does.

    Meanwhile so many requests are answered `at_once`.
    """
    other: Victim = "b" if spared == "a" else "a"
    choices: list[Victim] = ["trainer", other] if trainer else [other]
    victims = [choices[number % len(choices)] for number in range(kills)]
    before = rig.calm()
    survivors = {rig.workers[spared].pid, *(() if trainer else (rig.trainer,))}
    took = statistics.median([*rig.figures.seconds["shm"], *rig.figures.seconds["tcp"]])
    hurt = accidents(dice, updates, victims)
    for number in range(updates):
        rig.update(hurt.get(number), dice.uniform(0, LATEST * took))
        if dice.random() < 0.5 or number + 1 == updates:
            rig.heal()
    rig.calm()
    kept = settled({pid: before[pid] for pid in survivors}, at_once)
    for pid, after in kept.items():
        logger.warning("kept by %d: %s; before: %s", pid, after, before[pid])


def tell(rig: Rig) -> None:
    found = rig.figures
    logger.warning(
        "%d updates, %d of them hurt, kills: %s; %d answers with %d spans of %d versions",
        found.updates, len(found.failed), found.kills, found.answers, found.spans, len(found.versions),
    )  # fmt: skip
    for what, samples in (*found.seconds.items(), ("all back after a kill", found.healed)):
        if samples:
            logger.warning(
                "%s: median %.3f s, most %.3f s of %d", what, statistics.median(samples), max(samples), len(samples)
            )  # fmt: skip
    for why in sorted(set(found.failed))[:12]:
        logger.warning("an update that a kill hurt: %s", why)


@pytest.mark.parametrize(
    ("updates", "kills", "requests"),
    [
        (4, 3, None),
        pytest.param(200, 20, None, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
        pytest.param(1000, 100, None, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
        pytest.param(100, 10, 10_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_nothing_is_kept_and_every_answer_is_right_whoever_is_killed(
    tiny_models: TinyModels, updates: int, kills: int, requests: int | None
) -> None:
    dice = random.Random(updates)
    versions = [Path(tiny_models.weights(seed)) for seed in (2, 3, 1)]
    at_once = 2 if requests is None else 16
    with (
        tempfile.TemporaryDirectory(prefix="push-") as folder,
        push_rig(Path(folder), tiny_models.model(1), versions) as rig,
    ):
        try:
            rig.heal()
            stream = Stream(rig, at_once, requests)
            try:
                half, odd = updates // 2, kills - 2 * (kills // 3)
                first, then = odd + kills // 3, kills // 3
                block(rig, dice, half, first, "a", trainer=True, at_once=at_once)
                block(rig, dice, updates - half, then, "b", trainer=False, at_once=at_once)
                while requests is not None and not stream.over:
                    assert rig.update()
            finally:
                stream.close()
            wrong = list(wrong_answers(rig, stream.answers))
        except AssertionError:
            for log in sorted(Path(folder).glob("*.out")):
                logger.warning("%s: %s", log.name, log.read_text()[-2000:])
            raise
        finally:
            for log in sorted(Path(folder).glob("[ab].out")):
                if "most recent call first" in log.read_text():
                    logger.warning("%s: %s", log.name, log.read_text()[-6000:])
            tell(rig)
    assert stream.broken == []
    assert wrong == []
    assert len(stream.answers) >= (requests or updates)
    assert len(rig.figures.versions) > updates / 4
    assert [name for name in rig.named if name.startswith("/dev/shm/")] == []
