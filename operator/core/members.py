"""What to call on each head next; whole, as calls exclude each other. Pure.

One answer per head and pass: the first check that finds something to do wins, the others wait for
the next pass. Every call is idempotent, so repeating one costs nothing but time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rollout_operator.api.spec import Mode, RolloutReplicaSpec, State
from rollout_worker.schemas import (
    CommitRequest,
    DiscardRequest,
    Hold,
    Lifecycle,
    PauseRequest,
    ReleaseRequest,
    RequireRequest,
    SleepRequest,
    StageRequest,
    StageSource,
    WakeRequest,
    WorkerState,
)

from .gates import gate_change
from .heads import Head, Version
from .hybrid import unfit
from .plan import Body, CallWorker, SetGate, Verb, Wait
from .updates.content import unsupported_by
from .updates.copies import awaits_pointer
from .updates.weights_plan import WeightsPlan
from .world import Observed, is_asleep

SLACK_SECONDS = 15.0
"""What a call may take beyond the time that the worker itself is given."""

QUICK_SECONDS = 10.0
LOAD_SECONDS = 600.0
"""Longest wait for weights to come back from where they sleep."""

AWAKENING = frozenset({Verb.WAKE, Verb.PAUSE, Verb.RESUME})
"""Calls that may wait for a device which somebody else has, maybe whoever wants the pool asleep."""


class MemberPlanner:
    """Runs the checks for one head, in order."""

    def __init__(
        self, spec: RolloutReplicaSpec, seen: Observed, weights: WeightsPlan, now: float, wait: Wait
    ) -> None:
        self.spec = spec
        self.seen = seen
        self.weights = weights
        self.floor = weights.committed.identity
        self.now = now
        self.wait = wait
        heard = {uid: each for uid, each in seen.workers.items() if each.state is not None}
        self._heard = replace(seen, workers=heard)
        """The world without workers that are silent: `unfit` looks there for each head."""

    def calls(self, head: Head) -> list[CallWorker]:
        """Return what to call on this head now: at most one control call and one stage."""
        state = head.worker.state
        if state is None or not head.worker.loaded:
            return []
        checks: tuple[Callable[[Head, WorkerState], CallWorker | None], ...] = (
            self._require,
            self._sleep_or_pause,
            self._unpause,
            self._fence,
            self._drop_staged,
            self._commit,
            self._stage,
        )
        for check in checks:
            call = check(head, state)
            if call is not None:
                return [call] if self._may(head, call) else []
        return []

    def _may(self, head: Head, call: CallWorker) -> bool:
        """Not while another call runs on that head, nor before a failed one is due again."""
        running, verb = head.worker.running, call.verb
        others = running - {Verb.STAGE} - call.instead_of
        if verb in running or (verb is not Verb.STAGE and others):
            return False
        failure = head.worker.failures.get(verb)
        if failure is None or failure.about != call.about:
            return True
        if failure.retry_in > 0:
            self.wait.at_most(failure.retry_in)
            return False
        return True

    def _call(
        self, head: Head, verb: Verb, body: Body, seconds: float = QUICK_SECONDS
    ) -> CallWorker:
        return CallWorker(head.pod.uid, head.pod.name, verb, body, seconds)

    def _require(self, head: Head, state: WorkerState) -> CallWorker | None:
        """Set the floor: it lifts the fence of a fresh process and shuts out older weights."""
        floor, update = self.floor, self.weights.update
        if update is not None and head.pod.uid in self.weights.out_of_service:
            floor = update.identity
        if state.weights.required is not None and state.weights.required >= floor:
            return self._tell_drain(head, state)
        body = RequireRequest(epoch=floor.epoch, min_version=floor.version)
        return self._call(head, Verb.REQUIRE, body)

    def _tell_drain(self, head: Head, state: WorkerState) -> CallWorker | None:
        """Tell a worker how long to drain at its end: its environment has what was so at its start."""
        drain = self.spec.drain_seconds
        if state.drain_seconds in (None, drain):
            return None
        body = RequireRequest(epoch=state.weights.fence_epoch, drain_seconds=drain)
        return self._call(head, Verb.REQUIRE, body)

    def _my_hold(self, state: WorkerState) -> Hold | None:
        return next((h for h in state.holds if h.holder == state.caller), None)

    def _sleep_or_pause(self, head: Head, state: WorkerState) -> CallWorker | None:
        """Put to sleep or pause; an update that has begun to commit is finished first."""
        wanted = self.spec.state
        # One that some head refuses may never be finished, and goes on while the pool is paused.
        first = self.weights.committing and not (wanted is State.PAUSED and self.weights.failures)
        if wanted is State.ACTIVE or first:
            return None
        mine = self._my_hold(state)
        if wanted is State.ASLEEP:
            if mine is not None and mine.state == "Asleep" and is_asleep(state):
                return None
            awake = state.lifecycle is not Lifecycle.ASLEEP
            call = (self._discard(head, state) if awake else None) or self._sleep(head)
            return replace(call, instead_of=AWAKENING)
        if self._replaces(head, state) and not self._settles_for_less(head):
            return self._wake_weights(head, state)
        held = None if mine is None else mine.state
        # Asleep under our Paused: somebody else's hold keeps it there.
        if held == "Paused" and state.lifecycle in (Lifecycle.PAUSED, Lifecycle.ASLEEP):
            return None
        return self._pause(head, waking=held == "Asleep")

    def _pause(self, head: Head, *, waking: bool) -> CallWorker:
        """Pause; our own hold goes from Asleep to Paused without a gap."""
        body = PauseRequest(
            mode="drain",
            deadline_seconds=self.spec.drain_seconds,
            generation=self.seen.generation,
        )
        extra = LOAD_SECONDS if waking else SLACK_SECONDS
        return self._call(head, Verb.PAUSE, body, self.spec.drain_seconds + extra)

    def _sleep(self, head: Head) -> CallWorker:
        body = SleepRequest(
            level=self.spec.sleep.level,
            mode="drain",
            deadline_seconds=self.spec.drain_seconds,
            generation=self.seen.generation,
        )
        seconds = self.spec.drain_seconds + LOAD_SECONDS
        return self._call(head, Verb.SLEEP, body, seconds)

    def _wake(self, head: Head) -> CallWorker:
        body = WakeRequest(generation=self.seen.generation)
        return self._call(head, Verb.WAKE, body, LOAD_SECONDS)

    def _replaces(self, head: Head, state: WorkerState) -> bool:
        """It sleeps, and gets other weights before it serves.

        Then their memory wakes first, without values, and the KV cache once they are committed: what
        it had is not read for nothing, and no KV cache is there beside two copies of weights.
        """
        mine, version = self._my_hold(state), self._wanted(head)
        if mine is None or mine.state != "Asleep" or state.held_by_others:
            return False
        return state.wakes_empty and version is not None and self._can_have(head, version)

    def _can_have(self, head: Head, version: Version) -> bool:
        """Nothing is known to keep it from these weights: what it has may go."""
        if head.failure(version.identity, Verb.STAGE, Verb.COMMIT) is not None:
            return False
        given = head.has_staged(version) or head.pod.uid in self.weights.peers
        return given or not version.pushed

    def _settles_for_less(self, head: Head) -> bool:
        """It can't take the weights that it is to have, and may pause with those that it had."""
        version = self._wanted(head)
        if version is None or Verb.PAUSE in head.worker.failures:  # those can't be had, either
            return False
        return head.failure(version.identity, Verb.STAGE, Verb.COMMIT) is not None

    def _wake_weights(self, head: Head, state: WorkerState) -> CallWorker | None:
        if state.resident.weights:
            return None
        body = WakeRequest(tags=("weights",), load=False, generation=self.seen.generation)
        return self._call(head, Verb.WAKE, body, LOAD_SECONDS)

    def _unpause(self, head: Head, state: WorkerState) -> CallWorker | None:
        """Drop our own hold once the pool is to be active; others' holds are theirs."""
        mine = self._my_hold(state)
        if self.spec.state is not State.ACTIVE or mine is None:
            return None
        if mine.state == "Asleep":
            replaces = self._replaces(head, state)
            return self._wake_weights(head, state) if replaces else self._wake(head)
        return self._call(head, Verb.RESUME, ReleaseRequest(generation=self.seen.generation))

    def _discard(self, head: Head, state: WorkerState) -> CallWorker | None:
        staged = state.weights.staged
        if staged is None:
            return None
        body = DiscardRequest(epoch=staged.epoch, version=staged.version)
        return self._call(head, Verb.DISCARD, body)

    def _awake(self, state: WorkerState) -> bool:
        """Its weights may change: it doesn't sleep, or its weights wake first, to be replaced."""
        if state.lifecycle is not Lifecycle.ASLEEP:
            return True
        return self.spec.state is not State.ASLEEP and state.resident.weights

    def _wanted(self, head: Head) -> Version | None:
        version = self.weights.version_for.get(head.pod.uid)
        return None if version is None or head.at_least(version.identity) else version

    def _drop_staged(self, head: Head, state: WorkerState) -> CallWorker | None:
        """Discard what is in the staging slot if it is in the way of what the head must load.

        That is something later, other bytes under the same identity (an identity is one content,
        in the whole pool), or something earlier that is still under way.
        """
        version, staged = self._wanted(head), state.weights.staged
        if version is None or staged is None or not self._awake(state):
            return None
        if self._awaits_pointer(head, version):
            return None
        held, wanted = (staged.epoch, staged.version), version.identity.as_tuple()
        pushed = staged.source.pushed is not None
        foreign = held == wanted and staged.source != version.source and not pushed
        late = held < wanted and staged.phase == "Staging"
        odd = self._is_odd(head, version)
        return self._discard(head, state) if held > wanted or foreign or late or odd else None

    def _awaits_pointer(self, head: Head, version: Version) -> bool:
        seconds = self.spec.weights.deadline_seconds
        return awaits_pointer(self.weights, head, version, seconds, self.wait)

    def _is_odd(self, head: Head, version: Version) -> bool:
        """It has staged other bytes and refused the right hash: the next attempt reads them anew."""
        failure = head.worker.failures.get(Verb.STAGE)
        told = failure is not None and failure.about == version.identity
        due = failure is not None and failure.retry_in <= 0
        other = head.staged_hash(version) is not None and not head.has_staged(version)
        return other and told and due

    def _fence(self, head: Head, state: WorkerState) -> CallWorker | None:
        """Shut the old trainer out by the new one's epoch, before its staged weights are dropped.

        Until then it may stage again what was dropped.
        """
        epoch = self.weights.fence_epoch
        version = self._wanted(head)
        if version is None or version.identity.epoch < epoch or state.weights.fence_epoch >= epoch:
            return None
        return self._call(head, Verb.REQUIRE, RequireRequest(epoch=epoch))

    def _commit(self, head: Head, state: WorkerState) -> CallWorker | None:
        version, staged = self._wanted(head), state.weights.staged
        if version is None or staged is None or not self._awake(state):
            return None
        if head.pod.uid not in self.weights.may_commit or not head.has_staged(version):
            return None
        policy = self.spec.weights.in_flight
        deadline = self.spec.in_flight_deadline_seconds
        # Nothing may run below the committed weights: a policy that the engine lacks is not needed.
        able = head.in_service(self.floor) or unsupported_by(head, policy) is None
        body = CommitRequest(
            epoch=version.identity.epoch,
            version=version.identity.version,
            root_hash=staged.root_hash,
            in_flight=policy.policy if able else "Abort",
            deadline_seconds=deadline,
            on_deadline=policy.on_deadline if able else "Abort",
        )
        return self._call(head, Verb.COMMIT, body, deadline + LOAD_SECONDS)

    def _stage(self, head: Head, state: WorkerState) -> CallWorker | None:
        version = self._wanted(head)
        if version is None or head.has_staged(version):
            return None
        if not self._awake(state) or state.lifecycle is Lifecycle.WAKING:
            return None
        slot = state.weights.staged
        if slot is not None and slot.source.pushed is not None and head.receives(version):
            return None  # a trainer is bringing it, wherever else it may lie
        peers = self.weights.peers.get(head.pod.uid, ())
        if self._awaits_pointer(head, version) or (version.pushed and not peers):
            return None
        body = StageRequest(
            epoch=version.identity.epoch,
            version=version.identity.version,
            source=StageSource.of(version.source),
            root_hash=version.root_hash,
            deadline_seconds=self.spec.weights.deadline_seconds,
        )
        seconds = self.spec.weights.deadline_seconds + SLACK_SECONDS
        return replace(self._call(head, Verb.STAGE, body, seconds), peers=peers)

    def gate(self, head: Head, leaving: bool) -> SetGate | None:
        """Return the change of the readiness gate, if one is due."""
        why = unfit(head, self._heard) if self.spec.mode is Mode.HYBRID else None
        return gate_change(self.spec, self.weights, head, self.now, leaving=leaving, unfit=why)
