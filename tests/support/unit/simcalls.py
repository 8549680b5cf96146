"""Calls to simulated workers: under way, hanging, failed, or without anybody who waits for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rollout_operator.core.observed_pool import FailedCall, ObservedWorker, Pod
from rollout_operator.core.pass_plan import CallWorker, ControlVerb
from rollout_worker.schemas import StageRequest, WorkerState
from tests.support.unit.poolspecs import NOW
from tests.support.unit.simworker import SimWorker


@dataclass
class Flight:
    """A call under way; after a restart of the operator the worker goes on, and nobody waits."""

    call: CallWorker
    due: float
    ours: bool = True


class SimCalls:
    """Workers by the uid of their pod, and the calls to them; a part of `World`."""

    def __init__(self) -> None:
        self.tick = NOW
        """Seconds as they pass, for everybody but the operator's wall clock."""
        self.skew = 0.0
        """How wrong that one is."""
        self.silent_error = "no answer within 3 s"
        """What a poll of a silent worker ends with."""
        self.workers: dict[str, SimWorker] = {}
        self.failures: dict[tuple[str, str], FailedCall] = {}
        """By pod uid and verb; `retry_in` is kept as the moment when it is over."""
        self.flights: dict[tuple[str, str], Flight] = {}
        self.log: list[str] = []
        self.frozen: set[str] = set()
        """Verbs whose calls never end."""
        self.answers: dict[str, WorkerState] = {}
        """The last answer of each worker to this operator, by pod uid."""
        self.hung: set[tuple[str, str]] = set()
        """Calls under way of such verbs, by pod uid."""
        self.backoff = 1.0
        """Seconds until a failed call may be repeated."""
        self.seconds_of: dict[ControlVerb, float] = {}
        """How long calls take; the others end at once."""

    @property
    def now(self) -> float:
        """What the operator's wall clock says."""
        return self.tick + self.skew

    def let_workers(self, **fields: Any) -> None:
        """Let all workers there are be so."""
        for worker in self.workers.values():
            for name, value in fields.items():
                setattr(worker, name, value)

    def known(self, pod: Pod) -> ObservedWorker:
        """What the operator knows of a head."""
        worker = self.workers[pod.uid]
        slot = worker.staged and (worker.staged.epoch, worker.staged.version, worker.staged.phase)
        if slot != worker.slot_seen:
            worker.slot_seen, worker.slot_since = slot, self.tick
        slot_seconds = self.tick - worker.slot_since if slot else 0.0
        failures = {
            v: replace(e, retry_in=e.retry_in - self.tick)
            for (uid, v), e in self.failures.items()
            if uid == pod.uid
        }
        running = {v for uid, v in self.hung if uid == pod.uid and v in self.frozen}
        running |= {v for (uid, v), f in self.flights.items() if uid == pod.uid and f.ours}
        if worker.unasked or worker.silent:
            error = None if worker.unasked else self.silent_error
            last = self.answers.get(pod.uid)
            since = None
            if error is not None:
                since = worker.silent_since = worker.silent_since or self.tick
            return ObservedWorker(
                None, error, frozenset(running), failures, last, slot_seconds,
                since, self.tick - (since or self.tick),
            )  # fmt: skip
        worker.silent_since = None
        state = self.answers[pod.uid] = worker.state()
        return ObservedWorker(state, None, frozenset(running), failures, slot_seconds=slot_seconds)

    def call(self, call: CallWorker) -> None:
        self.log.append(f"{call.verb} {call.pod}")
        slot = (call.uid, call.verb.value)
        for verb in call.instead_of:
            self._give_up((call.uid, verb.value))
        worker = self.workers.get(call.uid)
        if worker is None or call.verb in self.frozen:
            self.hung.add(slot)
            return
        self.hung.discard(slot)
        if problem := self._fetched(call):
            self._ended(call, problem)
            return
        if call.verb is ControlVerb.STAGE and (problem := worker.begin_stage(call.body)):  # type: ignore[arg-type]
            self._ended(call, problem)
            return
        flight = Flight(call, self.tick + self.seconds_of.get(call.verb, 0.0))
        if flight.due > self.tick:
            self.flights[slot] = flight
        else:
            self.end(flight)

    def _give_up(self, slot: tuple[str, str]) -> None:
        """Wait no longer for a call; the worker has done what it was asked before it is asked another thing."""
        self.hung.discard(slot)
        if (flight := self.flights.pop(slot, None)) is not None:
            self.end(replace(flight, ours=False))

    def end(self, flight: Flight) -> None:
        """A call does what it does, and its failure is remembered."""
        worker, call = self.workers[flight.call.uid], flight.call
        problem: str | None = None
        match call.verb:
            case ControlVerb.STAGE:
                problem = self._fetched(call) or worker.end_stage(call.body)  # type: ignore[arg-type]
            case ControlVerb.COMMIT:
                problem = worker.commit(call.body)  # type: ignore[arg-type]
            case ControlVerb.REQUIRE:
                worker.require(call.body)  # type: ignore[arg-type]
            case ControlVerb.DISCARD:
                worker.discard(call.body)  # type: ignore[arg-type]
            case ControlVerb.PAUSE:
                worker.pause()
            case ControlVerb.SLEEP:
                worker.sleep()
            case ControlVerb.RESUME:
                worker.resume()
            case ControlVerb.WAKE:
                problem = worker.wake(call.body)  # type: ignore[arg-type]
        if flight.ours:
            self._ended(call, problem)

    def _fetched(self, call: CallWorker) -> str | None:
        """Pushed weights come from a peer that keeps them to the end; else the slot fails."""
        if not isinstance(call.body, StageRequest) or call.body.source.pushed is None:
            return None
        wanted = (call.body.epoch, call.body.version)
        for peer in self._at(call.peers):
            if peer.kept and not peer.silent and (peer.kept.epoch, peer.kept.version) == wanted:
                return None
        slot = self.workers[call.uid].staged
        if slot is not None and slot.phase == "Staging" and (slot.epoch, slot.version) == wanted:
            failed = {"phase": "Failed", "error": "every peer failed"}
            self.workers[call.uid].staged = slot.model_copy(update=failed)
        return "no-copy: no replica gives it"

    def _at(self, addresses: tuple[str, ...]) -> list[SimWorker]:
        """The workers at these addresses."""
        raise NotImplementedError

    def _ended(self, call: CallWorker, problem: str | None) -> None:
        slot = (call.uid, call.verb.value)
        before = self.failures.pop(slot, None)
        if problem is not None:
            count = before.count + 1 if before and before.about == call.about else 1
            self.failures[slot] = FailedCall(
                problem, count, self.tick + self.backoff, problem.partition(":")[0], call.about
            )
