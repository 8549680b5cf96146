"""Answers of workers as they are kept: what they say alike is one object."""

from __future__ import annotations

import sys
from functools import lru_cache

from rollout_common.wire import WeightsState, WorkerState
from rollout_operator.api.shared_models import share_field_names

MAX_SHARED_LENGTH = 4096
"""Longer texts are not kept for others: any image may answer here, and something new each time."""


@lru_cache(maxsize=1024)
def _read_weights(text: str) -> WeightsState:
    return WeightsState.model_validate_json(text)


def share_state(state: WorkerState) -> WorkerState:
    """Return an equal state that has as much in common as can be with those that were given before.

    The workers of a pool have the same weights almost always.
    """
    text = state.weights.model_dump_json()
    shared = state.model_copy(
        update={
            "weights": _read_weights(text) if len(text) <= MAX_SHARED_LENGTH else state.weights,
            "caller": sys.intern(state.caller),
            "engine": sys.intern(state.engine),
        }
    )
    share_field_names(shared)
    return shared
