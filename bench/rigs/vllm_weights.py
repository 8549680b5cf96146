"""Weights to our worker over vLLM, in turns with vLLM's own ways to its own server, and the figures of both.

Both run at once with the same model and flags, idle, and must give the same answer afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from bench import ROOT
from bench.figures import Figure, Goal, figure
from rollout_client import Published
from tests.support.engine.engine_kinds import KINDS, engine_args

from .pushing import Trainer, copied, trainer
from .servers import MAX_LENGTH, VLLM, VLLM_FLAGS, Live, Side, started

SHARE_OF_A_COPY = 0.5
"""Of the rate of a plain copy, while the engine stands still."""
DTYPE = "bfloat16"
FLAGS = (
    *("--device", "cpu", "--max-length", str(MAX_LENGTH)),
    *engine_args(*VLLM_FLAGS),
)
"""Of our worker, so that its engine gets what vLLM's server gets."""
WARM_UP = 3
SECONDS = 180.0
PROMPT = [5, 6, 7, 8]
SAMPLING = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
ENVIRON = {
    **VLLM.environ,
    "PYTHONPATH": str(ROOT),
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
"""With its routes for weights, and the pickled handles that its `ipc` sends over HTTP."""


@dataclass(slots=True)
class Way:
    """The rounds of one way: ours, and theirs, whole and stopped, in seconds."""

    ours: list[Published] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    stopped: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Took:
    """All rounds of all ways."""

    copy: list[float] = field(default_factory=list)
    shm: Way = field(default_factory=Way)
    tcp: Way = field(default_factory=Way)
    files: Way = field(default_factory=Way)


def compare(models: tuple[Path, Path], tensors: Mapping[str, torch.Tensor], rounds: int) -> Took:
    """Start both sides on the first model, and publish the second one's tensors `rounds` times each way."""
    took = Took()
    kind = replace(KINDS["vllm"], env=VLLM.environ)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with trainer(models[0], tensors, folder, kind, FLAGS) as ours:
            before = _ours(ours)
            with _server("ipc", models[0], folder) as live:
                with _pusher("ipc", live, models[1]) as push:
                    _rounds(lambda: ours.push("shm"), lambda: (push(),) * 2, took.shm, rounds)
                _check(ours, live, before)
                reload = _reloader(live, tensors, folder)
                _rounds(lambda: ours.save(folder / "ours"), reload, took.files, rounds)
                _check(ours, live, before)
            with _server("nccl", models[0], folder) as live:
                with _pusher("nccl", live, models[1]) as push:
                    _rounds(lambda: ours.push("tcp"), lambda: (push(),) * 2, took.tcp, rounds)
                _check(ours, live, before)
    copy = copied(tensors)
    took.copy = [copy() for _ in range(WARM_UP + rounds)][WARM_UP:]
    return took


def _rounds(
    ours: Callable[[], Published],
    theirs: Callable[[], tuple[float, float]],
    way: Way,
    rounds: int,
) -> None:
    """Let both publish; the second of a round goes first in the next."""
    for turn in range(-WARM_UP, rounds):
        if turn % 2:
            published, (whole, stopped) = ours(), theirs()
        else:
            (whole, stopped), published = theirs(), ours()
        if turn >= 0:
            way.ours.append(published)
            way.whole.append(whole)
            way.stopped.append(stopped)


def figures(took: Took) -> list[Figure]:
    stop = figure(
        "… the same stop",
        _stops(took.shm),
        baseline=took.copy,
        against="copy_ in one process",
        goal=Goal(median(took.copy) / SHARE_OF_A_COPY),
    )
    return [
        *_both("shared memory", took.shm, "vLLM's ipc, shared memory for CUDA's"),
        stop,
        *_both("TCP", took.tcp, "vLLM's nccl, gloo for NCCL"),
        *_both("files", took.files, "save_file and vLLM's reload_weights"),
    ]


def _both(name: str, way: Way, against: str) -> list[Figure]:
    whole = [each.seconds for each in way.ours]
    return [
        figure(f"{name}: until it serves", whole, baseline=way.whole, against=against),
        figure("… the engine's stop", _stops(way), baseline=way.stopped, against="its stop"),
    ]


def _stops(way: Way) -> list[float]:
    return [each.pause_seconds or 0.0 for each in way.ours]


def side(backend: str) -> Side:
    """Return vLLM's own server with one of its backends for weights."""

    def words(model: Path, dtype: str, port: int) -> list[str]:
        return [
            *VLLM.theirs.words(model, dtype, port),
            *("--weight-transfer-config", json.dumps({"backend": backend})),
            *("--worker-extension-cls", "bench.baselines.vllm_on_cpu.Extension"),
        ]

    return replace(VLLM.theirs, name=backend, words=words)


def _server(backend: str, model: Path, folder: Path) -> AbstractContextManager[Live]:
    return started(VLLM.engine, side(backend), ENVIRON, model, DTYPE, folder)


@contextmanager
def _pusher(backend: str, live: Live, model: Path) -> Iterator[Callable[[], float]]:
    """Run a trainer of vLLM's; yield a function that pushes once and returns the seconds."""
    file = model / "model.safetensors"
    words = [*("-m", "bench.baselines.vllm_transfer", backend, live.url), str(file)]
    with subprocess.Popen(
        [str(KINDS["vllm"].python), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRON},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        into, out = process.stdin, process.stdout

        def push() -> float:
            print(file=into, flush=True)
            took = out.readline()
            if not took:
                raise RuntimeError("vLLM's trainer ended: see what it printed")
            return float(took)

        try:
            yield push
            into.close()
            process.wait(SECONDS)
        finally:
            process.kill()


def _reloader(
    live: Live, tensors: Mapping[str, torch.Tensor], folder: Path
) -> Callable[[], tuple[float, float]]:
    """Return a function that writes files for vLLM to reload, and returns the seconds in total and of the pause."""
    versions = [folder / "theirs-0", folder / "theirs-1"]
    for version in versions:
        version.mkdir()

    def reload() -> tuple[float, float]:
        versions.reverse()
        began = time.monotonic()
        save_file(dict(tensors), versions[0] / "model.safetensors")
        saved = time.monotonic()
        _post(live, "/pause?mode=keep")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(versions[0])}}
        _post(live, "/collective_rpc", body)
        _post(live, "/resume")
        ended = time.monotonic()
        return ended - began, ended - saved

    return reload


def _check(ours: Trainer, live: Live, before: list[int]) -> None:
    """Let both answer the same, and not as before: a side that serves other weights has not done the same work.

    Raises:
        RuntimeError: they don't.
    """
    our, their = _ours(ours), _theirs(live)
    if our != their or our == before:
        raise RuntimeError(f"before {before}, now we answer {our} and vLLM's server {their}")


def _ours(ours: Trainer) -> list[int]:
    return ours.answer({"token_ids": PROMPT, "sampling": SAMPLING})


def _theirs(live: Live) -> list[int]:
    body = {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "logprobs": 0}}
    tokens: list[int] = _post(live, live.side.path, body)["choices"][0]["token_ids"]
    return tokens


def _post(live: Live, path: str, body: Mapping[str, object] | None = None) -> Any:
    answer = httpx.post(live.url + path, json=body, timeout=SECONDS, trust_env=False)
    answer.raise_for_status()
    return answer.json()
