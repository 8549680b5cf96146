"""Answers of workers as they are kept: equal to what was said, and one object where many say the same."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from rollout_operator.workers.shared_states import share_state
from rollout_worker.schemas import WorkerState
from tests.support.unit.states import serving_state

SERVED = {
    "active": {"epoch": 1, "version": 2, "root_hash": "h", "labels": {"step": "7"}},
    "previous": {"epoch": 1, "version": 1},
    "staged": {"epoch": 1, "version": 3, "source": {"path": "/m"}, "phase": "Staging", "slug": "x"},
    "required": {"epoch": 1, "version": 2},
}
LONG = {"epoch": 1, "version": 2, "labels": {"filler": "x" * 5000}}


def answer(boot: str, **changes: Any) -> WorkerState:
    told = {"caller": "us", "in_flight_policies": ["Drain", "Abort"], "weights": SERVED}
    return WorkerState.model_validate(serving_state(boot_id=boot, **told | changes))


def test_a_kept_state_says_what_the_worker_said() -> None:
    for state in (answer("a"), answer("a", weights={"active": None}, in_flight=3)):
        kept = share_state(state)
        assert kept == state
        assert kept.model_dump_json() == state.model_dump_json()


def test_what_workers_say_alike_is_kept_once() -> None:
    one, other = share_state(answer("a")), share_state(answer("b", seq=9))
    assert one.weights is other.weights
    assert one.caller is other.caller
    first, second = (share_state(answer(boot)) for boot in "cd")
    assert first.__pydantic_fields_set__ is second.__pydantic_fields_set__


def test_what_is_long_is_kept_for_nobody_else() -> None:
    """Any image may answer, with megabytes that are new each time."""
    known = weakref.ref(share_state(answer("a", weights={**SERVED, "active": LONG})).weights)
    gc.collect()
    assert known() is None
