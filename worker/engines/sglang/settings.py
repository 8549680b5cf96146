"""The engine's own flags (`engine.args`): a few of ours, all others are passed to SGLang."""

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
from rollout_worker.engine import EngineError
from rollout_worker.engines import tested
from rollout_worker.engines.network import choose_interface, own_address
from rollout_worker.engines.options import EngineOptions
from rollout_worker.engines.shared_memory.sinks import SLOTS_VARIABLE

from .model import SglangModel

NVIDIA_SMI_TIMEOUT_SECONDS = 30.0
"""nvidia-smi takes a few seconds where the driver is not loaded yet; with a broken driver it hangs."""

KILL_TIMEOUT_SECONDS = 15.0
"""A killed process is gone once the driver has freed its GPU memory, which takes seconds."""

UNREAD_INTERVAL_SECONDS = 0.1
"""How often tokens are sent that nobody reads as they come: with a small model, sending each token would take
longer than making it."""

SPILL_FOLDER_VARIABLE = "ROLLOUT_SGLANG_SPILL"
"""The folder in which the ranks of a node keep their weights at sleep level 1."""

SAVE_GRAPHS_VARIABLE = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
"""Lets SGLang give back the memory of CUDA graphs, too."""

SLACK_TOKENS = 16
"""SGLang ends outputs a few tokens before its context is full, so it gets this much more context."""

LARGE_PAGE_TOKENS = 256
"""As large as a page of KV is on a GPU."""

CPU_BATCH_TOKENS = 16384
"""Least KV cache on a CPU, where SGLang would take most of the machine's memory."""

BATCH_NOTIFY_SIZE = 1 << 20
"""For how many requests SGLang passes tokens on in one go: for all of a step."""

PARALLELISM_VARIABLE = "ROLLOUT_TENSOR"
"""The variable in which the operator passes `spec.parallelism.tensor`."""
PARALLELISM_FLAGS = (
    "--tp-size",
    "--tensor-parallel-size",
    "--tp",
)  # the last one as an abbreviation
UNSUPPORTED_PARALLELISM = {
    "ROLLOUT_DATA": "parallelism.data: SGLang updates no weights of data-parallel ranks: set it to 1 "
    "and raise replicas",
    "ROLLOUT_PIPELINE": "parallelism.pipeline: SGLang's pipelines can't be paused for an update: set it "
    "to 1 and raise tensor",
}
"""The parts of `spec.parallelism` that must be 1."""

