"""Answers of workers as they are kept: what they say alike is one object."""

from __future__ import annotations

import sys
from functools import lru_cache

from rollout_common.wire import WeightsState, WorkerState
from rollout_operator.api.shared_models import share_field_names


@lru_cache(maxsize=1024)
def _read_weights(text: str) -> WeightsState:
    return WeightsState.model_validate_json(text)


@lru_cache(maxsize=1024)
def _shared_policies(policies: tuple[str, ...]) -> tuple[str, ...]:
    return policies


def share_state(state: WorkerState) -> WorkerState:
    """Return an equal state that has as much in common as can be with those that were given before.

    The workers of a pool have the same weights almost always, and their `previous` and `labels` may be long.
    """
    shared = state.model_copy(
        update={
            "weights": _read_weights(state.weights.model_dump_json()),
            "caller": sys.intern(state.caller),
            "engine": sys.intern(state.engine),
            "in_flight_policies": _shared_policies(state.in_flight_policies),
        }
    )
    share_field_names(shared)
    return shared
