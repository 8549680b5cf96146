"""Weights from a trainer's memory to a worker's, against plain copies, TCP, files and vLLM's own ways.

One hf worker of the 0.5B shape in bfloat16 on the same machine. Each way takes turns with what it is
compared with: a trainer publishes in the same way each time, and memory is used again from one version
to the next. Every one of ours hashes all bytes at both ends; plain copies and vLLM's hash
nothing. A table of its own has a worker over vLLM next to vLLM's own transfers to its own server, where
there is no GPU. `ROLLOUT_ENGINES=hf` or `vllm` leaves the other table out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file

from bench.figures import Figure, Goal, Options, Result, figure
from bench.rigs import vllm_weights
from bench.rigs.pushing import Trainer, copied, loaded, newest, over_loopback, trainer
from bench.rigs.worker import TINY, half_billion
from rollout_client import Published
from rollout_client.steering.pushing.routes import Transport
from tests.support.engine.engine_kinds import KINDS, left_out
from tests.support.engine.lora_adapters import adapter_tensors

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


def run(options: Options) -> Iterator[Result]:
    """Measure all ways; the quick run has a tiny model, whose figures only show that it works."""
    torch.set_num_threads(1)
    first, second = (
        TINY.model(n) if options.quick else half_billion(n, "bfloat16") for n in (1, 2)
    )
    loaded_file = load_file(second / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in loaded_file.items()}
    if left_out(KINDS["hf"]) is None:
        yield _with_hf(first, tensors, options.count(10, 2))
    if left_out(KINDS["vllm"]) is None and not torch.cuda.is_available():
        yield _with_vllm((first, second), tensors, options.count(5, 1))


def _with_hf(model: Path, tensors: Mapping[str, torch.Tensor], rounds: int) -> Result:
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


def _with_vllm(
    models: tuple[Path, Path], tensors: Mapping[str, torch.Tensor], rounds: int
) -> Result:
    took = vllm_weights.compare(models, tensors, rounds)
    notes = [
        f"{len(tensors)} tensors, {sum(t.nbytes for t in tensors.values()) / 1e9:.2f} GB in bfloat16, to two idle"
        " engines with the same flags on the same cores, in turn; both give the same answer afterwards."
        " From the trainer's call until the new weights serve. vLLM's ways check nothing.",
        "vLLM's: its trainer, routes, packing and loading at both ends, with its defaults, inside a pause as in its"
        " examples. Its transports need a GPU: here torch's gloo over loopback does what NCCL would, and `ipc` reads"
        " the trainer's tensors where they lie in shared memory. `reload_weights` is as it is.",
        "A tied output head is packed again for both sides: vLLM leaves it as it was, and then answers wrongly.",
    ]
    title = "Weights from a trainer's memory: vLLM"
    return Result("publish", title, vllm_weights.figures(took), notes, part="vllm")


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
