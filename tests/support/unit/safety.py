"""What must hold of every single pass, whatever the world is like; `World.step` asserts it; one list.

Each check takes what the pass saw, the plan that came of it, and what was really there.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout_operator.api.revision import is_current_revision
from rollout_operator.api.spec import DesiredState, PoolMode, RolloutReplicaSpec, WeightsStrategy
from rollout_operator.api.status import CommittedWeights, RolloutReplicaStatus, UpdatePhase
from rollout_operator.core.observed_pool import ObservedPool, Pod
from rollout_operator.core.pass_plan import CallWorker, ControlVerb, PassPlan
from rollout_operator.core.placement import PlacementPlanner
from rollout_worker.schemas import (
    CommitRequest,
    DiscardRequest,
    StageRequest,
    WakeRequest,
    WeightsId,
    WorkerState,
)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass.

    Attributes:
        stored: the status that was read.
        terminating: uids of pods that are really on their way out, seen or not.
    """

    spec: RolloutReplicaSpec
    seen: ObservedPool
    stored: RolloutReplicaStatus
    plan: PassPlan
    terminating: frozenset[str]

    @property
    def ours(self) -> dict[str, Pod]:
        """Pods of ours that were seen, by uid; a Hybrid pool's are the trainer's."""
        theirs = self.spec.mode is PoolMode.HYBRID
        return {p.uid: p for p in self.seen.pods if p.owned or theirs}

    @property
    def committed(self) -> WeightsId:
        """The floor that this pass leaves."""
        assert self.plan.status.weights.committed is not None
        return self.plan.status.weights.committed.identity

    def state(self, uid: str) -> WorkerState | None:
        """What the worker of a pod said; nothing counts of whose gang has ended."""
        worker = self.seen.workers.get(uid)
        return worker.state if worker and not self.lost(self.ours.get(uid)) else None

    def lost(self, head: Pod | None) -> bool:
        """Another rank of this head's gang has ended."""
        return head is not None and any(
            p.is_finished and not p.is_deleting
            for p in self.ours.values()
            if p.replica == head.replica and p.rank > 0
        )

    def running(self, uid: str) -> frozenset[str]:
        """Names of the calls in flight to a pod."""
        worker = self.seen.workers.get(uid)
        return worker.running if worker else frozenset()


def check(one: Pass) -> None:
    """Assert everything below."""
    _committed_never_falls(one)
    _deletes(one)
    _creates(one)
    _chooses_its_replicas(one)
    _gates(one)
    _calls(one)
    _commits(one)
    _barrier(one)
    _pushed_bytes(one)
    _commits_nothing_unseen(one)
    _stays_in_service(one)
    _rolls_within_its_budget(one)
    _keeps_its_places(one)
    _leaves_the_trainer_alone(one)


def _leaves_the_trainer_alone(one: Pass) -> None:
    """No pod is made, looked for, deleted or replaced in a Hybrid pool."""
    if one.spec.mode is not PoolMode.HYBRID:
        return
    plan = one.plan
    assert not any((plan.create, plan.delete, plan.seek, plan.restarts))
    assert not plan.status.replacing
    for pod in one.seen.pods:
        assert not pod.owned


def _keeps_its_places(one: Pass) -> None:
    """No two pods have one device, none is made for a claim that goes, none removed by force."""
    pods = {p.uid: p for p in (*one.seen.pods, *one.seen.predecessors)}
    for deletion in one.plan.delete:
        pod = pods[deletion.uid]
        assert not pod.colocated or deletion.grace != 0, "its engine may have the devices still"
    for index in one.plan.restarts:
        assert any(p.is_finished for p in one.ours.values() if p.replica == index), (
            "it has not failed"
        )
    if one.spec.colocation is None:
        return
    held = [d for p in pods.values() if p.taken and not p.is_finished for d in p.taken.devices]
    for made in one.plan.create:
        assert made.place is not None, "a colocated pod without a place"
        claim = (one.seen.trainers.claims or {})[made.place.claim]
        assert claim.allocated
        assert not claim.deleting
        assert {d.name for d in claim.devices} >= set(made.place.devices)
        held += made.place.devices
    assert len(held) == len(set(held)), "two pods have one device"


