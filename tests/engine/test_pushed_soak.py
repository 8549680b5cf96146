"""A thousand pushed updates while workers and trainers are killed: nothing is kept, and every answer is right."""

from __future__ import annotations

import logging
import random
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollout_client import GenerateResult, RolloutError, RolloutPool
from tests.support.engine.push_rig import Rig, Victim, push_rig, settled
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT

logger = logging.getLogger(__name__)

TOKENS = 12
LATEST = 1.5
"""A kill comes within so many times the time of an update."""


class Stream:
    """Requests without a break, through a pool that goes on with another worker if one is killed."""

    def __init__(self, rig: Rig, at_once: int, limit: int | None) -> None:
        self._limit, self._number = limit, 0
        self._pool = RolloutPool.from_urls([worker.url for worker in rig.workers.values()])
        self.answers: list[tuple[list[int], GenerateResult]] = []
        self.broken: list[str] = []
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(at_once)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        sampling = {"max_tokens": TOKENS, "ignore_eos": True}
        while not self._ended.is_set():
            with self._lock:
                self._number += 1
                number = self._number
            if self._limit is not None and number > self._limit:
                return
            prompt = [*PROMPT, 10 + number % 4000]
            try:
                answer = self._pool.generate(prompt, sampling=sampling, logprobs="raw")
            except RolloutError as error:
                self.broken.append(f"{type(error).__name__}: {error}")
                return
            self.answers.append((prompt, answer))

    @property
    def over(self) -> bool:
        """Whether all requests that were wanted have been answered."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(120)
        self._pool.close()


def kill_amid_updates(
    rig: Rig,
    dice: random.Random,
    updates: int,
    victims: Sequence[Victim],
    survivors: Sequence[Victim],
    at_once: int,
) -> None:
    """Let updates and kills happen; who survives them all keeps no more than before."""
    before = rig.calm()
    pids = {"trainer": rig.trainer, **{name: each.pid for name, each in rig.workers.items()}}
    hurt = dict(zip(sorted(dice.sample(range(updates), len(victims))), victims, strict=True))
    for number in range(updates):
        rig.update(hurt.get(number), dice.uniform(0, LATEST * rig.seconds))
        if dice.random() < 0.5 or number + 1 == updates:
            rig.heal()
    rig.calm()
    settled({pids[name]: before[pids[name]] for name in survivors}, at_once)


@pytest.mark.parametrize(
    ("updates", "kills", "requests"),
    [
        (4, 3, None),
        pytest.param(1000, 100, None, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
        pytest.param(100, 10, 10_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_nothing_is_kept_and_every_answer_is_right_whoever_is_killed(
    tiny_models: TinyModels, updates: int, kills: int, requests: int | None
) -> None:
    dice, at_once, half = random.Random(updates), 2 if requests is None else 16, updates // 2
    versions = [tiny_models.weights(seed) for seed in (2, 3, 1)]
    first: list[Victim] = ["trainer", "b"] * kills
    with (
        tempfile.TemporaryDirectory(prefix="push-") as folder,
        push_rig(Path(folder), tiny_models.model(1), versions) as rig,
    ):
        rig.heal()
        stream = Stream(rig, at_once, requests)
        try:
            kill_amid_updates(rig, dice, half, first[: kills - kills // 3], ["a"], at_once)
            rest: list[Victim] = ["a"] * (kills // 3)
            kill_amid_updates(rig, dice, updates - half, rest, ["b", "trainer"], at_once)
            while requests is not None and not stream.over:
                assert rig.update()
        finally:
            stream.close()
        logger.warning("%d answers; hurt updates: %s", len(stream.answers), rig.failed)
        wrong = [
            fault
            for prompt, answer in stream.answers
            for fault in rig.wrong_spans(prompt, answer.output)
        ]
    assert (stream.broken, wrong) == ([], [])
    assert len(stream.answers) >= (requests or updates)
    assert all(len(answer.token_ids) == TOKENS for _, answer in stream.answers)
    served = {span.version for _, answer in stream.answers for span in answer.output.weights}
    assert len(served) > updates / 4
    assert [name for name in rig.named if name.startswith("/dev/shm/")] == []
