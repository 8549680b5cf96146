"""The engine's own flags (`engine.args`): a few of ours, the rest goes to SGLang as it is."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rollout_worker.engine import EngineError, Gang
from rollout_worker.engines import EngineOptions, selfcheck, tested
from rollout_worker.engines.mapped import SLOTS_VARIABLE
from rollout_worker.engines.network import interface_of, own_address
from rollout_worker.turn.sharing import SOCKET

from .model import Model
from .refused import REFUSED

FOLDER_VARIABLE = "ROLLOUT_SGLANG_SPILL"
"""Tells the ranks of a node where their weights are to go at sleep level 1."""

GRAPHS_VARIABLE = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
"""Lets SGLang give back the memory of CUDA graphs, too."""

SLACK_TOKENS = 16
"""SGLang ends outputs a few tokens before its context is full: it gets a context so much longer."""

CPU_BATCH_TOKENS = 16384
"""Least KV cache on a CPU, where SGLang would take most of the machine's memory."""

ONE_PIECE = 1 << 20
"""How many requests' tokens SGLang passes on before it lets others work: those of a whole step."""

WORLD = {
    "ROLLOUT_TENSOR": ("--tp-size", "--tensor-parallel-size"),
}
"""What the operator says of `spec.parallelism`, and SGLang's flags for it."""
ONE = {
    "ROLLOUT_DATA": "parallelism.data: SGLang updates no weights of data-parallel ranks: set it to 1 "
    "and raise replicas",
    "ROLLOUT_PIPELINE": "parallelism.pipeline: SGLang's pipelines can't be paused for an update: set it "
    "to 1 and raise tensor",
}
"""What of `spec.parallelism` must be 1."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the flags say.

    `python`: an interpreter that has SGLang. `step_deadline_seconds`: running requests without a
    new token for so long count as hung. `flags`: SGLang's own. `any_version`: start also a version
    that nobody tested. `self_update_check`: load the checkpoint as an update before serving.
    """

    python: str
    step_deadline_seconds: float
    flags: tuple[str, ...]
    any_version: bool = False
    self_update_check: bool = True


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EngineError(f"engine.args of the sglang engine: {message}")


def parse(args: Sequence[str]) -> Settings:
    """Parse the flags.

    Raises:
        EngineError: a bad value, or a flag of SGLang that is the worker's to set.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--step-deadline-seconds", type=float, default=120.0)
    parser.add_argument(tested.FLAG, action="store_true")
    selfcheck.add_flag(parser)
    known, flags = parser.parse_known_args(list(args))
    for flag in flags:
        name = flag.partition("=")[0]
        # SGLang takes abbreviations, and none of its flags begins one of these otherwise.
        meant = [each for each in REFUSED if name.startswith("--") and each.startswith(name)]
        if meant and len(name) > 2:
            raise EngineError(f"engine.args of the sglang engine: {name}: {REFUSED[meant[0]]}")
    return Settings(
        known.python,
        known.step_deadline_seconds,
        (*_world(flags), *flags),
        known.allow_untested_version,
        known.self_update_check == "on",
    )


def _world(given: Sequence[str]) -> list[str]:
    """Return the flags for the ranks that `spec.parallelism` asks for; the user's own win."""
    for variable, why in ONE.items():
        if int(os.environ.get(variable, "1")) > 1:
            raise EngineError(why)
    names = {flag.partition("=")[0] for flag in given}
    found: list[str] = []
    for variable, flags in WORLD.items():
        if variable in os.environ and names.isdisjoint(flags):
            found += [flags[0], os.environ[variable]]
    return found


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
    if tokens is not None:
        flags += ["--max-total-tokens", str(tokens + 2 * SLACK_TOKENS)]
    if cpu:
        # With nothing to overlap it only delays tokens; without it Keep is exact.
        flags += ["--attention-backend", "torch_native", "--disable-overlap-schedule"]
    return [*flags, *_place(options.gang), *settings.flags]


def _place(gang: Gang | None) -> list[str]:
    """Return the flags that join the nodes of a gang."""
    if gang is None:
        return []
    host = f"[{gang.leader}]" if ":" in gang.leader else gang.leader
    return [
        "--nnodes", str(gang.nodes),
        "--node-rank", str(gang.rank),
        "--dist-init-addr", f"{host}:{gang.port}",
    ]  # fmt: skip


def with_graphs(tags: Sequence[str]) -> list[str]:
    """Return the tags of SGLang's memory for these of ours: graphs go and come with the weights, where they can."""
    graphs = os.environ.get(GRAPHS_VARIABLE, "").lower() in ("1", "true")
    return [*tags, "cuda_graph"] if graphs and "weights" in tags else list(tags)


def environ(options: EngineOptions, cpu: bool) -> dict[str, str]:
    """Return the variables that SGLang needs besides the worker's own; a leader is an address.

    Raises:
        EngineError: there is no way to the gang's head.
    """
    wanted = {
        FOLDER_VARIABLE: str(options.spill_dir or tempfile.gettempdir()),
        # Where requests don't come in, it would never return from its start.
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",
        "HF_HUB_OFFLINE": "1",
        # We ask for SLACK_TOKENS more than the model's length, which no request reaches.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if SOCKET in os.environ and not cpu:
        # Others get the devices when it sleeps. All-reduces in graphs get a copy for it, so it is not for all.
        wanted[GRAPHS_VARIABLE] = os.environ.get(GRAPHS_VARIABLE, "1")
    if cpu:
        wanted["SGLANG_USE_CPU_ENGINE"] = "1"
        wanted["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    if options.gang is not None:
        wanted[SLOTS_VARIABLE] = str(options.gang.slots)
        own = own_address(options.gang.leader)
        for variable, value in (("SGLANG_HOST_IP", own), ("GLOO_SOCKET_IFNAME", interface_of(own))):
            wanted[variable] = os.environ.get(variable, value)
    return wanted