def _committed_never_falls(one: Pass) -> None:
    before = one.stored.weights.committed
    assert before is None or one.committed >= before.identity
    update = one.plan.status.weights.last_update
    if before is not None and one.committed > before.identity:
        assert update is not None
        assert update.identity == one.committed
        assert update.phase in (UpdatePhase.COMPLETE, UpdatePhase.SUPERSEDED)


def _deletes(one: Pass) -> None:
    off = {g.uid for g in one.plan.gates if not g.serving}
    for deletion in one.plan.delete:
        old = {p.uid: p for p in one.seen.predecessors}
        pod = one.ours.get(deletion.uid) or old.get(deletion.uid)
        assert pod is not None, f"{deletion.name} is not ours, or another uid"
        assert pod.name == deletion.name
        assert pod.is_deleting == deletion.forced
        if pod.is_deleting:
            assert deletion.grace == 0, "it is going already; only force helps"
            continue
        assert not pod.gate or pod.uid in off, f"{pod.name} is deleted with its gate on"
        _members_go_last(one, pod)


def _members_go_last(one: Pass, pod: Pod) -> None:
    """No member of a whole gang is deleted while its head drains."""
    ranks = [p for p in one.ours.values() if p.replica == pod.replica]
    head = next((p for p in ranks if p.rank == 0 and not p.is_finished), None)
    members = [p for p in ranks if p.rank > 0 and not p.is_deleting and not p.is_finished]
    whole = len(members) == one.spec.parallelism.nodes - 1
    assert pod.rank == 0 or head is None or not whole, f"{pod.name} goes before its head"


def _creates(one: Pass) -> None:
    there = {(p.replica, p.rank) for p in (*one.seen.pods, *one.seen.predecessors)}
    made = [(c.replica, c.rank) for c in one.plan.create]
    assert len(made) == len(set(made))
    for replica, rank in made:
        assert (replica, rank) not in there, "that pod is there already"
        assert not one.spec.suspend
        assert replica in one.plan.replicas
        assert rank < one.spec.parallelism.nodes


def _chooses_its_replicas(one: Pass) -> None:
    """As many as spec wants and a surge allows; a scale-down takes neither the only copy nor a busier one."""
    wanted = 0 if one.spec.suspend else one.spec.replicas
    # For the only copy of pushed weights one is added, also where no surge is allowed.
    was_added = any(p.is_surge for p in one.ours.values())
    surge = max(one.spec.update_strategy.max_surge, bool(one.seen.cordoned) or was_added)
    assert wanted <= len(one.plan.replicas) <= wanted + (wanted and surge)
    leaving = {d.uid for d in one.plan.delete}
    heads = [p for p in one.ours.values() if p.rank == 0 and not p.is_deleting and _works(one, p)]
    surplus = [p for p in heads if p.replica not in one.plan.replicas and not p.is_surge]
    stay = [p for p in heads if p.replica in one.plan.replicas and not p.is_surge]
    if one.spec.mode is not PoolMode.STANDALONE or not wanted:
        return
    committed = one.stored.weights.committed
    assert committed is None or not (
        {p.replica for p in surplus if p.uid in leaving and _keeps_copy(one, p, committed)}
        and not any(_keeps_copy(one, p, committed) for p in heads if p.uid not in leaving)
    ), "the scale-down takes the only copy"
    for gone in surplus:
        for kept in stay:
            assert _load(one, kept) >= _load(one, gone) or (
                committed is not None and _keeps_copy(one, kept, committed)
            ), f"{gone.name} has more to do than {kept.name}"


def _keeps_copy(one: Pass, head: Pod, committed: CommittedWeights) -> bool:
    state = one.state(head.uid)
    kept = state.weights.kept if state else None
    return kept is not None and (kept.epoch, kept.version) == committed.identity.as_tuple()


def _load(one: Pass, head: Pod) -> int:
    worker = one.seen.workers.get(head.uid)
    last = worker.last if worker else None
    return 0 if last is None else last.in_flight + last.queued


