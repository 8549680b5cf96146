"""The engine's own flags (`engine.args`)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from rollout_worker.engine import EngineError

# core.py

SEND_INTERVAL_SECONDS = 0.02
"""Tokens wait this long for more, unless they are an output's first or last: a tiny model makes
them faster than readers can be woken."""


# hf_engine.py

THREAD_STOP_SECONDS = 30.0
"""How long `stop` waits for the step that runs."""


@dataclass(frozen=True, slots=True)
class HfSettings:
    """What the flags say.

    `max_batch_size`: most outputs in one step. `prefill_tokens`: most prompt tokens that a step
    takes in, so that neither running outputs nor a pause wait for a long prompt; 0: as the device
    is. `step_deadline_seconds`: a step
    that takes longer counts as hung. `threads`: torch's; 0 leaves them as they are.
    """

    max_batch_size: int = 64
    prefill_tokens: int = 0
    step_deadline_seconds: float = 120.0
    attention: str = "sdpa"
    threads: int = 0


DEFAULTS = HfSettings()


class _HfFlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        flags = " ".join(sorted(flag for flag in self._option_string_actions))
        raise EngineError(f"engine.args of the hf engine: {message}; its flags are {flags}")


def _positive_integer(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_positive_integer.__name__ = "positive int"  # what argparse calls it in its message


def parse_settings(args: Sequence[str]) -> HfSettings:
    """Parse the flags.

    Raises:
        EngineError: an unknown flag or a bad value; lists the flags.
    """
    parser = _HfFlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-batch-size", type=_positive_integer, default=DEFAULTS.max_batch_size)
    parser.add_argument("--prefill-tokens", type=_positive_integer, default=DEFAULTS.prefill_tokens)
    parser.add_argument(
        "--step-deadline-seconds", type=float, default=DEFAULTS.step_deadline_seconds
    )
    parser.add_argument("--attention", choices=("sdpa", "eager"), default=DEFAULTS.attention)
    parser.add_argument("--threads", type=_positive_integer, default=DEFAULTS.threads)
    return HfSettings(**vars(parser.parse_args(list(args))))
