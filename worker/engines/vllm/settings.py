"""The engine's flags (`engine.args`): vLLM's own, and one of ours."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rollout_worker.engine import EngineError, GangMembership
from rollout_worker.engines import selfcheck, tested
from rollout_worker.engines.tested import refused_flag_entries

from .under_ray import check_ray_flags

# shutdown.py

PROCESS_STOP_SECONDS = 5
"""What vLLM's processes get to end by themselves."""


# steering.py

FIRST_TOKEN_TIMEOUT_SECONDS = 1.0


# vllm_engine.py

WARM_UP_TIMEOUT_SECONDS = 600.0


MEMBER_VARIABLE = "ROLLOUT_VLLM_MEMBER"
"""Tells ranks that a worker started, and no engine core, which process it is."""

WATCH_VARIABLE = "ROLLOUT_VLLM_WATCH"
"""Tells a member's ranks to see what they read of the weights that they are loaded from."""

PARALLELISM_VARIABLES = {
    "tensor_parallel_size": "ROLLOUT_TENSOR",
    "pipeline_parallel_size": "ROLLOUT_PIPELINE",
    "data_parallel_size": "ROLLOUT_DATA",
}
"""What the operator says of `spec.parallelism`."""


# docs/engines.md shows these; a test holds both against the pinned version's parser.
REFUSED_FLAGS: dict[str, str] = dict(
    (
        ("--model", "set model.source (--model of the worker)"),
        ("--dtype", "set model.dtype (--dtype of the worker)"),
        ("--max-model-len", "set model.maxLength (--max-length of the worker)"),
        ("--served-model-name", "set model.servedName (--served-name of the worker)"),
        ("--logprobs-mode", "set engine.logprobs (--logprobs of the worker)"),
        ("--config", "a file could set what the worker sets: give its flags one by one"),
        *refused_flag_entries("the tokenizer is the model's own", "--tokenizer", "--tokenizer-mode"),
        ("--skip-tokenizer-init", "it is always set: the engine takes and gives token ids"),
        *refused_flag_entries("the worker generates, token by token", "--runner", "--convert", "--diffusion-config"),
        # Sampling: its distribution is the request's, and its logprobs are of that distribution.
        ("--generation-config", "only EOS ids are taken from generation_config.json"),
        ("--override-generation-config", "send sampling parameters with each request"),
        *refused_flag_entries("tokens would be drawn from what no request asks for", "--logits-processors",
               "--watermark-config"),
        # Weights: a commit reaches all of them, and a version is what its hash says.
        ("--load-format", "the worker serves the checkpoint's own bytes"),
        ("--worker-extension-cls", "weights come through it"),
        ("--worker-cls", "weights, sleep and deaths are those of vLLM's own workers"),
        ("--weight-transfer-config", "weights come through POST /v1/weights/stage"),
        *refused_flag_entries("an update would not reach weights that are kept elsewhere", "--offload-backend",
               "--cpu-offload-gb", "--cpu-offload-params", "--offload-group-size",
               "--offload-num-in-group", "--offload-prefetch-step", "--offload-params"),
        *refused_flag_entries("an update puts experts where they were at the start", "--enable-eplb",
               "--eplb-config"),
        ("--enable-lora", "no request names an adapter: merge it into the weights"),
        # Spans: KV of other weights is never passed off as that of the new ones.
        *refused_flag_entries("KV kept elsewhere outlives the weights that made it", "--kv-transfer-config",
               "--kv-offloading-size", "--kv-offloading-backend", "--ec-transfer-config"),
        # Sleep.
        *refused_flag_entries("it is set where the device can", "--enable-sleep-mode", "--enable-cumem-allocator"),
        ("--sleep-preserve-parameter-names", "sleep at level 2 keeps nothing, level 1 everything"),
        # The queue, pauses, streams and the watch for hung steps.
        *refused_flag_entries("the worker queues: set worker.maxQueue (--max-queue of the worker)",
               "--max-num-queued-reqs", "--max-num-queued-tokens"),
        ("--scheduler-cls", "pauses, commits and priorities are those of vLLM's own scheduler"),
        ("--stream-interval", "the worker sets it for each request"),
        ("--disable-log-stats", "they show hung steps"),
        # Ports and processes.
        *refused_flag_entries("the engine opens no port of its own", "--kv-events-config",
               "--data-parallel-multi-port-external-lb"),
        ("--nnodes", "set parallelism.nodes (--nodes of the worker)"),
        ("--node-rank", "set by parallelism.nodes (--rank of the worker)"),
        ("--master-addr", "set by parallelism.nodes (--leader-address of the worker)"),
        ("--master-port", "set by parallelism.nodes (--gang-port of the worker)"),
        *refused_flag_entries("one worker heads all ranks: set parallelism", "--data-parallel-hybrid-lb",
               "--data-parallel-external-lb", "--data-parallel-rank", "--data-parallel-start-rank",
               "--enable-elastic-ep", "--elastic-ep-max-dp-size", "--enable-fault-tolerance"),
    )
)  # fmt: skip
"""Flags that would break a promise of the worker's, and what to use instead. By the flag's first long name; its other names, `--no-` forms and `--flag.key` are meant, too."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What the flags say.

    `step_deadline_seconds`: with requests running, longer without a step counts as hung.
    `vllm`: the parsed flags of vLLM, all of them. `given`: the names of those that were given.
    `self_update_check`: load the checkpoint as an update before serving.
    """

    step_deadline_seconds: float
    vllm: argparse.Namespace
    given: frozenset[str]
    self_update_check: bool = True