def _gates(one: Pass) -> None:
    gates = {uid: (p.gate, p.gate_boot) for uid, p in one.ours.items() if p.rank == 0}
    for change in one.plan.gates:
        assert change.uid in gates, f"{change.name} is no head of ours"
        assert one.ours[change.uid].name == change.name
        gates[change.uid] = (change.serving, change.boot)
    for uid, (on, boot) in gates.items():
        pod, state = one.ours[uid], one.state(uid)
        leaves = pod.is_deleting or pod.is_finished
        assert not on or leaves or not one.lost(pod), f"{pod.name} has its gate on, its gang ended"
        if not on or pod.is_deleting or pod.is_finished or state is None:
            continue
        assert one.spec.state is DesiredState.ACTIVE, (
            f"{pod.name} has its gate on in a pool at rest"
        )
        assert not one.spec.suspend
        if ControlVerb.COMMIT not in one.running(uid):
            assert state.serving, f"{pod.name} does not serve and has its gate on"
            assert state.boot_id == boot, f"the gate of {pod.name} speaks of another process"
        assert state.weights.active is not None
        assert state.weights.active.identity >= one.committed, f"{pod.name} is below committed"


def _calls(one: Pass) -> None:
    leaving = {d.uid for d in one.plan.delete}
    for call in one.plan.calls:
        pod = one.ours.get(call.uid)
        assert pod is not None, f"{call.pod} is not ours"
        assert pod.name == call.pod
        assert pod.rank == 0
        assert not pod.is_deleting
        assert pod.uid not in leaving
        assert one.state(call.uid) is not None, f"{call.pod} has never answered"
        busy = one.running(call.uid)
        assert call.verb not in busy
        assert call.verb is ControlVerb.STAGE or not busy - {ControlVerb.STAGE} - call.instead_of, (
            "one at a time"
        )
        assert not call.instead_of or one.spec.state is DesiredState.ASLEEP, (
            "only sleep is that urgent"
        )
        state = one.state(call.uid)
        newest = max(one.seen.generation, (state and state.generation) or 0)
        assert getattr(call.body, "generation", newest) == newest
        _only_our_hold(one, call)
    told = [call.uid for call in one.plan.calls]
    assert len(told) == len(set(told)), "one answer per head and pass"


def _only_our_hold(one: Pass, call: CallWorker) -> None:
    if call.verb not in (ControlVerb.RESUME, ControlVerb.WAKE):
        return
    state = one.state(call.uid)
    assert state is not None
    assert any(h.holder == state.caller for h in state.holds), "there is no hold of ours to drop"
    empty = isinstance(call.body, WakeRequest) and call.body.load is False
    assert one.spec.state is DesiredState.ACTIVE or (
        empty and one.spec.state is DesiredState.PAUSED
    )
    if (
        call.verb is ControlVerb.WAKE
        and not empty
        and state.wakes_empty
        and not state.held_by_others
    ):
        active, committed = state.weights.active, one.plan.status.weights.committed
        if (committed and committed.source.pushed) or one.seen.workers[call.uid].failures:
            return  # what it is to have can't be had now: it keeps what it has
        staged = state.weights.staged
        if staged and committed and (staged.epoch, staged.version) > committed.identity.as_tuple():
            return  # a trainer pushed these while it slept, and may never move the pointer
        if any(w.state is None and w.error is None for w in one.seen.workers.values()):
            return  # one has yet to be asked, and until then nothing is decided about weights
        assert active is not None, "what it had is read though it is to have other weights"
        assert committed is None or active.identity >= committed.identity, "read to be replaced"


def _commits(one: Pass) -> None:
    before, after = one.stored.weights.last_update, one.plan.status.weights.last_update
    busy = 0
    for call in one.plan.calls:
        state = one.state(call.uid)
        assert state is not None
        if isinstance(call.body, StageRequest):
            _stages_the_known_bytes(one, call.body)
        if not isinstance(call.body, CommitRequest):
            continue
        identity = WeightsId(epoch=call.body.epoch, version=call.body.version)
        staged = state.weights.staged
        assert staged is not None
        assert not _is_there(state, identity), "never rolled back, nor committed again"
        assert (staged.epoch, staged.version) == identity.as_tuple()
        assert call.body.root_hash == staged.root_hash is not None, "commits name their bytes"
        decided = (
            before is not None
            and before.phase in (UpdatePhase.COMMITTING, UpdatePhase.FAILED)
            and before.commit_started_at is not None
            and before.identity == identity
            and after is not None
            and after.root_hash == call.body.root_hash  # status is written before any call
        ) or any(_active(one, uid) == identity for uid in one.ours)  # there is no way back
        assert decided or identity <= one.committed, "not decided, or not persisted"
        busy += state.serving and one.ours[call.uid].gate
    busy += sum(_commits_while_it_serves(one, uid) for uid in one.ours)
    if one.spec.weights.strategy is WeightsStrategy.ROLLING and busy:
        assert busy <= one.spec.weights.max_unavailable, "too many commit at once"


