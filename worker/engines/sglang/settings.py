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

from rollout_common.turn.sharing import SOCKET
from rollout_worker.engine import EngineError, GangMembership
from rollout_worker.engines import EngineOptions, selfcheck, tested
from rollout_worker.engines.network import find_interface, own_address
from rollout_worker.engines.shared_memory.sinks import SLOTS_VARIABLE
from rollout_worker.engines.tested import refused_flag_entries

from .model import SglangModel

# child.py

NVIDIA_SMI_TIMEOUT_SECONDS = 30.0


# process.py

KILL_TIMEOUT_SECONDS = 15.0


# sglang_streams.py

UNREAD_INTERVAL_SECONDS = 0.1
"""How often tokens are passed on that nobody reads along: each one would take longer to pass on than
to make with a small model."""


SPILL_FOLDER_VARIABLE = "ROLLOUT_SGLANG_SPILL"
"""Tells the ranks of a node where their weights are to go at sleep level 1."""

SAVE_GRAPHS_VARIABLE = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
"""Lets SGLang give back the memory of CUDA graphs, too."""

SLACK_TOKENS = 16
"""SGLang ends outputs a few tokens before its context is full: it gets a context so much longer."""

CPU_BATCH_TOKENS = 16384
"""Least KV cache on a CPU, where SGLang would take most of the machine's memory."""

BATCH_NOTIFY_SIZE = 1 << 20
"""How many requests' tokens SGLang passes on before it lets others work: those of a whole step."""

PARALLELISM_FLAGS = {
    "ROLLOUT_TENSOR": ("--tp-size", "--tensor-parallel-size"),
}
"""What the operator says of `spec.parallelism`, and SGLang's flags for it."""
UNSUPPORTED_PARALLELISM = {
    "ROLLOUT_DATA": "parallelism.data: SGLang updates no weights of data-parallel ranks: set it to 1 "
    "and raise replicas",
    "ROLLOUT_PIPELINE": "parallelism.pipeline: SGLang's pipelines can't be paused for an update: set it "
    "to 1 and raise tensor",
}
"""What of `spec.parallelism` must be 1."""


# docs/engines.md shows these; a test holds both against the pinned version's parser.
REFUSED_FLAGS: dict[str, str] = dict(
    (
        *refused_flag_entries("set by --model", "--model-path", "--model"),
        ("--device", "set by --device"),
        ("--dtype", "set by --dtype"),
        ("--context-length", "set by --max-length"),
        ("--served-model-name", "set by --served-name"),
        ("--config", "a file could set what the worker sets: give its flags one by one"),
        ("--skip-tokenizer-init", "always set: the worker itself speaks token ids"),
        *refused_flag_entries("the tokenizer is the model's own", "--tokenizer-path", "--tokenizer-mode"),
        ("--tokenizer-worker-num", "the worker talks to one"),
        *refused_flag_entries("the worker generates, token by token", "--is-embedding", "--dllm-algorithm",
               "--encoder-only"),
        # Sampling: its distribution is the request's, and its logprobs are of that distribution.
        ("--sampling-backend", "the worker brings its own sampler"),
        *refused_flag_entries("send sampling parameters with each request", "--sampling-defaults",
               "--preferred-sampling-params"),
        ("--speculative-algorithm", "drafts would leave the logprobs of the sampler out"),
        *refused_flag_entries("tokens would be drawn from what no request asks for", "--enable-watermark",
               "--watermark-config"),
        ("--allow-auto-truncate", "a prompt is taken whole or refused"),
        # Weights: a commit reaches all of them, and a version is what its hash says.
        ("--load-format", "the worker serves the checkpoint's own bytes"),
        ("--custom-weight-loader", "the worker brings its own"),
        ("--weight-version", "set by commits"),
        ("--delete-ckpt-after-loading", "the checkpoint is read again after a restart"),
        ("--checkpoint-engine-wait-weights-before-ready", "weights come through POST /v1/weights/stage"),
        *refused_flag_entries("a version has the checkpoint's layout: quantise the checkpoint", "--quantization",
               "--modelopt-quant", "--quantize-and-serve", "--rl-quant-profile"),
        *refused_flag_entries("an update would not reach weights that are kept elsewhere", "--cpu-offload-gb",
               "--offload-group-size", "--offload-mode", "--kt-weight-path", "--kt-method",
               "--enable-paged-experts", "--ple-offload-embedding",
               "--no-ple-offload-embedding",
               "--enable-elastic-expert-backup", "--weight-cache-mode"),
        *refused_flag_entries("no request names an adapter: merge it into the weights", "--enable-lora",
               "--lora-paths", "--uno-lora-path"),
        # Spans: KV of other weights is never passed off as that of the new ones.
        *refused_flag_entries("KV kept elsewhere outlives the weights that made it", "--hicache-storage-backend",
               "--enable-lmcache", "--enable-flexkv", "--enable-unified-cache-external-linker",
               "--disaggregation-mode"),
        # Sleep.
        ("--enable-weights-cpu-backup", "sleep at level 1 keeps its copy in sleep.spill"),
        # The queue and streams.
        ("--max-queued-requests", "the worker queues: set worker.maxQueue"),
        ("--stream-interval", "the worker sets it for each request"),
        # Ports and processes.
        *refused_flag_entries("the engine listens on no port", "--host", "--port", "--grpc-mode",
               "--smg-grpc-mode", "--grpc-port", "--sidecar", "--api-key", "--admin-api-key",
               "--ssl-keyfile", "--ssl-certfile", "--kv-events-config", "--load-publish-endpoint",
               "--remote-instance-weight-loader-start-seed-via-transfer-engine"),
        ("--use-ray", "the worker watches over SGLang's own processes"),
        *refused_flag_entries("SGLang updates no weights of data-parallel replicas: use more replicas",
               "--dp-size", "--data-parallel-size"),
        *refused_flag_entries("each attention group would take the worker's commands by itself: spread experts with "
               "--ep-size instead", "--enable-dp-attention", "--attn-dp-size",
               "--attention-data-parallel-size"),
        *refused_flag_entries("SGLang's pipelines can't be paused: use tensor parallelism", "--pp-size",
               "--pipeline-parallel-size"),
        ("--nnodes", "set by parallelism.nodes (--nodes of the worker)"),
        ("--node-rank", "set by --rank of the worker"),
        *refused_flag_entries("set by --leader-address and --gang-port of the worker", "--dist-init-addr",
               "--nccl-init-addr"),
    )
)  # fmt: skip
"""Flags that would break a promise of the worker's, and what to use instead. By each of the flag's names."""


