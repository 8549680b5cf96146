"""Weights from a trainer's memory to a worker's, against plain copies, plain TCP, and loads of files.

One hf worker of the 0.5B shape in bfloat16 on the same machine. Each way takes turns with what it is
compared with: a trainer publishes in the same way each time, and memory is used again from one version
to the next. Every one of ours hashes all bytes at both ends; plain copies hash nothing.
"""

from __future__ import annotations

import itertools
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file

from bench.figures import Figure, Goal, Options, Result, figure
from bench.rigs.worker import TINY, Observed, half_billion
from rollout_client import DirectOptions, Published, RolloutPool
from rollout_client.steering.pushing.routes import Transport
from tests.support.engine.engine_kinds import KINDS
from tests.support.engine.lora_adapters import adapter_tensors, config_of

SHARE_OF_A_COPY = 0.6
"""Of the rate of a plain copy, which hashes nothing."""
SHARE_OF_TCP = 0.8
STOP_SECONDS = 0.001
"""The engine's stop at a commit that flips views, beyond the step under way: there is none here."""
SHARE_OF_LOADING = 0.5
"""Of the rate at which files are loaded and copied, which hashes nothing and takes no memory."""
RANK = 8
"""Of the adapter. On this shape 16 is 1.8 % of the bytes; on 7 billion parameters 0.5 %."""
WARM_UP = 3
"""Versions until both slots of memory are used again, and all that is made once is there."""
CHUNK = 1 << 20
"""Bytes of a plain send or receive."""


@dataclass(slots=True)
class Took:
    """The rounds of each way, in seconds."""

    copy: list[float] = field(default_factory=list)
    loopback: list[float] = field(default_factory=list)
    loading: list[float] = field(default_factory=list)
    files_staged: list[float] = field(default_factory=list)
    files: list[float] = field(default_factory=list)
    adapters: list[Published] = field(default_factory=list)
    pushed: dict[str, list[Published]] = field(default_factory=lambda: {"shm": [], "tcp": []})

    def staged(self, transport: str) -> list[float]:
        """Return the seconds from the call until the worker has verified every byte."""
        phases = ("plan", "copy", "transfer", "stage")
        return [sum(_report(p)[phase] for phase in phases) for p in self.pushed[transport]]

    def whole(self, transport: str) -> list[float]:
        """Return the seconds from the call until the version serves."""
        return [each.seconds for each in self.pushed[transport]]

    def stopped(self) -> list[float]:
        """Return how long the engine stopped at each commit of shared memory."""
        return [each.pause_seconds or 0.0 for each in self.pushed["shm"]]


def run(options: Options) -> Result:
    """Measure all ways; the quick run has a tiny model, whose figures only show that it works."""
    torch.set_num_threads(1)
    model, other = (TINY.model(n) if options.quick else half_billion(n, "bfloat16") for n in (1, 2))
    loaded_file = load_file(other / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in loaded_file.items()}
    rounds = options.count(10, 2)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    took = Took()
    with tempfile.TemporaryDirectory() as name, trainer(model, tensors, Path(name)) as one:
        _push(one, "shm", took, rounds, took.copy, copied(tensors))
        _push(one, "tcp", took, rounds, took.loopback, lambda: over_loopback(nbytes))
        load, versions = loaded(tensors), Path(name) / "versions"
        for _ in range(rounds):
            took.files.append(one.save(versions).seconds)
            took.loading.append(load(newest(versions)))
            took.files_staged.append(one.stage(newest(versions)))
        adapter = {
            name: tensor.bfloat16() for name, tensor in adapter_tensors(model, 1, RANK).items()
        }
        one.drop_weights()
        for _ in range(1 + rounds):  # the first one warms up
            took.adapters.append(one.push_adapter(adapter, RANK))
    share = sum(tensor.nbytes for tensor in adapter.values()) / nbytes
    notes = [
        f"{len(tensors)} tensors, {nbytes / 1e9:.2f} GB; {rounds} rounds of each way, in turn with what it is against.",
        f"Adapter: LoRA of rank {RANK} on all linear layers, {share:.2%} of the model's bytes.",
        f"Plain copies: {nbytes / 1e9 / median(took.copy):.1f} GB/s in this process, "
        f"{nbytes / 1e9 / median(took.loopback):.1f} GB/s over loopback, the receiver's copy with it.",
    ]
    return Result("publish", "Weights from a trainer's memory", _figures(took), notes)


def _push(
    one: Trainer,
    transport: Transport,
    took: Took,
    rounds: int,
    against: list[float],
    plain: Callable[[], float],
) -> None:
    for _ in range(WARM_UP):
        one.push(transport)
    for _ in range(rounds):
        against.append(plain())
        took.pushed[transport].append(one.push(transport))


