"""What to call on each head next, and whether its readiness gate changes. Pure.

One answer per head and pass: the first check that finds something to do wins, the others wait for
the next pass. Every call is idempotent, so repeating one costs nothing but time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rollout_common.wire import (
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
from rollout_operator.api.spec import DesiredState, PoolMode, RolloutReplicaSpec
from rollout_operator.core.observed_pool import ObservedPool, is_asleep
from rollout_operator.core.pass_plan import CallBody, CallWorker, ControlVerb, RequeueAfter, SetGate
from rollout_operator.core.replica_heads import UNDOING_VERBS, ReplicaHead, WeightsVersion
from rollout_operator.core.settings import (
    CALL_SLACK_SECONDS,
    QUICK_CALL_SECONDS,
    WEIGHTS_LOAD_SECONDS,
)
from rollout_operator.core.updates.content_hashes import unsupported_by_head
from rollout_operator.core.updates.pushed_copies import awaits_pointer
from rollout_operator.core.updates.weights_plan import WeightsPlan

from .hybrid import unfit_reason

_RESTING_LIFECYCLES = (Lifecycle.PAUSED, Lifecycle.ASLEEP)


class HeadPlanner:
    """Runs the checks for one head, in order."""

    def __init__(
        self,
        spec: RolloutReplicaSpec,
        seen: ObservedPool,
        weights: WeightsPlan,
        now: float,
        wait: RequeueAfter,
    ) -> None:
        self.spec = spec
        self.seen = seen
        self.weights = weights
        self.floor = weights.committed.identity
        self.now = now
        self.wait = wait
        self._any_answers = any(worker.state is not None for worker in seen.workers.values())

    def plan_calls(self, head: ReplicaHead) -> list[CallWorker]:
        """Return what to call on this head now: at most one control call and one stage."""
        state = head.worker.state
        if state is None or not head.worker.is_loaded:
            return []
        checks: tuple[Callable[[ReplicaHead, WorkerState], CallWorker | None], ...] = (
            self._require_floor,
            self._sleep_or_pause,
            self._release_hold,
            self._raise_fence,
            self._discard_conflicting,
            self._commit_staged,
            self._stage_version,
        )
        for check in checks:
            call = check(head, state)
            if call is not None:
                return [call] if self._may_call(head, call) else []
        return []

    def _may_call(self, head: ReplicaHead, call: CallWorker) -> bool:
        """No other call runs on that head, and none that failed still waits for its next try."""
        running, verb = head.worker.running, call.verb
        others = running - {ControlVerb.STAGE} - call.instead_of
        if verb in running or (verb is not ControlVerb.STAGE and others):
            return False
        failure = head.worker.failures.get(verb)
        if failure is None or failure.about != call.about:
            return True
        if failure.retry_in > 0:
            self.wait.at_most(failure.retry_in)
            return False
        return True

    def _require_floor(self, head: ReplicaHead, state: WorkerState) -> CallWorker | None:
        """Set the floor: a fresh process may serve after it, and older weights may not."""
        floor, update = self.floor, self.weights.update
        if update is not None and head.pod.uid in self.weights.out_of_service:
            floor = update.identity
        if state.weights.required is not None and state.weights.required >= floor:
            return self._set_drain_seconds(head, state)
        body = RequireRequest(epoch=floor.epoch, min_version=floor.version)
        return _make_call(head, ControlVerb.REQUIRE, body)

    def _set_drain_seconds(self, head: ReplicaHead, state: WorkerState) -> CallWorker | None:
        """Set how long a worker drains at its end: its environment has the value of its start."""
        drain = self.spec.drain_seconds
        if state.drain_seconds in (None, drain):
            return None
        body = RequireRequest(epoch=state.weights.fence_epoch, drain_seconds=drain)
        return _make_call(head, ControlVerb.REQUIRE, body)

    def _sleep_or_pause(self, head: ReplicaHead, state: WorkerState) -> CallWorker | None:
        """Put to sleep or pause; an update that has begun to commit is finished first."""
        wanted = self.spec.state
        # An update that some head refuses may never finish: the pool pauses while it goes on.
        refused = wanted is DesiredState.PAUSED and self.weights.failures
        if wanted is DesiredState.ACTIVE or (self.weights.is_committing and not refused):
            return None
        mine, undone = _own_hold(state), head.is_leaving(wanted)
        if wanted is DesiredState.ASLEEP:
            if mine is not None and mine.state == "Asleep" and is_asleep(state) and not undone:
                return None
            awake = state.lifecycle is not Lifecycle.ASLEEP
            call = (self._discard_call(head, state) if awake else None) or self._sleep_call(head)
            return replace(call, instead_of=UNDOING_VERBS[wanted])
        if self._replaces_weights_on_wake(head, state) and not self._may_keep_old_weights(head):
            return self._wake_weights(head, state)
        held = None if mine is None else mine.state
        # A worker that sleeps under our Paused does so for the hold of another caller.
        if held == "Paused" and not undone and state.lifecycle in _RESTING_LIFECYCLES:
            return None
        return self._pause_call(head, waking=held == "Asleep")

    def _pause_call(self, head: ReplicaHead, *, waking: bool) -> CallWorker:
        """Pause; our own hold goes from Asleep to Paused without a gap."""
        drain, generation = self.spec.drain_seconds, self._generation(head)
        body = PauseRequest(mode="drain", deadline_seconds=drain, generation=generation)
        extra = WEIGHTS_LOAD_SECONDS if waking else CALL_SLACK_SECONDS
        return _make_call(head, ControlVerb.PAUSE, body, drain + extra)

    def _sleep_call(self, head: ReplicaHead) -> CallWorker:
        drain, level = self.spec.drain_seconds, self.spec.sleep.level
        body = SleepRequest(
            level=level, mode="drain", deadline_seconds=drain, generation=self._generation(head)
        )
        return _make_call(head, ControlVerb.SLEEP, body, drain + WEIGHTS_LOAD_SECONDS)

    def _generation(self, head: ReplicaHead) -> int:
        """The object's generation, or a newer one that the worker has seen.

        An etcd that is restored from a snapshot counts from an older one, which the worker would refuse.
        """
        state = head.worker.state
        return max(self.seen.generation, (state and state.generation) or 0)

    def _replaces_weights_on_wake(self, head: ReplicaHead, state: WorkerState) -> bool:
        """It sleeps, and gets other weights before it serves.

        Then their memory wakes first, without values, and the KV cache after they are committed: the
        worker does not read old weights for nothing, and holds no KV cache while it has two copies.
        """
        mine, version = _own_hold(state), self._wanted_version(head)
        if mine is None or mine.state != "Asleep" or state.held_by_others:
            return False
        return state.wakes_empty and version is not None and self._can_load(head, version)

    def _can_load(self, head: ReplicaHead, version: WeightsVersion) -> bool:
        """Nothing is known to keep it from these weights: what it has may go.

        A trainer that pushed later ones to it, and died, may never move the pointer.
        """
        if _has_failed(head, version) or self._awaits_pointer(head, version):
            return False
        given = head.has_staged(version) or head.pod.uid in self.weights.peers
        return given or not version.is_pushed

    def _may_keep_old_weights(self, head: ReplicaHead) -> bool:
        """It can't take the weights that it is to have, and may pause with those that it had."""
        version = self._wanted_version(head)
        # A pause that failed needed the old weights, and they could not be restored.
        if version is None or ControlVerb.PAUSE in head.worker.failures:
            return False
        return _has_failed(head, version)

    def _wake_weights(self, head: ReplicaHead, state: WorkerState) -> CallWorker | None:
        if state.resident.weights:
            return None
        body = WakeRequest(tags=("weights",), load=False, generation=self._generation(head))
        return _make_call(head, ControlVerb.WAKE, body, WEIGHTS_LOAD_SECONDS)

    def _release_hold(self, head: ReplicaHead, state: WorkerState) -> CallWorker | None:
        """Drop our own hold once the pool is to be active; the holds of other callers stay."""
        mine = _own_hold(state)
        if self.spec.state is not DesiredState.ACTIVE or mine is None:
            return None
        if mine.state == "Asleep":
            if self._replaces_weights_on_wake(head, state):
                return self._wake_weights(head, state)
            wake = WakeRequest(generation=self._generation(head))
            return _make_call(head, ControlVerb.WAKE, wake, WEIGHTS_LOAD_SECONDS)
        body = ReleaseRequest(generation=self._generation(head))
        return _make_call(head, ControlVerb.RESUME, body)

    def _discard_call(self, head: ReplicaHead, state: WorkerState) -> CallWorker | None:
        staged = state.weights.staged
        if staged is None:
            return None
        body = DiscardRequest(epoch=staged.epoch, version=staged.version)
        return _make_call(head, ControlVerb.DISCARD, body)

    def _can_change_weights(self, state: WorkerState) -> bool:
        """Its weights may change: it doesn't sleep, or its weights wake first, to be replaced."""
        if state.lifecycle is not Lifecycle.ASLEEP:
            return True
        return self.spec.state is not DesiredState.ASLEEP and state.resident.weights

    def _wanted_version(self, head: ReplicaHead) -> WeightsVersion | None:
        version = self.weights.version_for.get(head.pod.uid)
        return None if version is None or head.has_at_least(version.identity) else version

    def _discard_conflicting(self, head: ReplicaHead, state: WorkerState) -> CallWorker | None:
        """Discard what is in the staging slot if it is in the way of what the head must load.

        That is something later, other bytes under the same identity (an identity is one content,
        in the whole pool), or something earlier that is still under way.
        """
        version, staged = self._wanted_version(head), state.weights.staged
        held = head.staged_identity
        if version is None or staged is None or held is None:
            return None
        if not self._can_change_weights(state) or self._awaits_pointer(head, version):
            return None
        wanted, pushed = version.identity, staged.source.pushed is not None
        foreign = held == wanted and staged.source != version.source and not pushed
        late = held < wanted and staged.phase == "Staging"
        odd = self._has_staged_wrong_bytes(head, version)
        return self._discard_call(head, state) if held > wanted or foreign or late or odd else None

    def _awaits_pointer(self, head: ReplicaHead, version: WeightsVersion) -> bool:
        seconds = self.spec.weights.deadline_seconds
        return awaits_pointer(self.weights, head, version, seconds, self.wait)

    def _has_staged_wrong_bytes(self, head: ReplicaHead, version: WeightsVersion) -> bool:
        """It has staged other bytes and refused the right hash: the next attempt reads them again."""
        failure = head.worker.failures.get(ControlVerb.STAGE)
        if failure is None or failure.about != version.identity or failure.retry_in > 0:
            return False
        return head.staged_hash(version) is not None and not head.has_staged(version)

    def _raise_fence(self, head: ReplicaHead, state: WorkerState) -> CallWorker | None:
        """Shut the old trainer out by the new one's epoch, before its staged weights are discarded.

        Without the fence it might stage them again.
        """
        epoch = self.weights.fence_epoch
        version = self._wanted_version(head)
        if version is None or version.identity.epoch < epoch or state.weights.fence_epoch >= epoch:
            return None
        return _make_call(head, ControlVerb.REQUIRE, RequireRequest(epoch=epoch))

    def _commit_staged(self, head: ReplicaHead, state: WorkerState) -> CallWorker | None:
        version, staged = self._wanted_version(head), state.weights.staged
        if version is None or staged is None or not self._can_change_weights(state):
            return None
        if head.pod.uid not in self.weights.may_commit or not head.has_staged(version):
            return None
        policy = self.spec.weights.in_flight
        deadline = self.spec.in_flight_deadline_seconds
        # A head below the committed weights runs no requests: it needs no policy that its engine lacks.
        able = head.is_in_service(self.floor) or unsupported_by_head(head, policy) is None
        body = CommitRequest(
            epoch=version.identity.epoch,
            version=version.identity.version,
            root_hash=staged.root_hash,
            in_flight=policy.policy if able else "Abort",
            deadline_seconds=deadline,
            on_deadline=policy.on_deadline if able else "Abort",
        )
        return _make_call(head, ControlVerb.COMMIT, body, deadline + WEIGHTS_LOAD_SECONDS)

    def _stage_version(self, head: ReplicaHead, state: WorkerState) -> CallWorker | None:
        version = self._wanted_version(head)
        if version is None or head.has_staged(version):
            return None
        if not self._can_change_weights(state) or state.lifecycle is Lifecycle.WAKING:
            return None
        slot = state.weights.staged
        if slot is not None and slot.source.pushed is not None and head.is_receiving(version):
            return None  # a trainer is bringing it, even if it lies on a path, too
        peers = self.weights.peers.get(head.pod.uid, ())
        if self._awaits_pointer(head, version) or (version.is_pushed and not peers):
            return None
        body = StageRequest(
            epoch=version.identity.epoch,
            version=version.identity.version,
            source=StageSource.of(version.source),
            root_hash=version.root_hash,
            deadline_seconds=self.spec.weights.deadline_seconds,
        )
        seconds = self.spec.weights.deadline_seconds + CALL_SLACK_SECONDS
        return replace(_make_call(head, ControlVerb.STAGE, body, seconds), peers=peers)

    def plan_gate(self, head: ReplicaHead, leaving: bool) -> SetGate | None:
        """Return the change of the readiness gate, if one is due."""
        pod, state = head.pod, head.worker.state
        if leaving:
            return _close_gate(head, "it is being deleted")
        if head.lost_member is not None:
            return _close_gate(head, f"{head.lost_member.name} of its gang has ended")
        if self.spec.state is not DesiredState.ACTIVE or self.spec.suspend:
            return _close_gate(head, "the pool is not active") or self._mark_proven(head)
        if pod.uid in self.weights.out_of_service:
            return _close_gate(head, "it failed to commit the weights that the others serve")
        if self.spec.mode is PoolMode.HYBRID:
            why = unfit_reason(head, others_answer=self._any_answers)
            if why is not None:
                return _close_gate(head, why)
        if state is None or ControlVerb.COMMIT in head.worker.running:
            return None  # silence proves nothing, and a commit flips no gate
        if not (state.serving and head.has_at_least(self.floor)):
            return _close_gate(head, f"the worker is {state.lifecycle} and not serving")
        if pod.gate and pod.gate_boot == state.boot_id:
            return None
        proven = self.now if pod.proven_since is None else pod.proven_since
        return SetGate(pod.name, pod.uid, True, state.boot_id, "Serving", proven)

    def _mark_proven(self, head: ReplicaHead) -> SetGate | None:
        """Note that a worker has come to rest that has never served."""
        pod, state = head.pod, head.worker.state
        if self.spec.suspend or pod.proven_since is not None:
            return None
        if state is None or state.lifecycle != self.spec.state.value:
            return None
        reason = f"the pool is {state.lifecycle}"
        return SetGate(pod.name, pod.uid, False, state.boot_id, reason, self.now)


def _own_hold(state: WorkerState) -> Hold | None:
    return next((h for h in state.holds if h.holder == state.caller), None)


def _has_failed(head: ReplicaHead, version: WeightsVersion) -> bool:
    verbs = ControlVerb.STAGE, ControlVerb.COMMIT
    return head.failure_message(version.identity, *verbs) is not None


def _make_call(
    head: ReplicaHead, verb: ControlVerb, body: CallBody, seconds: float = QUICK_CALL_SECONDS
) -> CallWorker:
    return CallWorker(head.pod.uid, head.pod.name, verb, body, seconds)


def _close_gate(head: ReplicaHead, reason: str) -> SetGate | None:
    pod = head.pod
    if not pod.gate:
        return None
    return SetGate(pod.name, pod.uid, False, head.boot_id or "", reason, pod.proven_since)