def _commits_while_it_serves(one: Pass, uid: str) -> bool:
    """It commits in service: a joiner, and a pod that is being deleted, are in none."""
    state, pod = one.state(uid), one.ours[uid]
    in_service = state is not None and state.serving and pod.gate and not pod.is_deleting
    return in_service and ControlVerb.COMMIT in one.running(uid)


def _stages_the_known_bytes(one: Pass, body: StageRequest) -> None:
    known = one.stored.weights.committed
    if (
        known is not None
        and known.root_hash
        and (body.epoch, body.version)
        == (
            known.epoch,
            known.version,
        )
    ):
        update = one.plan.status.weights.last_update
        running = update is not None and update.identity == known.identity
        assert body.root_hash == known.root_hash or (
            running and update is not None and update.phase is not UpdatePhase.COMPLETE
        ), "late stagers get the hash that all serve"


def _barrier(one: Pass) -> None:
    """AllAtOnce commits once all of the barrier have staged, or where one serves it already."""
    before, after = one.stored.weights.last_update, one.plan.status.weights.last_update
    if (
        one.spec.weights.strategy is not WeightsStrategy.ALL_AT_ONCE
        or before is None
        or after is None
    ):
        return
    waited = before.phase in (UpdatePhase.STAGING, UpdatePhase.FAILED)
    if not waited or before.identity != after.identity or one.seen.barrier is None:
        return
    wanted = after.identity
    if after.phase is UpdatePhase.COMMITTING and not any(
        _active(one, uid) == wanted for uid in one.ours
    ):
        for uid, pod in one.ours.items():
            state = one.state(uid)
            if state is not None and state.serving and state.boot_id in one.seen.barrier:
                assert _has_staged(state, wanted), f"{pod.name} has not staged {wanted}"
                slot = state.weights.staged
                other = slot is not None and slot.root_hash != after.root_hash
                assert _is_there(state, wanted) or not other, f"{pod.name} staged other bytes"
            silent = one.seen.barrier and state is None and _boot(one, uid) in one.seen.barrier
            gone = pod.is_deleting or pod.is_finished or one.lost(pod)
            gone = gone or pod.replica not in one.plan.replicas
            assert not silent or gone, f"{pod.name} is silent, not gone"
    if after.phase is UpdatePhase.COMPLETE:
        for uid, pod in one.ours.items():
            silent = one.state(uid) is None and _boot(one, uid) in one.seen.barrier
            gone = pod.is_deleting or pod.is_finished or one.lost(pod)
            gone = gone or pod.replica not in one.plan.replicas
            assert not silent or gone or one.spec.suspend, f"{pod.name} is silent, not gone"


def _pushed_bytes(one: Pass) -> None:
    """The operator brings no pushed bytes but a member's copy, and takes none from a trainer."""
    target = one.spec.weights.target
    for call in one.plan.calls:
        state = one.state(call.uid)
        assert state is not None
        if isinstance(call.body, StageRequest) and call.body.source.pushed is not None:
            wanted = (call.body.epoch, call.body.version)
            givers = {one.ours[uid].ip for uid in one.ours if _keeps(one, uid, wanted)}
            assert call.peers, "nobody would bring the bytes"
            assert set(call.peers) <= givers, "asked for what it does not keep"
        slot = state.weights.staged
        if not isinstance(call.body, DiscardRequest) or slot is None or target is None:
            continue
        if slot.source.pushed is None or slot.phase == "Failed" or target.source.pushed is None:
            continue
        if (slot.epoch, slot.version) == target.identity.as_tuple():
            update = one.plan.status.weights.last_update
            bound = {one.plan.status.weights.committed, update}
            odd = any(b and b.root_hash not in (None, slot.root_hash) for b in bound)
            assert odd or one.spec.state is DesiredState.ASLEEP, (
                f"{call.pod} loses what the target needs"
            )


def _keeps(one: Pass, uid: str, wanted: tuple[int, int]) -> bool:
    state = one.state(uid)
    kept = state.weights.kept if state else None
    return kept is not None and (kept.epoch, kept.version) == wanted


