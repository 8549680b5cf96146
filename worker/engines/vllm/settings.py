"""The engine's flags (`engine.args`): vLLM's own, and a few of ours."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rollout_worker.engine import EngineError, GangMembership
from rollout_worker.engines import tested

from .under_ray import check_executor

PROCESS_STOP_SECONDS = 5
"""vLLM's processes end within a second or two; whatever then still runs is killed."""

FIRST_TOKEN_TIMEOUT_SECONDS = 1.0
"""A pause waits this long for first tokens: longer than most prefills, which would otherwise run twice."""

WARM_UP_TIMEOUT_SECONDS = 600.0
"""The first steps compile kernels, which takes minutes."""

MEMBER_VARIABLE = "ROLLOUT_VLLM_MEMBER"
"""The process id of the member that started these ranks; ranks of an engine core have none."""

WATCH_VARIABLE = "ROLLOUT_VLLM_WATCH"
"""Has a member's ranks note which of the staged tensors they read."""

PARALLELISM_VARIABLES = {
    "tensor_parallel_size": "ROLLOUT_TENSOR",
    "pipeline_parallel_size": "ROLLOUT_PIPELINE",
    "data_parallel_size": "ROLLOUT_DATA",
}
"""The variables in which the operator passes `spec.parallelism`."""

# docs/engine-limits.md shows these; a test holds both against the pinned version's parser.
REFUSED_FLAGS = tested.reasons_by_flag({
    "set model.source (--model of the worker)": "--model",
    "set model.dtype (--dtype of the worker)": "--dtype",
    "set model.maxLength (--max-length of the worker)": "--max-model-len",
    "set model.servedName (--served-name of the worker)": "--served-model-name",
    "set engine.logprobs (--logprobs of the worker)": "--logprobs-mode",
    "a file could set what the worker sets: give its flags one by one": "--config",
    "the tokenizer is the model's own": "--tokenizer --tokenizer-mode",
    "it is always set: the engine takes and gives token ids": "--skip-tokenizer-init",
    "the worker generates, token by token": "--runner --convert --diffusion-config",
    # Sampling: its distribution is the request's, and its logprobs are of that distribution.
    "only EOS ids are taken from generation_config.json": "--generation-config",
    "send sampling parameters with each request": "--override-generation-config",
    "tokens would be drawn from what no request asks for": "--logits-processors --watermark-config",
    "scores of prompts would be wrong": "--kv-sharing-fast-prefill",
    # Weights: a commit reaches all of them, and a version is what its hash says.
    "the worker serves the checkpoint's own bytes": "--load-format",
    "weights come through it": "--worker-extension-cls",
    "weights, sleep and deaths are those of vLLM's own workers": "--worker-cls",
    "weights come through POST /v1/weights/stage": "--weight-transfer-config",
    "an update would not reach weights that are kept elsewhere":
        "--offload-backend --cpu-offload-gb --cpu-offload-params --offload-group-size "
        "--offload-num-in-group --offload-prefetch-step --offload-params",
    "an update puts experts where they were at the start": "--enable-eplb --eplb-config",
    "adapters come through POST /v1/weights/stage, each to the layers that it names":
        "--lora-target-modules --default-mm-loras --enable-tower-connector-lora",
    # Spans: KV of other weights is never passed off as that of the new ones.
    "KV kept elsewhere outlives the weights that made it":
        "--kv-transfer-config --kv-offloading-size --kv-offloading-backend --ec-transfer-config",
    # Sleep.
    "it is set where the device can": "--enable-sleep-mode --enable-cumem-allocator",
    "sleep at level 2 keeps nothing, level 1 everything": "--sleep-preserve-parameter-names",
    # The queue, pauses, streams and the watch for hung steps.
    "the worker queues: set worker.maxQueue (--max-queue of the worker)":
        "--max-num-queued-reqs --max-num-queued-tokens",
    "pauses, commits and priorities are those of vLLM's own scheduler": "--scheduler-cls",
    "the worker sets it for each request": "--stream-interval",
    "they show hung steps": "--disable-log-stats",
    # Ports and processes.
    "the engine opens no port of its own": "--kv-events-config --data-parallel-multi-port-external-lb",
    "set parallelism.nodes (--nodes of the worker)": "--nnodes",
    "set by parallelism.nodes (--rank of the worker)": "--node-rank",
    "set by parallelism.nodes (--leader-address of the worker)": "--master-addr",
    "set by parallelism.nodes (--gang-port of the worker)": "--master-port",
    "one worker heads all ranks: set parallelism":
        "--data-parallel-hybrid-lb --data-parallel-external-lb --data-parallel-rank --data-parallel-start-rank "
        "--enable-elastic-ep --elastic-ep-max-dp-size --enable-fault-tolerance",
})  # fmt: skip
"""Flags that would break a promise of the worker's, by their first long name, and what to use instead.

A flag's other names, its `--no-` form and `--flag.key` are refused, too.
"""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """The parsed flags.

    `step_deadline_seconds`: with requests running, a longer time without a step counts as hung.
    `vllm`: all flags of vLLM, `given`: the names of those that were given.
    `self_update_check`: load the checkpoint as an update before serving.
    """

    step_deadline_seconds: float
    vllm: argparse.Namespace
    given: frozenset[str]
    self_update_check: bool = True


