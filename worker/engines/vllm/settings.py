"""The engine's flags (`engine.args`): vLLM's own, and one of ours."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rollout_worker.engine import EngineError, Gang
from rollout_worker.engines import selfcheck, tested

from .refused import REFUSED
from .under_ray import check_flags

MEMBER_VARIABLE = "ROLLOUT_VLLM_MEMBER"
"""Tells ranks that a worker started, and no engine core, which process it is."""

WATCH_VARIABLE = "ROLLOUT_VLLM_WATCH"
"""Tells a member's ranks to see what they read of the weights that they are loaded from."""

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
    `self_update_check`: load the checkpoint as an update before serving.
    """

    step_deadline_seconds: float
    vllm: argparse.Namespace
    given: frozenset[str]
    self_update_check: bool = True


def _untested() -> str | None:
    import vllm

    return tested.refusal("vLLM", str(vllm.__version__))


class _Refusal(Exception):
    """What argparse would have printed before it ended the process."""


def _given(parser: Any, args: Sequence[str]) -> frozenset[str]:
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
            if flag in REFUSED and action.dest in given:
                raise _refused(flag)
    return given


def _refused(flag: str) -> EngineError:
    return EngineError(f"engine.args: {flag} can't be given: {REFUSED[flag]}")


def parse(args: Sequence[str], gang: Gang | None = None) -> Settings:
    """Parse the flags; imports vLLM, which takes seconds.

    Raises:
        EngineError: an unknown or forbidden flag, or a bad value.
    """
    for name in (arg.partition("=")[0].partition(".")[0] for arg in args):
        flag = name.replace("_", "-")
        if flag in REFUSED:  # told before vLLM opens a file, say
            raise _refused(flag)

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc,unused-ignore]
        def error(self, message: str) -> NoReturn:
            raise _Refusal(message)

    # An abbreviation is harder to find in a manifest.
    parser: Any = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--step-deadline-seconds", type=float, default=120.0)
    parser.add_argument(tested.FLAG, action="store_true")
    selfcheck.add_flag(parser)
    AsyncEngineArgs.add_cli_args(parser)
    try:
        given = _given(parser, args)
        parsed = parser.parse_args(list(args))
    except (_Refusal, ValueError) as error:
        raise EngineError(
            f"engine.args of the vllm engine: {error}; its flags are those of `vllm serve --help`"
            f", --step-deadline-seconds, {selfcheck.FLAG} and {tested.FLAG}"
        ) from error
    if not parsed.allow_untested_version and (why := _untested()) is not None:
        raise EngineError(why)
    if parsed.distributed_executor_backend not in (None, "mp", "ray"):
        raise EngineError(
            "engine.args: --distributed-executor-backend "
            f"{parsed.distributed_executor_backend!r} runs the model inside vLLM's core, where "
            "the worker can't watch over it: use mp (the default) or ray"
        )
    _spread(parsed, given, gang)
    check_flags(parsed)
    check = parsed.self_update_check == "on"
    return Settings(parsed.step_deadline_seconds, parsed, given, check)


def _spread(parsed: argparse.Namespace, given: frozenset[str], gang: Gang | None) -> None:
    """Take over what the operator says of `spec.parallelism`."""
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
