"""The engine's own flags (`engine.args`): a few of ours, the rest goes to SGLang as it is."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rollout_worker.engine import EngineError
from rollout_worker.engines import EngineOptions, tested

from .model import Model

SLACK_TOKENS = 16
"""SGLang ends outputs a few tokens before its context is full: it gets a context so much longer."""

CPU_BATCH_TOKENS = 16384
"""Least KV cache on a CPU, where SGLang would take most of the machine's memory."""

ONE_PIECE = 1 << 20
"""How many requests' tokens SGLang passes on before it lets others work: those of a whole step."""

REFUSED = {
    "--model-path": "set by --model",
    "--model": "set by --model",
    "--device": "set by --device",
    "--dtype": "set by --dtype",
    "--context-length": "set by --max-length",
    "--sampling-backend": "the worker brings its own sampler",
    "--skip-tokenizer-init": "always set: the worker itself speaks token ids",
    "--custom-weight-loader": "the worker brings its own",
    "--weight-version": "set by commits",
    "--tokenizer-worker-num": "the worker talks to one",
    "--dp-size": "SGLang updates no weights of data-parallel replicas: use more replicas",
    "--data-parallel-size": "SGLang updates no weights of data-parallel replicas: use more replicas",
    "--pp-size": "the worker updates tensor-parallel ranks only: use --tp-size",
    "--pipeline-parallel-size": "the worker updates tensor-parallel ranks only: use --tp-size",
    "--nnodes": "one pod a replica",
    "--speculative-algorithm": "drafts would leave the logprobs of the sampler out",
    "--host": "the engine listens on no port",
    "--port": "the engine listens on no port",
    "--quantization": "a version has the checkpoint's layout: quantise the checkpoint",
    "--config": "a file could set what the worker sets: give its flags one by one",
}

BEYOND = {
    "ROLLOUT_PIPELINE": ("pipeline", "the worker updates tensor-parallel ranks only: use tensor"),
    "ROLLOUT_DATA": ("data", "SGLang updates no weights of data-parallel replicas: use replicas"),
    "ROLLOUT_NODES": ("nodes", "one pod a replica"),
}
"""What the operator may say of `spec.parallelism` beyond `tensor`, and why it must be 1."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the flags say.

    `python`: an interpreter that has SGLang. `step_deadline_seconds`: running requests without a
    new token for so long count as hung. `flags`: SGLang's own. `any_version`: start also a version
    that nobody tested.
    """

    python: str
    step_deadline_seconds: float
    flags: tuple[str, ...]
    any_version: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EngineError(f"engine.args of the sglang engine: {message}")


def parse(args: Sequence[str]) -> Settings:
    """Parse the flags.

    Raises:
        EngineError: a bad value, a flag of SGLang that is the worker's to set, or a shape of the
            pool that this engine can't have.
    """
    for variable, (field, why) in BEYOND.items():
        if int(os.environ.get(variable, "1")) > 1:
            raise EngineError(f"the sglang engine: parallelism.{field} must be 1: {why}")
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--step-deadline-seconds", type=float, default=120.0)
    parser.add_argument(tested.FLAG, action="store_true")
    known, flags = parser.parse_known_args(list(args))
    for flag in flags:
        name = flag.partition("=")[0]
        # SGLang takes abbreviations, and none of its flags begins one of these otherwise.
        meant = [each for each in REFUSED if name.startswith("--") and each.startswith(name)]
        if meant and len(name) > 2:
            raise EngineError(f"engine.args of the sglang engine: {name}: {REFUSED[meant[0]]}")
    return Settings(
        known.python, known.step_deadline_seconds, tuple(flags), known.allow_untested_version
    )


def on_cpu(options: EngineOptions) -> bool:
    """Return whether the child is to compute on the CPU."""
    if options.device != "auto":
        return options.device == "cpu"
    return not Path("/dev/nvidiactl").exists()


def child_flags(options: EngineOptions, settings: Settings, model: Model, cpu: bool) -> list[str]:
    """Return SGLang's flags; the user's come last and win."""
    tokens = options.max_batch_tokens
    if cpu and tokens is None:
        tokens = max(CPU_BATCH_TOKENS, model.max_length)
    flags = [
        "--model-path", str(options.model),
        "--dtype", model.dtype,
        "--device", "cpu" if cpu else "cuda",
        "--context-length", str(model.max_length + SLACK_TOKENS),
        "--custom-weight-loader", "rollout_worker.engines.sglang.loader.load",
        "--skip-tokenizer-init",
        "--incremental-streaming-output",
        "--batch-notify-size", str(ONE_PIECE),
        "--skip-server-warmup",
        "--sleep-on-idle",
        "--enable-metrics",
        "--enable-priority-scheduling",
        "--schedule-low-priority-values-first",
        "--disable-priority-preemption",
    ]  # fmt: skip
    if "ROLLOUT_TENSOR" in os.environ:
        flags += ["--tp-size", os.environ["ROLLOUT_TENSOR"]]
    if tokens is not None:
        flags += ["--max-total-tokens", str(tokens + 2 * SLACK_TOKENS)]
    if cpu:
        # With nothing to overlap it only delays tokens; without it Keep is exact.
        flags += ["--attention-backend", "torch_native", "--disable-overlap-schedule"]
    return [*flags, *settings.flags]


def environ(cpu: bool) -> dict[str, str]:
    """Return the variables that SGLang needs besides the worker's own."""
    wanted = {
        "HF_HUB_OFFLINE": "1",
        # We ask for SLACK_TOKENS more than the model's length, which no request reaches.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if cpu:
        wanted["SGLANG_USE_CPU_ENGINE"] = "1"
        wanted["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return wanted