def _figures(took: Took) -> list[Figure]:
    copy, loopback, shared = took.copy, took.loopback, took.whole("shm")
    return [
        *_way(took, "shm", "shared memory", copy, "copy_ in one process", SHARE_OF_A_COPY),
        figure("… the engine's stop", took.stopped(), goal=Goal(STOP_SECONDS)),
        *_way(took, "tcp", "TCP", loopback, "plain loopback", SHARE_OF_TCP),
        figure(
            "files: until staged and verified, from the page cache", took.files_staged,
            baseline=took.loading, against="load and copy",
            goal=Goal(median(took.loading) / SHARE_OF_LOADING),
        ),
        figure("… until it serves", took.files, baseline=shared, against="shared memory"),
        figure(
            "adapter, shared memory: until it serves", [each.seconds for each in took.adapters[1:]],
            baseline=shared, against="all weights",
        ),
    ]  # fmt: skip


def _way(
    took: Took, way: str, name: str, baseline: list[float], against: str, share: float
) -> list[Figure]:
    """Return the figures of one transport: until staged, against its own limit, and until it serves."""
    goal = Goal(median(baseline) / share)
    staged, whole = took.staged(way), took.whole(way)
    label = f"{name}: until staged and verified"
    return [
        figure(label, staged, baseline=baseline, against=against, goal=goal),
        figure("… until it serves", whole, baseline=baseline, against=against),
    ]


def _report(published: Published) -> Mapping[str, float]:
    assert published.report is not None, "it was pushed"
    return published.report.seconds


class Trainer:
    """Publishes the same tensors again and again, each time as a version of its own."""

    def __init__(
        self, pool: RolloutPool, worker: Observed, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self._pool, self._worker = pool, worker
        self._tensors = tensors
        self._versions = itertools.count(1)

    def push(self, transport: Transport) -> Published:
        """Publish from memory without a base: with one, unchanged tensors would send nothing."""
        return self._pool.publish_weights(
            next(self._versions), tensors=self._tensors, transport=transport, base=None
        )

    def drop_weights(self) -> Published:
        """Publish the model's own weights, to which alone adapters belong."""
        return self._pool.publish_weights(next(self._versions), path=None)

    def push_adapter(self, tensors: Mapping[str, torch.Tensor], rank: int) -> Published:
        adapter = (config_of(rank), tensors)
        return self._pool.publish_weights(next(self._versions), adapters={"policy": adapter})

    def save(self, folder: Path) -> Published:
        return self._pool.save_and_publish(self._tensors, next(self._versions), folder)

    def stage(self, folder: Path) -> float:
        return self._worker.stage_seconds(next(self._versions), folder)


@contextmanager
def trainer(model: Path, tensors: Mapping[str, torch.Tensor], folder: Path) -> Iterator[Trainer]:
    """Start a worker on a model and a pool of it; both exchange files in `folder`."""
    flags = ["--weights-port", "0", "--weights-socket", str(folder / "weights.sock")]
    flags += ["--dtype", "bfloat16", "--weights-roots", str(folder)]
    with ExitStack() as stack:
        worker = Observed(KINDS["hf"], model, folder / "worker.log", flags)
        stack.callback(worker.finish)
        data, control = (str(each.base_url).rstrip("/") for each in (worker.data, worker.control))
        pool = RolloutPool.from_urls([data], control_urls=[control], direct=DirectOptions())
        stack.enter_context(pool)
        yield Trainer(pool, worker, tensors)


def copied(tensors: Mapping[str, torch.Tensor]) -> Callable[[], float]:
    """Return a function that copies all tensors into others of this process and returns the seconds."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def copy() -> float:
        began = time.monotonic()
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
        return time.monotonic() - began

    return copy


def loaded(tensors: Mapping[str, torch.Tensor]) -> Callable[[Path], float]:
    """Return a function that loads a folder's files, copies them into tensors, and returns the seconds."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def load(folder: Path) -> float:
        began = time.monotonic()
        for file in folder.glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                targets[name].copy_(tensor)
        return time.monotonic() - began

    return load


def newest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda each: each.stat().st_mtime)


def over_loopback(nbytes: int) -> float:
    """Return the seconds that this many bytes take from one thread to another by plain TCP."""
    source, target = memoryview(bytearray(nbytes)), bytearray(nbytes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname()[1], source))
        sender.start()
        connection, _ = server.accept()
        with connection, memoryview(target) as view:
            began, done = time.monotonic(), 0
            while done < nbytes:
                count = connection.recv_into(view[done : done + CHUNK])
                if not count:
                    raise ConnectionError(f"{done} of {nbytes} bytes came")
                done += count
            took = time.monotonic() - began
        sender.join(60)
    return took


def _send(port: int, source: memoryview) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for begin in range(0, len(source), CHUNK):
            connection.sendall(source[begin : begin + CHUNK])
