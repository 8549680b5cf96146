"""The lifecycle and its table of moves; the numbers of a worker's states, and callers that wait for the next one."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_common.wire import Lifecycle, WorkerState
from rollout_worker.core import worker_runtime
from rollout_worker.core.lifecycle_states import (
    MOVES,
    WITHOUT_ENGINE,
    IllegalMove,
    LifecycleTracker,
)
from rollout_worker.core.worker_runtime import MAX_WAITING, ChangeNotifier, StateSequence
from rollout_worker.schemas import Hold
from tests.support.unit.simworker import SimWorker


@given(st.lists(st.sampled_from(list(Lifecycle)), max_size=40))
def test_the_tracker_follows_the_table_and_nothing_else(wanted: list[Lifecycle]) -> None:
    """What the table says is compared with docs/architecture-worker.md."""
    assert {Lifecycle.STARTING, Lifecycle.LOADING, Lifecycle.FAILED} == WITHOUT_ENGINE
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


class Watched:
    """A state that a test changes."""

    def __init__(self) -> None:
        self.sim = SimWorker(boot="b", loading=False)
        self.changes: dict[str, object] = {}
        self.changed = ChangeNotifier()
        self.ending = False
        self.looks = 0
        self.states = StateSequence(self.look, self.changed, lambda: self.ending)

    def look(self) -> WorkerState:
        self.looks += 1
        return self.states.number_state(self.sim.state().model_copy(update=self.changes))

    def change(self, **fields: object) -> None:
        self.changes |= fields
        self.changed.notify_all()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(worker_runtime, "STATE_PACE_SECONDS", 0.001)
    return Watched()


def hold(ttl: float) -> tuple[Hold, ...]:
    return (Hold(holder="trainer", state="Paused", ttl=ttl),)


def test_only_a_change_that_matters_has_a_new_number(watched: Watched) -> None:
    first = watched.look().seq
    for harmless in ({"in_flight": 3}, {"queued": 5}, {"caller": "trainer"}):
        watched.change(**harmless)
        found = watched.look()
        assert found.seq == first
        [(name, value)] = harmless.items()
        assert getattr(found, name) == value, "it is shown all the same"
    watched.change(holds=hold(300))
    second = watched.look().seq
    watched.change(holds=hold(299))
    assert (second, watched.look().seq) == (first + 1, first + 1)
    watched.change(last_error="it broke")
    assert watched.look().seq == first + 2
    watched.change(last_error=None)
    assert watched.look().seq == first + 3, "what came back is news, too"


async def test_a_wait_ends_with_a_change_the_time_the_process_or_another_number(
    watched: Watched,
) -> None:
    seq = watched.look().seq
    began = time.monotonic()
    await watched.states.wait_past(seq, 0.02)
    assert time.monotonic() - began >= 0.02
    await asyncio.wait_for(watched.states.wait_past(seq + 7, 60), 5)
    waiting = asyncio.create_task(watched.states.wait_past(seq, 60))
    watched.change(in_flight=1)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    watched.change(restarts=1)
    await asyncio.wait_for(waiting, 5)
    seq = watched.look().seq
    waiting = asyncio.create_task(watched.states.wait_past(seq, 60))
    await asyncio.sleep(0)
    watched.ending = True
    watched.changed.notify_all()
    await asyncio.wait_for(waiting, 5)


async def test_more_callers_than_may_wait_are_answered_at_once(watched: Watched) -> None:
    seq = watched.look().seq
    waiting = [asyncio.create_task(watched.states.wait_past(seq, 60)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    await asyncio.wait_for(watched.states.wait_past(seq, 60), 5)
    watched.change(restarts=1)
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    waiting = [asyncio.create_task(watched.states.wait_past(2, 60))]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait(waiting)
    assert watched.states._waiting == 0


async def test_a_thousand_changes_cost_few_looks(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_runtime, "STATE_PACE_SECONDS", 0.02)
    seq = watched.look().seq
    waiting = asyncio.create_task(watched.states.wait_past(seq, 0.1))
    while not waiting.done():
        watched.change(in_flight=watched.looks)
        await asyncio.sleep(0)
    assert watched.looks <= 10