def _untested_version() -> str | None:
    import vllm

    return tested.untested_version_refusal("vLLM", str(vllm.__version__))


class _FlagError(Exception):
    """What argparse would have printed before it ended the process."""


def _given_flags(parser: Any, args: Sequence[str]) -> frozenset[str]:
    """Return the names of the flags that were given, in whichever of their spellings.

    Raises:
        EngineError: one of them is refused.
    """
    kept = [(action, action.default) for action in parser._actions]
    for action, _ in kept:
        action.default = argparse.SUPPRESS
    try:
        given = frozenset(vars(parser.parse_args(list(args))))
    finally:
        for action, default in kept:
            action.default = default
    for action, _ in kept:
        for flag in action.option_strings:
            if flag in REFUSED_FLAGS and action.dest in given:
                raise _refused_flag_error(flag)
    return given


def _refused_flag_error(flag: str) -> EngineError:
    return EngineError(f"engine.args: {flag} can't be given: {REFUSED_FLAGS[flag]}")


def parse_flags(args: Sequence[str], gang: GangMembership | None = None) -> VllmSettings:
    """Parse the flags; imports vLLM, which takes seconds.

    Raises:
        EngineError: an unknown or forbidden flag, or a bad value.
    """
    for name in (arg.partition("=")[0].partition(".")[0] for arg in args):
        flag = name.replace("_", "-")
        if flag in REFUSED_FLAGS:  # told before vLLM opens a file, say
            raise _refused_flag_error(flag)

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc,unused-ignore]
        def error(self, message: str) -> NoReturn:
            raise _FlagError(message)

    # An abbreviation is harder to find in a manifest.
    parser: Any = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--step-deadline-seconds", type=float, default=120.0)
    parser.add_argument(tested.ALLOW_UNTESTED_FLAG, action="store_true")
    selfcheck.add_self_check_flag(parser)
    AsyncEngineArgs.add_cli_args(parser)
    try:
        given = _given_flags(parser, args)
        parsed = parser.parse_args(list(args))
    except (_FlagError, ValueError) as error:
        raise EngineError(
            f"engine.args of the vllm engine: {error}; its flags are those of `vllm serve --help`"
            f", --step-deadline-seconds, {selfcheck.SELF_CHECK_FLAG} and {tested.ALLOW_UNTESTED_FLAG}"
        ) from error
    if not parsed.allow_untested_version and (why := _untested_version()) is not None:
        raise EngineError(why)
    if parsed.distributed_executor_backend not in (None, "mp", "ray"):
        raise EngineError(
            "engine.args: --distributed-executor-backend "
            f"{parsed.distributed_executor_backend!r} runs the model inside vLLM's core, where "
            "the worker can't watch over it: use mp (the default) or ray"
        )
    _apply_parallelism(parsed, given, gang)
    check_ray_flags(parsed)
    check = parsed.self_update_check == "on"
    return VllmSettings(parsed.step_deadline_seconds, parsed, given, check)


def _apply_parallelism(
    parsed: argparse.Namespace, given: frozenset[str], gang: GangMembership | None
) -> None:
    """Take over what the operator says of `spec.parallelism`."""
    for field, variable in PARALLELISM_VARIABLES.items():
        if field not in given and variable in os.environ:
            setattr(parsed, field, int(os.environ[variable]))
    if gang is not None:
        _check_gang(parsed, gang)


def _check_gang(parsed: argparse.Namespace, gang: GangMembership) -> None:
    """Refuse what doesn't go over several nodes."""
    if parsed.data_parallel_size > 1:
        raise EngineError(
            "parallelism.data: the vllm engine has data-parallel ranks on one node only: set it to 1"
            " and raise spec.replicas, or set parallelism.nodes to 1"
        )
    if parsed.distributed_executor_backend == "ray":
        raise EngineError(
            "engine.args: --distributed-executor-backend ray finds its nodes itself: set"
            " parallelism.nodes to 1"
        )
    ranks = parsed.tensor_parallel_size * parsed.pipeline_parallel_size
    if ranks % gang.nodes:
        raise EngineError(
            f"parallelism.nodes: {ranks} ranks can't be spread over {gang.nodes} nodes: set it to a"
            " divisor of tensor times pipeline"
        )
