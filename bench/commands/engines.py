"""Start, weights updates and sleep, against plain copies of the weights.

Measured at a real worker process. `ROLLOUT_ENGINES=hf,vllm` restricts the engines, as in the
contract suite; each has a table of its own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file

from bench.figures import Figure, Options, Result, figure
from bench.rigs.pushing import loaded
from bench.rigs.worker import TINY, Observed, half_billion, streaming
from tests.support.engine.engine_kinds import EngineKind, kinds, left_out

RUNNING = 8
LONG, SHORT, SPREAD = 900, 16, 4
"""Tokens of a request; `Drain` lets short ones end, each longer than the one before."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLAGS = (
    *("--dtype", "float32", "--max-length", "1024", "--max-batch-tokens", "12288"),
    *("--device", DEVICE),
)
AGAINST = "safetensors load_file and copy_, nothing verified"
COPIED_BYTES = 256 << 20
"""What one plain copy moves: far more than a cache holds."""
COPY = "plain copy from locked memory to the GPU" if DEVICE == "cuda" else "plain copy in memory"


@dataclass(frozen=True, slots=True)
class Files:
    """A model, and another version of its weights."""

    label: str
    model: Path
    other: Path

    def of(self, version: int) -> Path:
        """Return the folder of a version: the two alternate."""
        return self.other if version % 2 else self.model


def run(options: Options) -> Iterator[Result]:
    torch.set_num_threads(1)
    if options.quick:
        files = Files("tiny model", TINY.model(1), TINY.weights(2))
    else:
        files = Files("0.5B shape", half_billion(1, "float32"), half_billion(2, "float32"))
    for kind in kinds():
        if left_out(kind) is None:
            yield _measure(kind, files, options.count(5, 2))


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
    title = f"Start, updates and sleep: {kind.name}"
    notes = _notes(files, measured.said)
    return Result("engines", title, figures, notes, part=kind.name)


def _notes(files: Files, said: dict[str, float]) -> list[str]:
    size = (files.model / "model.safetensors").stat().st_size / 2**20
    reported = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in said.items())
    return [
        f"{files.label}, float32, {size:,.0f} MiB, on {_where()}. A real worker process, started"
        " once; start and wake find the files in the page cache.",
        "Weights over the pause: bytes of a version over the worker's own measure of the pause, nothing"
        " running. The hf engine only points to other memory and moves none.",
        f"Pause: the longest time without a token of any of {RUNNING} streams, from the call of"
        " commit until all of them run again, against the usual time between two tokens of a"
        " stream. A step under way ends first; a request that was aborted or has ended is sent"
        f" again. The worker's own measure of the pause, medians: {reported}.",
        "Memory: proportional set size of all the worker's processes.",
    ]


def _where() -> str:
    return "a GPU" if DEVICE == "cuda" else "the CPU with one thread"


def _start(worker: Observed) -> list[Figure]:
    steps = [figure(f"… {name}", took) for name, took in worker.start.items() if took > 0.1]
    return [figure("process until Ready", sum(worker.start.values())), *steps]


class _Measured:
    """One worker under measurement; `said`: the pauses that its commits answered."""

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
        """Stage and commit with nothing running, in turns with a plain copy of the same file."""
        path = self._files.model / "model.safetensors"
        load = loaded(load_file(path))
        took: dict[str, list[float]] = {"stage": [], "commit": [], "plain": []}
        rates: dict[str, list[float]] = {"pause": [], "copy": []}
        size = path.stat().st_size / 2**20
        for turn in range(self._rounds):
            folder = self._files.of(self._version + 1)
            (folder / "model.safetensors").read_bytes()  # into the page cache
            for ours in (turn % 2 == 1, turn % 2 == 0):
                if ours:
                    took["stage"].append(self._stage())
                else:
                    took["plain"].append(load(folder))
            seconds, pause = self._commit("Drain")
            took["commit"].append(seconds)
            rates["pause"].append(size / pause)
            rates["copy"].append(_plain_rate())
        whole = [a + b for a, b in zip(took["stage"], took["commit"], strict=True)]
        return [
            figure("update from the page cache", whole, baseline=took["plain"], against=AGAINST),
            figure("… stage: read and verify while the old weights serve", took["stage"]),
            figure("… commit, nothing running", took["commit"]),
            figure(
                "… weights over its pause",
                rates["pause"],
                "MiB/s",
                baseline=rates["copy"],
                against=COPY,
            ),
        ]

    def _stage(self) -> float:
        self._version += 1
        return self._worker.stage_seconds(self._version, self._files.of(self._version))

    def _commit(self, policy: str) -> tuple[float, float]:
        """Return the seconds of a commit, and the pause that its answer reports."""
        seconds, answer = self._worker.timed(
            "weights/commit", epoch=1, version=self._version, in_flight=policy, deadline_seconds=120
        )
        return seconds, answer["pause_seconds"]

    def pauses(self) -> list[Figure]:
        """Measure the longest time without a token at a commit, by policy."""
        return [self._pause(policy) for policy in self._policies]

    def _pause(self, policy: str) -> Figure:
        pauses, usual, said = [], [], []
        length, spread = (SHORT, SPREAD) if policy == "Drain" else (LONG, 0)
        for _ in range(self._rounds):
            self._stage()
            with streaming(self._worker, RUNNING, length, spread) as streams:
                began = time.monotonic()
                _, pause = self._commit(policy)
                streams.await_running(RUNNING, time.monotonic())
                pauses.append(streams.longest(began, time.monotonic()))
                usual.append(median(streams.usual(began)))
                said.append(pause)
        self.said[policy] = median(said)
        label = f"pause at a commit, {policy}"
        return figure(label, pauses, baseline=usual, against="between two tokens")

    def sleep(self) -> list[Figure]:
        """Measure memory and times of each level, weights and KV cache together."""
        return [each for level in self._levels for each in self._sleep(level)]

    def _sleep(self, level: int) -> list[Figure]:
        took: dict[str, list[float]] = {"sleep": [], "wake": [], "awake": [], "asleep": []}
        for _ in range(self._rounds):
            took["awake"].append(self._worker.memory())
            took["sleep"].append(self._worker.timed("sleep", level=level)[0])
            took["asleep"].append(self._worker.memory())
            took["wake"].append(self._worker.timed("wake")[0])
            self._worker.sample()
        name = f"level {level}"
        memory = figure(
            f"{name}: asleep", took["asleep"], "MiB", baseline=took["awake"], against="awake"
        )
        asleep = figure(f"{name}: to fall asleep", took["sleep"])
        return [memory, asleep, figure(f"{name}: to wake", took["wake"])]


def _plain_rate() -> float:
    """Return the MiB a second at which one copy moves bytes to where an engine's weights are."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    target = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=DEVICE)
    began = time.monotonic()
    target.copy_(source)
    target[-1].item()  # a GPU's copy has ended by now
    return COPIED_BYTES / 2**20 / (time.monotonic() - began)
