"""A worker from the end of a trainer's turn to the first token of its new weights, and one process alone.

The worker sleeps at level 2 and waits for its turn; the clock runs from when the trainer gives its own back. Then it
wakes without the old weights, the new ones are staged and committed, the cache wakes, and one token is made. Against
it, as a trainer and an engine in one process do it: allocate, copy from tensors that are in memory, make one token.
The hf engine only: on CPUs the others free nothing asleep.
"""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bench.reporting.figures import Figure, figure
from rollout_common.turn import Turn
from tests.support.engine.engine_kinds import KINDS
from tests.support.engine.workers import PROMPT
from tests.support.waiting import until_sync

from .streams import CALL_SECONDS
from .worker import Observed

DEVICE = "bench/node/gpu-0"
STEPS = ("turn, and memory of the weights", "stage", "commit", "memory of the cache", "first token")
AGAINST = "one process: allocate, copy_ from memory, one token"


def measure_wake(model: Path, other: Path, rounds: int) -> list[Figure]:
    """Return the seconds from a trainer's turn to the first token, and of each step of it."""
    with tempfile.TemporaryDirectory() as folder:
        ours = _measure_worker(Path(folder), model, other, rounds)
    plain = _measure_plain(model, load_file(other / "model.safetensors"), rounds)
    return [
        figure("turn given back, to the first token", ours["all"], baseline=plain, against=AGAINST),
        *(figure(f"… {step}", ours[step]) for step in STEPS),
    ]


def describe_wake() -> str:
    return (
        "Turn given back: the worker slept at level 2 and waited for the turn. It reads the new weights from a file"
        " and verifies each byte; the one process has them in memory, as a trainer has."
    )


def _measure_worker(folder: Path, model: Path, other: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step, measured by a trainer next to a real worker."""
    took: dict[str, list[float]] = {step: [] for step in ("all", *STEPS)}
    locks = folder / "turn"
    locks.mkdir()
    turns = ("--turn-directory", str(locks), "--turn-devices", DEVICE)
    flags = ("--dtype", "float32", "--device", "cpu", *turns)
    turn = Turn(locks, [DEVICE], "trainer")
    worker = Observed(KINDS["hf"], model, folder / "worker.log", flags)
    try:
        for version in range(1, rounds + 1):
            source = other if version % 2 else model
            times = _measure_round(worker, turn, version, source)
            for step, (since, until) in zip(STEPS, pairwise(times), strict=True):
                took[step].append(until - since)
            took["all"].append(times[-1] - times[0])
    finally:
        worker.finish()
    return took


def _measure_round(worker: Observed, turn: Turn, version: int, source: Path) -> list[float]:
    """Return when the trainer gave its turn back, and when each step ended."""
    worker.timed("sleep", level=2)
    turn.take(60)
    waking = worker.in_background(lambda: worker.timed("wake", tags=["weights"], load=False))
    until_sync(lambda: worker.state()["turn"]["state"] == "Waiting", 60, what="it waits")
    times = [time.monotonic()]
    turn.give()
    for step in (
        lambda: waking.result(CALL_SECONDS),
        lambda: worker.stage_seconds(version, source),
        lambda: worker.timed("weights/commit", epoch=1, version=version),
        lambda: worker.timed("wake"),
        lambda: worker.sample(1),
    ):
        step()
        times.append(time.monotonic())
    return times


def _measure_plain(model: Path, new: dict[str, torch.Tensor], rounds: int) -> list[float]:
    """Return the seconds until one process that has the new weights in memory makes a token."""
    engine = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    parameters = dict(engine.named_parameters())
    prompt = torch.tensor([PROMPT])
    took = []
    for _ in range(rounds):
        for parameter in parameters.values():
            parameter.data = torch.empty(0)
        began = time.monotonic()
        for name, parameter in parameters.items():
            parameter.data = torch.empty_like(new[name])
            parameter.data.copy_(new[name])
        with torch.inference_mode():
            int(engine(prompt).logits[0, -1].argmax())
        took.append(time.monotonic() - began)
    return took
