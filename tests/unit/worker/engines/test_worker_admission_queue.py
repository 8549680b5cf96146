"""The queue in front of every engine: who starts next, and when nobody does."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_worker.engine import EngineRequest
from rollout_worker.engines.admission_queue import AdmissionQueue
from rollout_worker.schemas import SamplingParams


@dataclass
class Waiting:
    request: EngineRequest
    arrival: int
    done: bool = False


def waiting(name: str, arrival: int, priority: int = 0) -> Waiting:
    request = EngineRequest(name, (1,), SamplingParams(), None, priority=priority)
    return Waiting(request, arrival)


class Engine:
    """Runs so many requests at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.started: list[str] = []
        self.queue = AdmissionQueue[Waiting](lambda _: len(self.started) < self.limit, self.start)

    def start(self, request: Waiting) -> None:
        self.started.append(request.request.request_id)


def test_requests_start_by_priority_then_arrival_up_to_the_capacity() -> None:
    engine = Engine(3)
    for arrival, (name, priority) in enumerate([("late", 1), ("b", 0), ("c", 0), ("a", -1)]):
        engine.queue.add_request(waiting(name, arrival, priority))
    engine.queue.admit_requests()
    assert engine.started == ["a", "b", "c"]
    assert [each.request.request_id for each in engine.queue.requests] == ["late"]
    engine.limit = 4
    engine.queue.admit_requests()
    assert engine.started[3:] == ["late"]


def test_a_closed_queue_starts_nothing() -> None:
    engine = Engine(3)
    engine.queue.is_open = False
    engine.queue.add_request(waiting("a", 0))
    engine.queue.admit_requests()
    assert (engine.started, len(engine.queue)) == ([], 1)
    engine.queue.is_open = True
    engine.queue.admit_requests()
    assert engine.started == ["a"]


def test_requests_that_have_ended_are_neither_started_nor_in_the_way() -> None:
    engine = Engine(1)
    gone, next_one = waiting("gone", 0), waiting("next", 1)
    engine.queue.add_request(gone)
    engine.queue.add_request(next_one)
    gone.done = True
    engine.queue.admit_requests()
    assert engine.started == ["next"]


def test_what_has_ended_can_be_removed_at_once() -> None:
    engine = Engine(1)
    requests = [waiting(name, arrival) for arrival, name in enumerate("abc")]
    for each in requests:
        engine.queue.add_request(each)
    requests[0].done = requests[1].done = True
    engine.queue.remove_done()
    assert [each.request.request_id for each in engine.queue.requests] == ["c"]


def test_a_request_that_goes_back_keeps_its_place() -> None:
    engine = Engine(1)
    first = waiting("first", 0)
    engine.queue.add_request(first)
    engine.queue.admit_requests()
    engine.queue.add_request(waiting("second", 1))
    engine.queue.add_request(first)
    engine.limit = 2
    engine.queue.admit_requests()
    assert engine.started == ["first", "first"]