class _FlagError(Exception):
    """What argparse would have printed before it ended the process."""


def _given_flags(parser: Any, args: Sequence[str]) -> frozenset[str]:
    """Return the names of the flags that were given, in whichever of their spellings."""
    kept = [(action, action.default) for action in parser._actions]
    for action, _ in kept:
        action.default = argparse.SUPPRESS
    try:
        given = frozenset(vars(parser.parse_args(list(args))))
    finally:
        for action, default in kept:
            action.default = default
    for action, _ in kept:
        if action.dest in given:
            _refuse_flags(action.option_strings)
    return given


def _refuse_flags(flags: Sequence[str]) -> None:
    for flag in flags:
        if flag in REFUSED_FLAGS:
            raise EngineError(f"engine.args: {flag} can't be given: {REFUSED_FLAGS[flag]}")


def parse_flags(args: Sequence[str], gang: GangMembership | None = None) -> VllmSettings:
    """Parse the flags; imports vLLM, which takes seconds.

    Raises:
        EngineError: an unknown or forbidden flag, or a bad value.
    """
    # Before vLLM's parser opens a file that `--config` names.
    _refuse_flags([arg.partition("=")[0].partition(".")[0].replace("_", "-") for arg in args])

    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc,unused-ignore]
        def error(self, message: str) -> NoReturn:
            raise _FlagError(message)

    # An abbreviation is harder to find in a manifest.
    parser: Any = Parser(add_help=False, allow_abbrev=False)
    tested.add_adapter_flags(parser)
    AsyncEngineArgs.add_cli_args(parser)
    try:
        given = _given_flags(parser, args)
        parsed = parser.parse_args(list(args))
    except (_FlagError, ValueError) as error:
        raise EngineError(
            f"engine.args of the vllm engine: {error}; its flags are those of `vllm serve --help`"
            f", --step-deadline-seconds, {tested.SELF_CHECK_FLAG} and {tested.ALLOW_UNTESTED_FLAG}"
        ) from error
    untested = tested.untested_version_refusal("vLLM", str(vllm.__version__))
    if untested is not None and not parsed.allow_untested_version:
        raise EngineError(untested)
    _apply_parallelism(parsed, given, gang)
    check_executor(parsed)
    check = parsed.self_update_check == "on"
    return VllmSettings(parsed.step_deadline_seconds, parsed, given, check)


def _apply_parallelism(
    parsed: argparse.Namespace, given: frozenset[str], gang: GangMembership | None
) -> None:
    """Apply `spec.parallelism`; refuse what doesn't go over several nodes."""
    for field, variable in PARALLELISM_VARIABLES.items():
        if variable not in os.environ:
            continue
        of_pool, asked = int(os.environ[variable]), getattr(parsed, field)
        if field in given and asked != of_pool:
            flag, name = f"--{field.replace('_', '-')}", field.partition("_")[0]
            raise EngineError(tested.shape_refusal(flag, asked, name, of_pool))
        setattr(parsed, field, of_pool)
    if gang is None:
        return
    if parsed.data_parallel_size > 1:
        raise EngineError(
            "parallelism.data: the vllm engine has data-parallel ranks on one node only: set it to 1"
            " and raise spec.replicas, or set parallelism.nodes to 1"
        )
    if parsed.distributed_executor_backend == "ray":
        raise EngineError(
            "engine.args: --distributed-executor-backend ray keeps all ranks in one container: remove"
            " it, since parallelism.nodes needs no Ray, or set parallelism.nodes to 1"
        )
    ranks = parsed.tensor_parallel_size * parsed.pipeline_parallel_size
    if ranks % gang.nodes:
        raise EngineError(
            f"parallelism.nodes: {ranks} ranks can't be spread over {gang.nodes} nodes: set it to a"
            " divisor of tensor times pipeline"
        )
