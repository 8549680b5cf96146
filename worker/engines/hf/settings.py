"""The durations of the hf engine, and its own flags (`engine.args`)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from rollout_worker.engine import EngineError

SEND_INTERVAL_SECONDS = 0.02
"""How long tokens wait for more, unless they are an output's first or last: a tiny model makes
them faster than readers can be woken."""

THREAD_STOP_SECONDS = 30.0
"""How long `stop` waits for the step that runs: longer than any sound one on a busy CPU."""


@dataclass(frozen=True, slots=True)
class HfSettings:
    """The values of the flags.

    `max_batch_size`: most outputs in one step. `prefill_tokens`: most prompt tokens that a step
    takes in, so that neither running outputs nor a pause wait for a long prompt; 0: by the device.
    `step_deadline_seconds`: a step that takes longer counts as hung. `threads`: torch's; 0 leaves them as they are.
    """

    max_batch_size: int = 64
    prefill_tokens: int = 0
    step_deadline_seconds: float = 120.0
    attention: str = "sdpa"
    threads: int = 0


class _HfFlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        flags = " ".join(sorted(self._option_string_actions))
        raise EngineError(f"engine.args of the hf engine: {message}; its flags are {flags}")


def _positive_integer(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_positive_integer.__name__ = "positive int"  # what argparse calls it in its message


def parse_settings(args: Sequence[str]) -> HfSettings:
    """Parse the flags; raise `EngineError`, which lists them, for an unknown one or a bad value."""
    # A flag that is not given leaves its attribute out, so that `HfSettings` has the only defaults.
    parser = _HfFlagParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for flag in ("--max-batch-size", "--prefill-tokens", "--threads"):
        parser.add_argument(flag, type=_positive_integer)
    parser.add_argument("--step-deadline-seconds", type=float)
    parser.add_argument("--attention", choices=("sdpa", "eager"))
    return HfSettings(**vars(parser.parse_args(list(args))))
