"""The engine's flags (`engine.args`): vLLM's own, and one of ours."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rollout_worker.engine import EngineError, Gang
from rollout_worker.engines import tested

OURS = {
    "--model": "set model.source (--model of the worker)",
    "--tokenizer": "the tokenizer is the model's own",
    "--skip-tokenizer-init": "it is always set: the engine takes and gives token ids",
    "--dtype": "set model.dtype (--dtype of the worker)",
    "--max-model-len": "set model.maxLength (--max-length of the worker)",
    "--served-model-name": "set model.servedName (--served-name of the worker)",
    "--logprobs-mode": "set engine.logprobs (--logprobs of the worker)",
    "--generation-config": "only EOS ids are taken from generation_config.json",
    "--override-generation-config": "send sampling parameters with each request",
    "--worker-extension-cls": "weights come through it",
    "--weight-transfer-config": "weights come through POST /v1/weights/stage",
    "--enable-sleep-mode": "it is set where the device can",
    "--nnodes": "set parallelism.nodes (--nodes of the worker)",
    "--node-rank": "set by parallelism.nodes (--rank of the worker)",
    "--master-addr": "set by parallelism.nodes (--leader-address of the worker)",
    "--master-port": "set by parallelism.nodes (--gang-port of the worker)",
    "--config": "a file could set what the worker sets: give its flags one by one",
}
"""Flags of vLLM that this adapter sets itself, and what to use instead."""

MEMBER_VARIABLE = "ROLLOUT_VLLM_MEMBER"
"""Tells ranks that a worker started, and no engine core, which process it is."""

WORLD = {
    "tensor_parallel_size": "ROLLOUT_TENSOR",
    "pipeline_parallel_size": "ROLLOUT_PIPELINE",
    "data_parallel_size": "ROLLOUT_DATA",
}
"""What the operator says of `spec.parallelism`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the flags say.

    `step_deadline_seconds`: with requests running, longer without a step counts as hung.
    `vllm`: the parsed flags of vLLM, all of them. `given`: the names of those that were given.
    """

    step_deadline_seconds: float
    vllm: argparse.Namespace
    given: frozenset[str]


def _untested() -> str | None:
    import vllm

    return tested.refusal("vLLM", str(vllm.__version__))


class _Refusal(Exception):
    """What argparse would have printed before it ended the process."""


def parse(args: Sequence[str], gang: Gang | None = None) -> Settings:
    """Parse the flags; imports vLLM, which takes seconds.

    Raises:
        EngineError: an unknown or forbidden flag, or a bad value.
    """
    for flag in (arg.partition("=")[0].replace("_", "-") for arg in args if arg.startswith("--")):
        if flag in OURS:
            raise EngineError(f"engine.args: {flag} can't be given: {OURS[flag]}")

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc,unused-ignore]
        def error(self, message: str) -> NoReturn:
            raise _Refusal(message)

    # An abbreviation would not be found among the refused.
    parser: Any = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--step-deadline-seconds", type=float, default=120.0)
    parser.add_argument(tested.FLAG, action="store_true")
    AsyncEngineArgs.add_cli_args(parser)
    try:
        parsed = parser.parse_args(list(args))
    except (_Refusal, ValueError) as error:
        raise EngineError(
            f"engine.args of the vllm engine: {error}; its flags are those of `vllm serve --help`"
            f", --step-deadline-seconds and {tested.FLAG}"
        ) from error
    if not parsed.allow_untested_version and (why := _untested()) is not None:
        raise EngineError(why)
    given = {arg.partition("=")[0].lstrip("-").replace("-", "_") for arg in args}
    if parsed.distributed_executor_backend not in (None, "mp", "ray"):
        raise EngineError(
            "engine.args: --distributed-executor-backend "
            f"{parsed.distributed_executor_backend!r} runs the model inside vLLM's core, where "
            "the worker can't watch over it: use mp (the default) or ray"
        )
    _spread(parsed, given, gang)
    return Settings(parsed.step_deadline_seconds, parsed, frozenset(given))


def _spread(parsed: argparse.Namespace, given: set[str], gang: Gang | None) -> None:
    """Take over what the operator says of `spec.parallelism`."""
    if (parsed.nnodes, parsed.node_rank) != (1, 0):
        raise EngineError("engine.args: -n and -r can't be given: set parallelism.nodes")
    for field, variable in WORLD.items():
        if field not in given and variable in os.environ:
            setattr(parsed, field, int(os.environ[variable]))
    if gang is not None:
        _check_gang(parsed, gang)


def _check_gang(parsed: argparse.Namespace, gang: Gang) -> None:
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
