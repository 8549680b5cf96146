import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.core.lifecycle_states import (
    MOVES,
    WITHOUT_ENGINE,
    IllegalMove,
    LifecycleTracker,
)
from rollout_worker.schemas import Lifecycle


def test_the_table_has_every_state_and_no_way_to_stay() -> None:
    assert set(MOVES) == set(Lifecycle)
    assert all(state not in targets for state, targets in MOVES.items())


def test_every_state_but_failed_itself_can_fail() -> None:
    assert {s for s in Lifecycle if Lifecycle.FAILED in MOVES[s]} == set(Lifecycle) - {
        Lifecycle.FAILED
    }


@pytest.mark.parametrize("state", list(Lifecycle))
def test_every_state_can_become_active_again(state: Lifecycle) -> None:
    seen, todo = {state}, [state]
    while todo:
        new = MOVES[todo.pop()] - seen
        seen |= new
        todo.extend(new)
    assert Lifecycle.ACTIVE in seen


def test_no_engine_serves_while_it_loads() -> None:
    assert {Lifecycle.STARTING, Lifecycle.LOADING, Lifecycle.FAILED} == WITHOUT_ENGINE
    # Nothing skips loading; who stays asleep without an engine comes from there to loading, too.
    assert MOVES[Lifecycle.FAILED] == {Lifecycle.LOADING, Lifecycle.ASLEEP}


@given(st.lists(st.sampled_from(list(Lifecycle)), max_size=40))
def test_the_tracker_follows_the_table_and_nothing_else(wanted: list[Lifecycle]) -> None:
    told: list[tuple[Lifecycle, Lifecycle]] = []
    tracker = LifecycleTracker(lambda old, new: told.append((old, new)))
    state, moves = Lifecycle.STARTING, []
    for to in wanted:
        if to in MOVES[state]:
            tracker.move_to(to)
            moves.append((state, to))
            state = to
        else:
            with pytest.raises(IllegalMove, match=f"from {state.value} to {to.value}"):
                tracker.move_to(to)
        assert tracker.current_state is state
        assert tracker.has_engine is (state not in WITHOUT_ENGINE)
    assert told == moves
