"""What start, weights updates and sleep cost each engine, measured at a real worker process.

`ROLLOUT_ENGINES=hf,vllm` restricts the engines, as in the contract suite; each has its own table.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine_kinds import EngineKind, kinds, left_out

from .models import TINY, half_billion
from .observed import Observed, forget
from .results import Figure, Options, Result, figure

SUMMARY = "start, pause of an update by policy, update time, sleep and wake of every engine"
RUNNING = 8
LONG, SHORT, SPREAD = 900, 16, 4
"""Tokens of a request; `Drain` lets short ones end, each longer than the one before."""
FLAGS = (
    *("--dtype", "float32", "--max-length", "1024", "--max-batch-tokens", "12288"),
    *("--device", "cpu"),
)
AGAINST = "safetensors load_file and copy_, nothing verified"


@dataclass(frozen=True, slots=True)
class Files:
    """A model and another version of its weights."""

    label: str
    model: Path
    other: Path

    def of(self, version: int) -> Path:
        """Folder of a version: another one each time."""
        return self.other if version % 2 else self.model


def run(options: Options) -> Iterator[Result]:
    """Measure, engine by engine."""
    torch.set_num_threads(1)
    if options.quick:
        files = Files("tiny model", TINY.model(1), TINY.weights(2))
    else:
        files = Files("0.5B shape", half_billion(1, "float32"), half_billion(2, "float32"))
    for kind in kinds():
        if left_out(kind) is None:
            yield _measure(kind, files, options.count(3, 2))


def _measure(kind: EngineKind, files: Files, rounds: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        worker = Observed(kind, files.model, Path(folder) / "worker.log", FLAGS)
        try:
            measured = _Measured(worker, files, rounds)
            figures = [
                *_start(worker),
                *measured.updates(),
                *measured.pauses(),
                *measured.sleep(),
            ]
        finally:
            worker.finish()
    size = (files.model / "model.safetensors").stat().st_size / 2**20
    said = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in measured.said.items())
    notes = [
        f"{files.label}, float32, {size:,.0f} MiB, on the CPU with one thread, {rounds} round(s). A real "
        "worker process; start and wake find the files in the page cache.",
        f"Pause: longest time without a token of any of {RUNNING} streams, from the call of commit "
        "until all of them run again, against the usual time between two tokens of a stream; a step "
        "under way ends first, and whose request is aborted or has ended asks anew. The worker's "
        f"own measure of it, medians: {said}.",
        "Memory: proportional set size of all of the worker's processes.",
    ]
    title = f"Start, updates and sleep: {kind.name}"
    return Result("engines", title, figures, notes, part=kind.name)


def _start(worker: Observed) -> list[Figure]:
    steps = [
        Figure(f"… {name}", "s", seconds) for name, seconds in worker.start.items() if seconds > 0.1
    ]
    return [Figure("process until Ready", "s", sum(worker.start.values())), *steps]


class _Measured:
    """One worker under measurement; `said` is what its commits answered."""

    def __init__(self, worker: Observed, files: Files, rounds: int) -> None:
        self._worker = worker
        self._files = files
        self._rounds = rounds
        self._version = 0
        self.said: dict[str, float] = {}
        state = worker.data.get("/v1/info").json()["capabilities"]
        self._policies: list[str] = state["in_flight"]
        self._levels: list[int] = state["sleep_levels"]

    def updates(self) -> list[Figure]:
        """Times to stage and commit with nobody running, and of a plain copy."""
        path = self._files.model / "model.safetensors"
        targets = {name: torch.empty_like(t) for name, t in load_file(path).items()}
        figures = []
        for where in ("disk", "page cache"):
            took: dict[str, list[float]] = {"stage": [], "commit": [], "plain": []}
            for turn in range(self._rounds):
                file = self._files.of(self._version + 1) / "model.safetensors"
                # Who is second may find the file in a cache of the disk's: both are, in turns.
                for ours in (turn % 2 == 1, turn % 2 == 0):
                    _place(file, where)
                    if ours:
                        took["stage"].append(self._stage())
                    else:
                        took["plain"].append(_copy(file, targets))
                took["commit"].append(self._commit("Drain")[0])
            whole = [a + b for a, b in zip(took["stage"], took["commit"], strict=True)]
            plain = statistics.median(took["plain"])
            figures += [
                figure(f"update from {where}", whole, baseline=plain, against=AGAINST),
                figure("… stage: read, verify, beside the serving weights", took["stage"]),
                figure("… commit, nobody running", took["commit"]),
            ]
        return figures

    def _stage(self) -> float:
        self._version += 1
        return self._worker.stage_seconds(self._version, self._files.of(self._version))

    def _commit(self, policy: str) -> tuple[float, float]:
        """Seconds that it took, and its pause as the answer says."""
        seconds, answer = self._worker.timed(
            "weights/commit", epoch=1, version=self._version, in_flight=policy, deadline_seconds=120
        )
        return seconds, answer["pause_seconds"]

    def pauses(self) -> list[Figure]:
        """Longest time without a token at a commit, by policy."""
        return [self._pause(policy) for policy in self._policies]

    def _pause(self, policy: str) -> Figure:
        pauses, usual, said = [], [], []
        length, spread = (SHORT, SPREAD) if policy == "Drain" else (LONG, 0)
        for _ in range(self._rounds):
            self._stage()
            with self._worker.streaming(RUNNING, length, spread) as streams:
                began = time.monotonic()
                _, pause = self._commit(policy)
                streams.await_running(RUNNING, time.monotonic())
                pauses.append(streams.longest(began, time.monotonic()))
                usual.append(statistics.median(streams.usual(began)))
                said.append(pause)
        self.said[policy] = statistics.median(said)
        return figure(
            f"pause at a commit, {policy}",
            pauses,
            baseline=statistics.median(usual),
            against="between two tokens",
        )

    def sleep(self) -> list[Figure]:
        """Memory and times of each level, weights and KV cache together."""
        found = []
        for level in self._levels:
            took: dict[str, list[float]] = {"sleep": [], "wake": [], "awake": [], "asleep": []}
            for _ in range(self._rounds):
                took["awake"].append(self._worker.memory())
                took["sleep"].append(self._worker.timed("sleep", level=level)[0])
                took["asleep"].append(self._worker.memory())
                took["wake"].append(self._worker.timed("wake")[0])
                self._worker.sample()
            awake = statistics.median(took["awake"])
            name = f"level {level}"
            found += [
                figure(f"{name}: asleep", took["asleep"], "MiB", baseline=awake, against="awake"),
                figure(f"{name}: to fall asleep", took["sleep"]),
                figure(f"{name}: to wake", took["wake"]),
            ]
        return found


def _place(file: Path, where: str) -> None:
    """Have the file on the disk alone, or in the page cache."""
    if where == "disk":
        forget(file)
    else:
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass


def _copy(file: Path, targets: dict[str, torch.Tensor]) -> float:
    """Seconds to read a file with safetensors and copy it into tensors."""
    began = time.monotonic()
    for name, tensor in load_file(file).items():
        targets[name].copy_(tensor)
    return time.monotonic() - began