@dataclass(frozen=True, slots=True)
class SglangSettings:
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


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EngineError(f"engine.args of the sglang engine: {message}")


def parse_flags(args: Sequence[str]) -> SglangSettings:
    """Parse the flags.

    Raises:
        EngineError: a bad value, or a flag of SGLang that is the worker's to set.
    """
    parser = _FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--step-deadline-seconds", type=float, default=120.0)
    parser.add_argument(tested.ALLOW_UNTESTED_FLAG, action="store_true")
    selfcheck.add_self_check_flag(parser)
    known, flags = parser.parse_known_args(list(args))
    for flag in flags:
        name = flag.partition("=")[0]
        # SGLang takes abbreviations, and none of its flags begins one of these otherwise.
        meant = [each for each in REFUSED_FLAGS if name.startswith("--") and each.startswith(name)]
        if meant and len(name) > 2:
            raise EngineError(
                f"engine.args of the sglang engine: {name}: {REFUSED_FLAGS[meant[0]]}"
            )
    return SglangSettings(
        known.python,
        known.step_deadline_seconds,
        (*_parallelism_flags(flags), *flags),
        known.allow_untested_version,
        known.self_update_check == "on",
    )


def _parallelism_flags(given: Sequence[str]) -> list[str]:
    """Return the flags for the ranks that `spec.parallelism` asks for; the user's own win."""
    for variable, why in UNSUPPORTED_PARALLELISM.items():
        if int(os.environ.get(variable, "1")) > 1:
            raise EngineError(why)
    names = {flag.partition("=")[0] for flag in given}
    found: list[str] = []
    for variable, flags in PARALLELISM_FLAGS.items():
        if variable in os.environ and names.isdisjoint(flags):
            found += [flags[0], os.environ[variable]]
    return found


def runs_on_cpu(options: EngineOptions) -> bool:
    """Return whether the child is to compute on the CPU."""
    if options.device != "auto":
        return options.device == "cpu"
    return not Path("/dev/nvidiactl").exists()


def child_flags(
    options: EngineOptions, settings: SglangSettings, model: SglangModel, cpu: bool
) -> list[str]:
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
        "--batch-notify-size", str(BATCH_NOTIFY_SIZE),
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
    return [*flags, *_gang_flags(options.gang), *settings.flags]


def _gang_flags(gang: GangMembership | None) -> list[str]:
    """Return the flags that join the nodes of a gang."""
    if gang is None:
        return []
    host = f"[{gang.leader}]" if ":" in gang.leader else gang.leader
    return [
        "--nnodes", str(gang.nodes),
        "--node-rank", str(gang.rank),
        "--dist-init-addr", f"{host}:{gang.port}",
    ]  # fmt: skip


def with_graph_tags(tags: Sequence[str]) -> list[str]:
    """Return the tags of SGLang's memory for these of ours: graphs go and come with the weights, where they can."""
    graphs = os.environ.get(SAVE_GRAPHS_VARIABLE, "").lower() in ("1", "true")
    return [*tags, "cuda_graph"] if graphs and "weights" in tags else list(tags)


def child_environment(options: EngineOptions, cpu: bool) -> dict[str, str]:
    """Return the variables that SGLang needs besides the worker's own; a leader is an address.

    Raises:
        EngineError: there is no way to the gang's head.
    """
    wanted = {
        SPILL_FOLDER_VARIABLE: str(options.spill_dir or tempfile.gettempdir()),
        # Where requests don't come in, it would never return from its start.
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",
        "HF_HUB_OFFLINE": "1",
        # We ask for SLACK_TOKENS more than the model's length, which no request reaches.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if SOCKET in os.environ and not cpu:
        # Others get the devices when it sleeps. All-reduces in graphs get a copy for it, so it is not for all.
        wanted[SAVE_GRAPHS_VARIABLE] = os.environ.get(SAVE_GRAPHS_VARIABLE, "1")
    if cpu:
        wanted["SGLANG_USE_CPU_ENGINE"] = "1"
        wanted["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    if options.gang is not None:
        wanted[SLOTS_VARIABLE] = str(options.gang.slots)
        own = own_address(options.gang.leader)
        for variable, value in (
            ("SGLANG_HOST_IP", own),
            ("GLOO_SOCKET_IFNAME", find_interface(own)),
        ):
            wanted[variable] = os.environ.get(variable, value)
    return wanted