def _commits_nothing_unseen(one: Pass) -> None:
    """Pushed weights become the committed ones only if some worker has the bytes, or had when it began."""
    before, after = one.stored.weights.committed, one.plan.status.weights.committed
    assert after is not None
    if after.source.pushed is None or (before is not None and before.identity == after.identity):
        return
    update = one.stored.weights.last_update
    if update is not None and update.identity == after.identity and update.commit_started_at:
        return
    lasts = (one.seen.workers[u].last for u in one.ours if u in one.seen.workers)
    assert any(s and _has_staged(s, after.identity) for s in lasts), "nobody has these bytes"


def _active(one: Pass, uid: str) -> WeightsId | None:
    state = one.state(uid)
    return state.weights.active.identity if state and state.weights.active else None


def _boot(one: Pass, uid: str) -> str | None:
    """The process in a pod, as far as anybody knows."""
    worker = one.seen.workers.get(uid)
    return worker.last.boot_id if worker and worker.last else one.ours[uid].gate_boot


def _is_there(state: WorkerState, wanted: WeightsId) -> bool:
    return state.weights.active is not None and state.weights.active.identity >= wanted


def _has_staged(state: WorkerState, wanted: WeightsId) -> bool:
    slot = state.weights.staged
    staged = slot is not None and slot.phase == "Staged"
    return _is_there(state, wanted) or (
        staged and slot is not None and (slot.epoch, slot.version) == wanted.as_tuple()
    )


def _stays_in_service(one: Pass) -> None:
    """While nobody serves the new weights, nobody is sent away for not having them."""
    update = one.stored.weights.last_update
    if update is None or one.spec.suspend:
        return
    failed = update.phase is UpdatePhase.FAILED and update.commit_started_at is not None
    committing = failed or update.phase is UpdatePhase.COMMITTING
    if committing and one.spec.state is DesiredState.ACTIVE:
        lasts = (one.seen.workers[u].last for u in one.ours if u in one.seen.workers)
        newer = any(
            s and s.weights.active and s.weights.active.identity >= update.identity for s in lasts
        )
        leaving = {d.uid for d in one.plan.delete}
        for gate in one.plan.gates:
            state = one.state(gate.uid)
            if not gate.serving and gate.uid not in leaving and state is not None:
                assert newer or not state.serving, f"{gate.name} is expelled for nothing"


def _lost_its_place(one: Pass, replica: int) -> bool:
    """Whether one of a replica's pods has, which takes the others along."""
    if one.spec.colocation is None:
        return False
    placement = PlacementPlanner(one.spec, one.seen.trainers)
    mine = [pod for pod in one.ours.values() if pod.replica == replica]
    return any(placement.lost_reason(pod) or placement.move_reason(pod) for pod in mine)


def _rolls_within_its_budget(one: Pass) -> None:
    """A rolling update leaves as many at work as are wanted, but for `maxUnavailable`; a surge counts."""
    leaving = {d.uid for d in one.plan.delete}
    gone, down = 0, 0 if one.spec.suspend else one.spec.replicas
    heads = (p for p in one.ours.values() if p.rank == 0 and not p.is_deleting)
    for head in heads:
        if head.uid in one.terminating or not _works(one, head):
            continue
        if head.replica in one.plan.replicas:
            down -= 1
            # One that lost its place can't stay for anybody's budget: the devices are the trainer's.
            if head.uid in leaving and not _lost_its_place(one, head.replica):
                assert not is_current_revision(head.revision, one.spec), (
                    "it serves, and nothing of it is old"
                )
                gone += 1
        elif head.uid not in leaving:
            down -= 1
    budget = one.spec.update_strategy.max_unavailable
    assert not gone or gone + down <= budget, f"{gone} of those that work, {down} are down already"


def _works(one: Pass, head: Pod) -> bool:
    """The replica is whole and does what is wanted of it."""
    ranks = [p for p in one.ours.values() if p.replica == head.replica and not p.is_deleting]
    if len(ranks) < one.spec.parallelism.nodes or any(p.is_finished for p in ranks):
        return False
    worker = one.seen.workers.get(head.uid)
    state = worker.last if worker else None  # of who is silent nothing else is known
    if state is not None and any(h.holder != state.caller for h in state.holds):
        return True  # it is as others want it
    if one.spec.state is DesiredState.ACTIVE:
        return head.ready
    return state is not None and state.lifecycle == one.spec.state.value