# docs/engine-limits.md shows these; a test holds both against the pinned version's parser.
REFUSED_FLAGS = tested.reasons_by_flag({
    "set by --model": "--model-path --model",
    "set by --device": "--device",
    "set by --dtype": "--dtype",
    "set by --max-length": "--context-length",
    "set by --served-name": "--served-model-name",
    "a file could set what the worker sets: give its flags one by one": "--config",
    "always set: the worker itself speaks token ids": "--skip-tokenizer-init",
    "the tokenizer is the model's own": "--tokenizer-path --tokenizer-mode",
    "the worker talks to one": "--tokenizer-worker-num",
    "the worker generates, token by token": "--is-embedding --dllm-algorithm --encoder-only",
    # Sampling: its distribution is the request's, and its logprobs are of that distribution.
    "the worker brings its own sampler": "--sampling-backend",
    "send sampling parameters with each request": "--sampling-defaults --preferred-sampling-params",
    "drafts would leave the logprobs of the sampler out": "--speculative-algorithm",
    "tokens would be drawn from what no request asks for": "--enable-watermark --watermark-config",
    "a prompt is taken whole or refused": "--allow-auto-truncate",
    # Weights: a commit reaches all of them, and a version is what its hash says.
    "the worker serves the checkpoint's own bytes": "--load-format",
    "the worker brings its own": "--custom-weight-loader",
    "set by commits": "--weight-version",
    "the checkpoint is read again after a restart": "--delete-ckpt-after-loading",
    "weights come through POST /v1/weights/stage": "--checkpoint-engine-wait-weights-before-ready",
    "a version has the checkpoint's layout: quantise the checkpoint":
        "--quantization --modelopt-quant --quantize-and-serve --rl-quant-profile",
    "an update would not reach weights that are kept elsewhere":
        "--cpu-offload-gb --offload-group-size --offload-mode --kt-weight-path --kt-method --enable-paged-experts "
        "--ple-offload-embedding --no-ple-offload-embedding --enable-elastic-expert-backup --weight-cache-mode",
    "adapters come through POST /v1/weights/stage": "--lora-paths --uno-lora-path",
    # Spans: KV of other weights is never passed off as that of the new ones.
    "KV kept elsewhere outlives the weights that made it":
        "--hicache-storage-backend --enable-lmcache --enable-flexkv --enable-unified-cache-external-linker "
        "--disaggregation-mode",
    "a paused engine never finishes its copies of KV, so a commit under load would end it":
        "--enable-hierarchical-cache --enable-hicache",
    # Sleep.
    "sleep at level 1 keeps its copy in sleep.spill": "--enable-weights-cpu-backup",
    # The queue and streams.
    "the worker queues: set worker.maxQueue": "--max-queued-requests",
    "the worker sets it for each request": "--stream-interval",
    # Ports and processes.
    "the engine listens on no port":
        "--host --port --grpc-mode --smg-grpc-mode --grpc-port --sidecar --api-key --admin-api-key --ssl-keyfile "
        "--ssl-certfile --kv-events-config --load-publish-endpoint "
        "--remote-instance-weight-loader-start-seed-via-transfer-engine",
    "the worker watches over SGLang's own processes": "--use-ray",
    "SGLang updates no weights of data-parallel replicas: use more replicas": "--dp-size --data-parallel-size",
    "each attention group would take the worker's commands by itself: spread experts with --ep-size instead":
        "--enable-dp-attention --attn-dp-size --attention-data-parallel-size",
    "SGLang's pipelines can't be paused: use tensor parallelism": "--pp-size --pipeline-parallel-size",
    "set by parallelism.nodes (--nodes of the worker)": "--nnodes",
    "set by --rank of the worker": "--node-rank",
    "set by --leader-address and --gang-port of the worker": "--dist-init-addr --nccl-init-addr",
})  # fmt: skip
"""Flags that would break a promise of the worker's, by each of their names, and what to use instead."""


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """The parsed flags.

    `python`: an interpreter that has SGLang. `step_deadline_seconds`: running requests without a
    new token for this long count as hung. `flags`: SGLang's own. `any_version`: start an untested
    version, too. `self_update_check`: load the checkpoint as an update before serving.
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
    """Parse the flags; raise `EngineError` for a bad value, or a flag of SGLang that is the worker's to set."""
    parser = _FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument(*PARALLELISM_FLAGS, dest="tensor", type=int)
    tested.add_adapter_flags(parser)
    known, flags = parser.parse_known_args(list(args))
    names = [flag.partition("=")[0] for flag in flags if flag.startswith("--") and len(flag) > 2]
    for name in names:
        # SGLang takes abbreviations, and no other flag of it begins like one of these.
        meant = [each for each in REFUSED_FLAGS if each.startswith(name)]
        if meant:
            parser.error(f"{name}: {REFUSED_FLAGS[meant[0]]}")
    for variable, why in UNSUPPORTED_PARALLELISM.items():
        if int(os.environ.get(variable, "1")) > 1:
            raise EngineError(why)
    ranks, of_pool = known.tensor, os.environ.get(PARALLELISM_VARIABLE)
    if of_pool is not None:
        if ranks not in (None, int(of_pool)):
            flag = PARALLELISM_FLAGS[0]
            raise EngineError(tested.shape_refusal(flag, ranks, "tensor", int(of_pool)))
        ranks = int(of_pool)
    if ranks is not None:
        flags = [PARALLELISM_FLAGS[0], str(ranks), *flags]
    return SglangSettings(
        known.python,
        known.step_deadline_seconds,
        tuple(flags),
        known.allow_untested_version,
        known.self_update_check == "on",
    )


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
        "--custom-weight-loader", "rollout_worker.engines.sglang.child_process.loader.load",
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
        # SGLang takes whole pages, whose size it chooses later by the attention of a model.
        page = 1 if cpu else LARGE_PAGE_TOKENS
        flags += ["--max-total-tokens", str(-(-(tokens + 2 * SLACK_TOKENS) // page) * page)]
    if cpu:
        # With nothing to overlap it only delays tokens; without it Keep is exact.
        flags += ["--attention-backend", "torch_native", "--disable-overlap-schedule"]
    gang = options.gang
    if gang is not None:
        host = f"[{gang.leader}]" if ":" in gang.leader else gang.leader
        flags += ["--nnodes", str(gang.nodes), "--node-rank", str(gang.rank)]
        flags += ["--dist-init-addr", f"{host}:{gang.port}"]
    return [*flags, *settings.flags]


def with_graph_tags(tags: Sequence[str]) -> list[str]:
    """Return SGLang's memory tags for these of ours: graphs sleep and wake with the weights, where they can."""
    graphs = os.environ.get(SAVE_GRAPHS_VARIABLE, "").lower() in ("1", "true")
    return [*tags, "cuda_graph"] if graphs and "weights" in tags else list(tags)


def child_environment(options: EngineOptions, cpu: bool) -> dict[str, str]:
    """Return the variables that SGLang needs in addition to the worker's own; a gang's leader is an address.

    Raises:
        EngineError: this node can't reach the gang's head.
    """
    wanted = {
        SPILL_FOLDER_VARIABLE: str(options.spill_dir or tempfile.gettempdir()),
        # On nodes that take no requests, SGLang would never return from its start.
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",
        "HF_HUB_OFFLINE": "1",
        # We ask for SLACK_TOKENS more than the model's length, which no request reaches.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if SOCKET in os.environ and not cpu:
        # Others get the devices when it sleeps. All-reduces in graphs cost a copy with it, so it is not for all.
        wanted[SAVE_GRAPHS_VARIABLE] = os.environ.get(SAVE_GRAPHS_VARIABLE, "1")
    if cpu:
        wanted["SGLANG_USE_CPU_ENGINE"] = "1"
        wanted["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    if options.gang is not None:
        wanted[SLOTS_VARIABLE] = str(options.gang.slots)
        own = own_address(options.gang.leader)
        for variable, value in (
            ("SGLANG_HOST_IP", own),
            ("GLOO_SOCKET_IFNAME", choose_interface(own)),
        ):
            wanted[variable] = os.environ.get(variable, value)
    return wanted
