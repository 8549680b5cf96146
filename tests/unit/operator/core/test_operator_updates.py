"""One step of a weights update at a time: what `plan_weights` makes of heads in any state."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from rollout_operator.api.status import (
    CommittedWeights,
    LastUpdate,
    UpdatePhase,
    WeightsStatus,
)
from rollout_operator.core.observed_pool import FailedCall, ObservedWorker
from rollout_operator.core.pass_plan import ControlVerb, EventNote, RequeueAfter
from rollout_operator.core.replica_heads import ReplicaHead
from rollout_operator.core.updates.update_planning import plan_weights
from rollout_operator.core.updates.weights_plan import WeightsPlan, weights_status
from rollout_worker.schemas import Checkpoint, StagedWeights, WeightsId, WeightsSource, WorkerState
from tests.support.unit.poolspecs import NOW, a_pod, observed, spec_of, target
from tests.support.unit.simworker import SimWorker, root_hash

STAGING, COMMITTING, FAILED = UpdatePhase.STAGING, UpdatePhase.COMMITTING, UpdatePhase.FAILED
OLD, NEW, NEWER = (WeightsId(epoch=1, version=v) for v in (1, 2, 3))
SOURCES = {i: WeightsSource(path=f"/rollout/weights/1-{i.version}") for i in (OLD, NEW, NEWER)}


class Pool:
    """Three heads that serve (1, 1) in a pool whose target is (1, 2)."""

    def __init__(
        self, strategy: str = "AllAtOnce", to: tuple[int, int] = (1, 2), **spec: Any
    ) -> None:
        weights = {"strategy": strategy, "deadlineSeconds": 60, **target(*to)}
        self.spec = spec_of(**{"replicas": 3, "weights": weights, **spec})
        self.sims = [SimWorker(f"b{i}", required=OLD, loading=False) for i in range(3)]
        self.jump(OLD)
        self.pods = [a_pod(self.spec, i, gate=True, gate_boot=f"b{i}") for i in range(3)]
        self.committed = CommittedWeights(
            epoch=1, version=1, source=SOURCES[OLD], root_hash=root_hash(OLD)
        )
        self.update: LastUpdate | None = None
        self.barrier: frozenset[str] | None = None
        self.running: dict[int, str] = {}
        self.failed: dict[tuple[int, str], FailedCall] = {}
        self.last: dict[int, WorkerState] = {}
        self.wait = RequeueAfter()

    def under_way(self, phase: UpdatePhase, seconds: float = 10, **fields: Any) -> Pool:
        """An update to (1, 2) stands in status, begun so long ago."""
        began = datetime.fromtimestamp(NOW - seconds, UTC)
        known: dict[str, Any] = {"epoch": 1, "version": 2, "source": SOURCES[NEW], "attempts": 1}
        if phase is COMMITTING:
            known["commit_started_at"] = began
        self.update = LastUpdate(**{**known, "phase": phase, "started_at": began, **fields})
        return self

    def jump(self, identity: WeightsId) -> None:
        """All workers have these weights."""
        for sim in self.sims:
            sim.jump(identity)

    def stage(self, *which: int, identity: WeightsId = NEW, phase: str = "Staged") -> None:
        for index in which:
            self.sims[index].staged = StagedWeights(
                epoch=1, version=identity.version, source=SOURCES[identity], phase=phase,
                root_hash=root_hash(identity),
            )  # fmt: skip

    def fail(self, index: int, verb: str, about: WeightsId = NEW, count: int = 1) -> None:
        self.failed[index, verb] = FailedCall("no", count, 0, about=about)

    def heads(self) -> dict[str, ReplicaHead]:
        found = {}
        for index, (sim, pod) in enumerate(zip(self.sims, self.pods, strict=True)):
            failures = {v: e for (i, v), e in self.failed.items() if i == index}
            state = None if sim.silent or sim.unasked else sim.state()
            error = "no answer" if sim.silent else None
            running = frozenset({self.running[index]} if index in self.running else ())
            found[pod.uid] = ReplicaHead(
                pod, ObservedWorker(state, error, running, failures, self.last.get(index))
            )
        return found

    def plan(self) -> WeightsPlan:
        stored = WeightsStatus(committed=self.committed, last_update=self.update)
        seen = observed(*self.pods, barrier=self.barrier)
        return plan_weights(self.spec, seen, stored, self.heads(), NOW, self.wait)

    def names(self, uids: Any) -> list[int]:
        return [index for index, pod in enumerate(self.pods) if pod.uid in uids]


def phase_of(plan: WeightsPlan) -> tuple[tuple[int, int], str] | None:
    return (plan.update.identity.as_tuple(), plan.update.phase.value) if plan.update else None


def update_of(plan: WeightsPlan) -> LastUpdate:
    assert plan.update is not None
    return plan.update


def reasons(plan: WeightsPlan) -> list[tuple[str, str]]:
    return [(note.type, note.reason) for note in plan.notes]


def test_a_new_target_is_staged_on_all_that_serve() -> None:
    pool = Pool()
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Staging")
    assert update_of(plan).attempts == 1
    assert update_of(plan).started_at == datetime.fromtimestamp(NOW, UTC)
    assert update_of(plan).message == "0 of 3 replicas have staged (1, 2)"
    assert plan.barrier == frozenset({"b0", "b1", "b2"})
    assert {v.identity for v in plan.version_for.values()} == {NEW}
    assert pool.names(plan.version_for) == [0, 1, 2]
    assert not plan.may_commit
    assert plan.fence_epoch == 1
    assert pool.wait.seconds == 60, "it looks again at the deadline"
    assert plan.notes == [
        EventNote("Normal", "WeightsStaging", "staging weights (1, 2) on 3 replicas")
    ]


def test_the_barrier_opens_when_the_last_has_staged() -> None:
    pool = Pool().under_way(STAGING)
    pool.barrier = frozenset({"b0", "b1", "b2"})
    pool.stage(0, 1)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Staging")
    assert update_of(plan).message == "2 of 3 replicas have staged (1, 2)"
    assert pool.names(plan.version_for) == [2]
    pool.stage(2)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Committing")
    assert not plan.may_commit, "not before it stands in status"
    assert reasons(plan) == [("Normal", "WeightsCommitting")]
    assert plan.committed.identity == OLD


def test_who_joins_never_enters_the_barrier_and_who_dies_leaves_it() -> None:
    pool = Pool().under_way(STAGING)
    pool.barrier = frozenset({"b0", "b1", "gone"})
    pool.stage(0, 1)
    plan = pool.plan()
    assert plan.barrier == frozenset({"b0", "b1"})
    assert phase_of(plan) == ((1, 2), "Committing"), "the third came later"


def test_an_empty_barrier_commits_at_once() -> None:
    pool = Pool().under_way(STAGING)
    pool.barrier = frozenset({"gone"})
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Complete")
    assert plan.committed.identity == NEW
    assert plan.committed.source == SOURCES[NEW]
    assert plan.committed.root_hash is None, "nobody has computed it yet"
    assert plan.barrier is None
    assert pool.names(plan.version_for) == pool.names(plan.may_commit) == [0, 1, 2]
    assert update_of(plan).completed_at == datetime.fromtimestamp(NOW, UTC)
    assert reasons(plan) == [("Normal", "WeightsCommitted")]


def test_an_empty_barrier_waits_for_whoever_was_never_asked() -> None:
    pool = Pool().under_way(STAGING)
    pool.barrier = frozenset({"gone"})
    pool.sims[1].unasked = True
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Staging")
    assert pool.wait.seconds == 1.0
    pool.update = None
    plan = pool.plan()
    assert plan.update is None, "nothing begins"
    assert not plan.version_for


@pytest.mark.parametrize("change", [{"started": False}, {"phase": "Failed"}])
def test_who_can_not_answer_is_not_waited_for(change: dict[str, Any]) -> None:
    pool = Pool()
    pool.sims[1].unasked = True
    pool.pods[1] = replace(pool.pods[1], gate=False, **change)
    assert phase_of(pool.plan()) == ((1, 2), "Staging")


def test_a_lower_or_equal_target_begins_nothing() -> None:
    pool = Pool()
    for version in (1, 0):
        pool.spec = spec_of(replicas=3, weights=target(1, version))
        plan = pool.plan()
        assert plan.update is None
        assert not plan.version_for
        assert plan.committed.identity == OLD
    pool.spec = spec_of(replicas=3)
    assert pool.plan().fence_epoch == 1, "no target: the committed epoch is fenced"


def test_with_one_at_the_target_there_is_no_way_back() -> None:
    pool = Pool()
    pool.sims[0].jump(NEW)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Committing")
    assert pool.names(plan.may_commit) == [1, 2]
    pool.under_way(FAILED)
    assert phase_of(pool.plan()) == ((1, 2), "Committing")


@pytest.mark.parametrize("seconds", [59, 60])
def test_staging_past_its_deadline_has_failed_and_goes_on(seconds: float) -> None:
    pool = Pool().under_way(STAGING, seconds)
    pool.fail(1, "stage", count=2)
    plan = pool.plan()
    late = seconds >= 60
    assert phase_of(plan) == ((1, 2), "Failed" if late else "Staging")
    assert plan.overdue == late
    assert update_of(plan).attempts == 3
    assert update_of(plan).message == "0 of 3 replicas have staged (1, 2); pool-1-0: no"
    assert plan.failures == ["pool-1-0: no"]
    assert reasons(plan) == ([("Warning", "WeightsDeadlineExceeded")] if late else [])
    assert pool.wait.seconds == (None if late else 1)
    pool.update = plan.update
    assert not pool.plan().notes, "told once"
    assert pool.names(plan.version_for) == [0, 1, 2]


def test_a_newer_target_waits_unless_the_first_has_failed() -> None:
    pool = Pool(to=(1, 3)).under_way(STAGING)
    assert phase_of(pool.plan()) == ((1, 2), "Staging")
    pool.under_way(FAILED)
    assert phase_of(pool.plan()) == ((1, 3), "Staging")
    pool.under_way(STAGING, attempts=2)
    assert phase_of(pool.plan()) == ((1, 3), "Staging")
    pool.under_way(STAGING)
    pool.fail(2, "stage")
    plan = pool.plan()
    assert phase_of(plan) == ((1, 3), "Staging")
    assert plan.notes[0] == EventNote(
        "Normal", "WeightsSuperseded", "gave up weights (1, 2): (1, 3) is newer"
    )  # fmt: skip
    assert plan.barrier == frozenset({"b0", "b1", "b2"}), "formed anew"


@pytest.mark.parametrize("version", [2, 3])
def test_what_waited_for_an_update_begins_right_after_it(version: int) -> None:
    pool = Pool(to=(1, version)).under_way(COMMITTING, root_hash=root_hash(NEW))
    pool.jump(NEW)
    assert phase_of(pool.plan()) == ((1, 2), "Complete")
    soon = pool.wait.seconds is not None and pool.wait.seconds < 1
    assert soon == (version == 3), "no worker has any news that would wake its pool"


def test_a_higher_epoch_supersedes_what_is_staged_and_waits_for_what_is_committed() -> None:
    pool = Pool(to=(2, 0)).under_way(STAGING)
    plan = pool.plan()
    assert phase_of(plan) == ((2, 0), "Staging")
    assert "a trainer with epoch 2 took over" in plan.notes[0].message
    assert plan.fence_epoch == 2
    pool.under_way(COMMITTING)
    assert phase_of(pool.plan()) == ((1, 2), "Committing")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"suspend": True}, "the pool is suspended"),
        ({"state": "Asleep"}, "the pool is going to sleep"),
    ],
)
def test_rest_gives_up_what_is_staged_and_takes_it_on_the_way_back(
    spec: dict[str, Any], why: str
) -> None:
    pool = Pool(**spec).under_way(STAGING)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Superseded")
    assert update_of(plan).message == f"gave up weights (1, 2): {why}"
    assert plan.committed.identity == NEW
    assert plan.committed.source == SOURCES[NEW]
    pool.spec = spec_of(replicas=3, weights=target(1, 2))
    pool.update, pool.committed = plan.update, plan.committed
    for index, sim in enumerate(pool.sims):
        assert phase_of(pool.plan()) == ((1, 2), "Superseded"), index
        sim.jump(NEW)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Complete")
    assert update_of(plan).message == "3 of 3 replicas serve it"


def test_rest_with_an_older_update_behind_it_takes_the_target() -> None:
    pool = Pool(to=(1, 3), state="Asleep").under_way(UpdatePhase.SUPERSEDED)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 3), "Complete")
    assert plan.committed.identity == NEWER


def test_suspended_while_committing_is_committed() -> None:
    pool = Pool(suspend=True).under_way(COMMITTING)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Complete")
    assert plan.committed.identity == NEW


def test_committing_is_over_when_all_that_serve_are_there() -> None:
    pool = Pool().under_way(COMMITTING)
    pool.stage(0, 1, 2)
    pool.sims[0].jump(NEW)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Committing")
    assert update_of(plan).message == "1 of 3 replicas have committed (1, 2)"
    assert pool.names(plan.may_commit) == pool.names(plan.version_for) == [1, 2]
    assert not plan.out_of_service
    pool.jump(NEW)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Complete")
    assert plan.committed.root_hash == root_hash(NEW), "learned from those that serve it"
    assert plan.notes == [
        EventNote("Normal", "WeightsCommitted", "weights (1, 2): 3 of 3 replicas serve it")
    ]


@pytest.mark.parametrize("verb", ["commit", "stage", "nothing"])
def test_who_fails_to_commit_is_out_before_the_others_go_on(verb: str) -> None:
    pool = Pool().under_way(COMMITTING, 60 if verb == "nothing" else 10)
    pool.sims[0].jump(NEW)
    pool.sims[1].jump(NEW)
    if verb != "nothing":
        pool.fail(2, verb)
    plan = pool.plan()
    assert pool.names(plan.out_of_service) == [2]
    assert phase_of(plan) == ((1, 2), "Committing"), "its gate is on still"
    late = "pool-2-0: has not committed weights (1, 2) within 60 s"
    assert plan.failures == [late if verb == "nothing" else "pool-2-0: no"]
    assert update_of(plan).message == f"2 of 3 replicas have committed (1, 2); {plan.failures[0]}"
    pool.pods[2] = replace(pool.pods[2], gate=False, ready=False)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Complete")
    assert plan.committed.identity == NEW
    assert pool.names(plan.may_commit) == [2], "it goes on trying"


def test_one_that_has_yet_to_commit_is_waited_for_though_another_is_out() -> None:
    pool = Pool().under_way(COMMITTING)
    pool.sims[0].jump(NEW)
    pool.fail(2, "commit")
    pool.pods[1] = replace(pool.pods[1], gate=False)
    pool.pods[2] = replace(pool.pods[2], gate=False)
    plan = pool.plan()
    assert pool.names(plan.out_of_service) == [2]
    assert phase_of(plan) == ((1, 2), "Committing")


def test_committing_is_not_over_while_one_was_never_asked_or_nobody_is_there() -> None:
    pool = Pool().under_way(COMMITTING)
    pool.sims[0].jump(NEW)
    pool.sims[1].jump(NEW)
    pool.sims[2].unasked = True
    pool.pods[2] = replace(pool.pods[2], gate=False, ready=False)
    assert phase_of(pool.plan()) == ((1, 2), "Committing")
    pool.sims[2].unasked, pool.sims[2].silent = False, True
    assert phase_of(pool.plan()) == ((1, 2), "Committing"), "it was in service, and may be still"
    pool.under_way(COMMITTING, seconds=60)
    assert phase_of(pool.plan()) == ((1, 2), "Complete"), "not for ever"


def test_a_commit_has_not_failed_while_nobody_was_asked() -> None:
    pool = Pool().under_way(COMMITTING)
    for index, sim in enumerate(pool.sims):
        sim.unasked = True
        pool.pods[index] = replace(pool.pods[index], gate=False, gate_boot=None)
    assert phase_of(pool.plan()) == ((1, 2), "Committing")


def test_with_nobody_left_in_service_what_commits_is_committed() -> None:
    pool = Pool().under_way(COMMITTING)
    for sim in pool.sims:
        sim.required = None
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Complete")
    assert update_of(plan).message == "0 of 3 replicas serve it"


@pytest.mark.parametrize("strategy", ["Rolling", "Eager"])
def test_without_a_barrier_the_first_that_has_staged_lets_commits_begin(strategy: str) -> None:
    pool = Pool(strategy).under_way(STAGING)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Staging")
    assert update_of(plan).message == "0 of 3 replicas have staged (1, 2)"
    assert pool.names(plan.version_for) == [0, 1, 2]
    pool.stage(1)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Committing")
    assert update_of(plan).message == "committing one by one: 1 of 3 replicas have staged"
    assert pool.names(plan.version_for) == [0, 2]
    assert not plan.may_commit


@pytest.mark.parametrize(
    ("limit", "running", "failed", "turns"),
    [
        (1, {}, [], [0]),
        (2, {}, [], [0, 1]),
        (1, {1: ControlVerb.COMMIT}, [], [1]),
        (2, {2: ControlVerb.COMMIT}, [], [0, 2]),
        (1, {1: ControlVerb.STAGE}, [], [0]),
        (1, {}, [1], [1]),
        (2, {0: ControlVerb.COMMIT}, [1, 2], [0, 1]),
        (1, {0: ControlVerb.COMMIT}, [1], [0]),
    ],
)
def test_rolling_commits_a_few_at_a_time_and_stops_at_a_failure(
    limit: int, running: dict[int, str], failed: list[int], turns: list[int]
) -> None:
    weights = {"strategy": "Rolling", "maxUnavailable": limit, "deadlineSeconds": 60}
    pool = Pool(weights={**weights, **target(1, 2)}).under_way(COMMITTING)
    pool.running = running
    for index in failed:
        pool.fail(index, "commit")
    plan = pool.plan()
    assert pool.names(plan.may_commit) == turns
    assert not plan.out_of_service, "nobody is sent away"
    assert len(plan.failures) == len(failed)


@pytest.mark.parametrize("strategy", ["Rolling", "Eager"])
@pytest.mark.parametrize("phase", [STAGING, COMMITTING])
def test_without_a_barrier_too_what_has_begun_is_finished_first(
    strategy: str, phase: UpdatePhase
) -> None:
    pool = Pool(strategy, to=(1, 3)).under_way(phase)
    pool.stage(0)
    assert phase_of(pool.plan()) == ((1, 2), "Committing")
    pool.under_way(phase, seconds=59)
    assert phase_of(pool.plan()) == ((1, 2), "Committing")
    pool.under_way(phase, seconds=60)
    assert phase_of(pool.plan()) == ((1, 3), "Staging"), "not for ever"
    pool.under_way(COMMITTING, seconds=60)
    pool.running = {1: ControlVerb.COMMIT}
    assert phase_of(pool.plan()) == ((1, 2), "Committing"), "it is about to end"


@pytest.mark.parametrize("strategy", ["Rolling", "Eager"])
@pytest.mark.parametrize("seconds", [10, 60])
def test_what_all_have_is_complete_before_the_newest_begins(strategy: str, seconds: int) -> None:
    pool = Pool(strategy, to=(1, 3)).under_way(COMMITTING, seconds)
    pool.jump(NEW)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Complete")
    assert plan.committed.identity == NEW


@pytest.mark.parametrize(
    ("phase", "verb"),
    [
        (STAGING, "stage"),
        (COMMITTING, "stage"),
        (COMMITTING, "commit"),
    ],
)
def test_rolling_turns_to_the_newest_at_a_failure_and_eager_when_all_have_failed(
    phase: UpdatePhase, verb: str
) -> None:
    for strategy, turn in (("Rolling", 1), ("Eager", 3)):
        pool = Pool(strategy, to=(1, 3)).under_way(phase)
        for failed in range(1, 4):
            pool.fail(failed - 1, verb)
            plan = pool.plan()
            assert (phase_of(plan) == ((1, 3), "Staging")) == (failed >= turn), failed
        assert reasons(plan)[0] == ("Normal", "WeightsSuperseded")


@pytest.mark.parametrize("strategy", ["Rolling", "Eager"])
def test_without_a_barrier_nobody_lags_behind_with_who_is_silent(strategy: str) -> None:
    pool = Pool(strategy, to=(1, 3)).under_way(COMMITTING)
    pool.sims[0].jump(NEW)
    pool.sims[2].silent = True
    assert phase_of(pool.plan()) == ((1, 2), "Committing"), "one can finish yet"
    pool.sims[1].jump(NEW)
    pool.running = {2: ControlVerb.STAGE}
    assert phase_of(pool.plan()) == ((1, 2), "Committing"), "it may finish what it was told"
    pool.running = {}
    assert phase_of(pool.plan()) == ((1, 3), "Staging")


def test_rolling_turns_first_to_who_is_furthest_behind() -> None:
    pool = Pool("Rolling", to=(1, 3)).under_way(COMMITTING, version=3, source=SOURCES[NEWER])
    pool.sims[0].jump(NEW)
    assert pool.names(pool.plan().may_commit) == [1]
    pool.sims[1].jump(NEW)
    assert pool.names(pool.plan().may_commit) == [2]
    pool.sims[2].silent = True
    assert pool.names(pool.plan().may_commit) == [0], "who is silent can't take a turn"


@pytest.mark.parametrize("strategy", ["AllAtOnce", "Eager"])
def test_a_joiner_finishes_what_the_others_move_to(strategy: str) -> None:
    pool = Pool(strategy, to=(1, 3)).under_way(COMMITTING)
    pool.sims[2] = SimWorker("b9", loading=False)
    plan = pool.plan()
    assert plan.version_for[pool.pods[2].uid].identity == NEW, "not the newest, which may not last"
    assert 2 in pool.names(plan.may_commit)


@pytest.mark.parametrize(
    ("strategy", "brought"), [("AllAtOnce", OLD), ("Rolling", NEW), ("Eager", NEW)]
)
def test_a_joiner_loads_what_is_served_beside_an_update(strategy: str, brought: WeightsId) -> None:
    pool = Pool(strategy).under_way(STAGING)
    pool.sims[2] = SimWorker("b9", loading=False)
    uid = pool.pods[2].uid
    plan = pool.plan()
    assert plan.version_for[uid].identity == brought
    assert plan.version_for[uid].root_hash == (root_hash(OLD) if brought == OLD else None)
    assert plan.version_for[uid].source == SOURCES[brought]
    assert pool.names(plan.may_commit) == ([2] if brought == OLD else []), "what is decided"
    pool.update = None
    pool.spec = spec_of(replicas=3, weights={"strategy": strategy, **target(1, 1)})
    assert pool.plan().version_for[uid].identity == OLD, "no update is under way"


@pytest.mark.parametrize("strategy", ["Rolling", "Eager"])
def test_a_joiner_that_can_not_take_the_update_serves_what_the_others_do(strategy: str) -> None:
    pool = Pool(strategy).under_way(FAILED, 90)
    pool.sims[2] = SimWorker("b9", loading=False)
    for index in (0, 1):
        pool.fail(index, "stage")
    uid = pool.pods[2].uid
    assert pool.plan().version_for[uid].identity == NEW, "it may be better off than they"
    pool.fail(2, "stage")
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Failed")
    assert plan.version_for[uid].identity == OLD
    assert 2 in pool.names(plan.may_commit)
    del pool.failed[2, "stage"]
    pool.stage(2, identity=OLD)
    assert pool.plan().version_for[uid].identity == OLD, "it has begun, and goes on with it"
    pool.stage(2, identity=OLD, phase="Failed")
    for count, retry_in, wanted in ((1, 1, OLD), (3, 0, OLD), (4, 8, OLD), (4, 0, NEW)):
        pool.failed[2, "stage"] = FailedCall("no", count, retry_in, about=OLD)
        assert pool.plan().version_for[uid].identity == wanted, "not one after the other at once"


def test_the_hash_is_learned_once_and_of_what_is_committed() -> None:
    pool = Pool(weights=target(1, 1))
    assert pool.plan().committed.root_hash == root_hash(OLD)
    pool.committed = pool.committed.model_copy(update={"root_hash": "known"})
    assert pool.plan().committed.root_hash == "known"
    pool.committed = pool.committed.model_copy(update={"root_hash": None})
    pool.sims[0].jump(NEWER)
    pool.sims[1].active_hash, pool.sims[2].active_hash = "of the lower", "of the higher"
    assert pool.plan().committed.root_hash == "of the lower"


def test_the_update_keeps_its_source_though_the_target_moves() -> None:
    pool = Pool(weights={"deadlineSeconds": 60, **target(1, 2, "/moved")}).under_way(STAGING)
    assert {v.source for v in pool.plan().version_for.values()} == {SOURCES[NEW]}
    pool.under_way(STAGING, source=None)
    assert {v.source for v in pool.plan().version_for.values()} == {SOURCES[OLD]}


def test_a_new_pool_begins_with_the_checkpoint() -> None:
    pool = Pool()
    plan = plan_weights(spec_of(), observed(), WeightsStatus(), {}, NOW, RequeueAfter())
    assert plan.committed.identity.as_tuple() == (0, 0)
    assert plan.committed.source == WeightsSource(checkpoint=Checkpoint())
    assert plan.update is None
    assert pool.plan().update is not None


def test_what_status_says_of_weights() -> None:
    pool = Pool().under_way(STAGING)
    pool.stage(0, 1)
    pool.sims[2].jump(NEWER)
    status = weights_status(pool.plan(), pool.heads())
    assert status.active is not None
    assert (status.active.min.epoch, status.active.min.version) == (1, 1)
    assert (status.active.max.epoch, status.active.max.version) == (1, 3)
    assert status.staged_replicas == 3, "who is ahead needs nothing more"
    assert status.committed is not None
    pool.pods = [replace(p, ready=False) for p in pool.pods]
    pool.update = None
    pool.spec = spec_of(replicas=3, weights=target(1, 1))
    status = weights_status(pool.plan(), pool.heads())
    assert status.active is None
    assert status.staged_replicas == 0


# One content for one identity.


def other_bytes(pool: Pool, *which: int) -> None:
    for index in which:
        slot = pool.sims[index].staged
        assert slot is not None
        pool.sims[index].staged = slot.model_copy(update={"root_hash": "other"})


@pytest.mark.parametrize(("odd", "wanted"), [((1,), "right"), ((0, 1), "other"), ((0,), "right")])
def test_nobody_commits_while_members_have_staged_different_bytes(
    odd: tuple[int, ...], wanted: str
) -> None:
    pool = Pool().under_way(STAGING)
    pool.stage(0, 1, 2)
    other_bytes(pool, *odd)
    plan = pool.plan()
    right = root_hash(NEW) if wanted == "right" else "other"
    assert phase_of(plan) == ((1, 2), "Staging")
    assert {v.root_hash for v in plan.version_for.values()} == {right}, "what most have"
    assert len(plan.failures) == len(plan.version_for) == 1
    assert "content-mismatch" in plan.failures[0]
    assert plan.failures[0] in (update_of(plan).message if plan.update else "")
    pool.spec = spec_of(replicas=3, weights=target(1, 3))
    assert phase_of(pool.plan()) == ((1, 3), "Staging"), "a newer target is the way out"


def test_between_two_contents_the_lowest_replica_decides() -> None:
    pool = Pool().under_way(STAGING)
    pool.stage(0, 1)
    other_bytes(pool, 0)
    plan = pool.plan()
    assert pool.names(plan.version_for) == [1, 2]
    assert {v.root_hash for v in plan.version_for.values()} == {"other"}, "late ones are told"


def test_the_decision_names_the_bytes() -> None:
    pool = Pool().under_way(STAGING)
    pool.stage(0, 1, 2)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Committing")
    assert update_of(plan).root_hash == root_hash(NEW)
    assert update_of(plan).commit_started_at == datetime.fromtimestamp(NOW, UTC)
    pool.update = plan.update
    other_bytes(pool, 0, 1, 2)
    plan = pool.plan()
    assert {v.root_hash for v in plan.version_for.values()} == {root_hash(NEW)}, "it is bound"
    assert len(plan.failures) == 3
    for sim in pool.sims:
        sim.jump(NEW)
        sim.active_hash = "said otherwise"
    assert pool.plan().committed.root_hash == root_hash(NEW), "as it was decided"


def test_without_a_barrier_who_serves_it_decides_over_who_has_staged_it() -> None:
    pool = Pool("Eager").under_way(COMMITTING)
    pool.stage(0, 1, 2)
    other_bytes(pool, 0, 1)
    pool.sims[2].jump(NEW)
    plan = pool.plan()
    assert {v.root_hash for v in plan.version_for.values()} == {root_hash(NEW)}
    assert len(plan.failures) == 2
    assert update_of(plan).root_hash == root_hash(NEW)


def test_joiners_are_bound_to_the_bytes_of_the_first() -> None:
    pool = Pool(weights=target(1, 1))
    pool.committed = pool.committed.model_copy(update={"root_hash": None})
    for index, sim in enumerate(pool.sims):
        pool.sims[index] = SimWorker(sim.boot, loading=False)
    pool.stage(1, 2, identity=OLD)
    other_bytes(pool, 2)
    plan = pool.plan()
    assert plan.committed.root_hash == root_hash(OLD)
    assert {v.root_hash for v in plan.version_for.values()} == {root_hash(OLD)}


# A commit that everybody refuses.


@pytest.mark.parametrize("verb", ["stage", "commit", "nothing"])
def test_while_nobody_has_it_nobody_is_expelled_and_it_has_failed(verb: str) -> None:
    pool = Pool().under_way(COMMITTING, 60 if verb == "nothing" else 10)
    pool.stage(0, 1, 2)
    for index in range(3):
        if verb != "nothing":
            pool.fail(index, verb, count=2)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Failed")
    assert not plan.out_of_service
    assert plan.committed.identity == OLD
    assert pool.names(plan.may_commit) == [0, 1, 2], "they go on trying"
    assert update_of(plan).attempts == (3 if verb == "commit" else 1)
    assert update_of(plan).message.startswith("0 of 3 replicas have committed (1, 2); pool-0-0: ")
    assert reasons(plan) == ([("Warning", "WeightsDeadlineExceeded")] if verb == "nothing" else [])
    pool.update = plan.update
    again = pool.plan()
    assert phase_of(again) == ((1, 2), "Failed")
    assert not again.notes, "told once"
    pool.failed = {}
    assert phase_of(pool.plan()) == ((1, 2), "Failed"), "a new leader knows of no refusals"


def test_it_has_not_failed_while_one_has_yet_to_answer() -> None:
    pool = Pool().under_way(COMMITTING)
    pool.fail(0, "commit")
    pool.fail(1, "commit")
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Committing")
    assert not plan.out_of_service, "nobody has it"
    pool.running = {2: ControlVerb.COMMIT}
    pool.under_way(COMMITTING, seconds=60)
    assert phase_of(pool.plan()) == ((1, 2), "Committing"), "its commit may end well"


def failed_commit() -> Pool:
    pool = Pool().under_way(FAILED, commit_started_at=datetime.fromtimestamp(NOW - 5, UTC))
    for index in range(3):
        pool.fail(index, "commit")
    return pool


@pytest.mark.parametrize("wanted", [(1, 3), (2, 0)])
def test_a_newer_target_or_epoch_supersedes_a_refused_commit(wanted: tuple[int, int]) -> None:
    pool = failed_commit()
    pool.spec = spec_of(replicas=3, weights=target(*wanted))
    plan = pool.plan()
    assert phase_of(plan) == (wanted, "Staging")
    assert reasons(plan)[0] == ("Normal", "WeightsSuperseded")
    assert update_of(plan).commit_started_at is None


def test_a_pool_that_goes_to_sleep_over_a_refused_commit_keeps_its_old_weights() -> None:
    pool = failed_commit()
    pool.spec = spec_of(replicas=3, state="Asleep", weights=target(1, 2))
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Failed")
    assert plan.committed.identity == OLD
    assert not plan.version_for
    pool.spec = spec_of(replicas=3, state="Asleep", weights=target(1, 3))
    plan = pool.plan()
    assert phase_of(plan) == ((1, 3), "Complete"), "a newer target takes its place"
    assert plan.committed.identity == NEWER


def test_a_refused_commit_that_one_takes_goes_on() -> None:
    pool = failed_commit()
    pool.sims[1].jump(NEW)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Committing")
    assert update_of(plan).commit_started_at == datetime.fromtimestamp(NOW, UTC), "a deadline anew"
    assert update_of(plan).root_hash == root_hash(NEW)
    assert pool.names(plan.out_of_service) == [0, 2]


def test_who_joins_gets_no_weights_that_all_refuse() -> None:
    pool = failed_commit()
    pool.sims[2] = SimWorker("b9", loading=False)
    plan = pool.plan()
    assert plan.version_for[pool.pods[2].uid].identity == OLD
    assert phase_of(plan) == ((1, 2), "Failed")


def test_one_that_has_it_and_falls_silent_has_it_still() -> None:
    pool = Pool().under_way(COMMITTING)
    pool.sims[0].jump(NEW)
    pool.last[0] = pool.sims[0].state()
    pool.sims[0].silent = True
    pool.fail(1, "commit")
    pool.fail(2, "commit")
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Committing")
    assert pool.names(plan.out_of_service) == [1, 2]


# What the engine can't do.


@pytest.mark.parametrize("strategy", ["AllAtOnce", "Rolling"])
@pytest.mark.parametrize("phase", [None, STAGING])
def test_what_an_engine_can_not_do_is_seen_before_staging(
    strategy: str, phase: UpdatePhase | None
) -> None:
    weights = {"strategy": strategy, "deadlineSeconds": 60, "inFlight": {"policy": "Keep"}}
    pool = Pool(weights={**weights, **target(1, 2)})
    if phase:
        pool.under_way(phase, 60)
    pool.sims[1].policies = ("Drain", "Abort")
    plan = pool.plan()
    said = (
        "spec.weights.inFlight.policy: engine hf can't do Keep in pool-1-0: use one of Drain, Abort"
    )
    assert phase_of(plan) == ((1, 2), "Failed")
    assert update_of(plan).message == said
    assert plan.failures == [said]
    assert (plan.unsupported, plan.overdue) == (True, False)
    assert not plan.version_for
    assert not plan.notes
    pool.update = plan.update
    pool.sims[1].policies = ()
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Staging"), "it is not known, so it is tried"
    assert update_of(plan).started_at == datetime.fromtimestamp(NOW, UTC), (
        "the deadline begins here"
    )
    pool.sims[1].jump(NEWER)
    pool.sims[1].policies = ("Drain",)
    assert phase_of(pool.plan()) == ((1, 2), "Staging"), "it needs no commit"


def test_the_deadlines_of_staging_and_committing_are_separate() -> None:
    pool = Pool().under_way(FAILED, seconds=500)
    pool.stage(0, 1, 2)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Committing")
    pool.update = plan.update
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Committing")
    assert not plan.overdue
    assert not plan.failures
    assert not plan.out_of_service
    assert pool.wait.seconds == 60


# Silence, and workers ahead.


@pytest.mark.parametrize("state", ["Active", "Paused"])
def test_who_is_silent_stays_in_the_barrier(state: str) -> None:
    pool = Pool(state=state).under_way(STAGING)
    pool.barrier = frozenset({"b0", "b1", "b2"})
    pool.stage(0, 1)
    pool.pods = [replace(p, gate=False, ready=False, gate_boot=None) for p in pool.pods]
    pool.last = {i: sim.state() for i, sim in enumerate(pool.sims)}
    for sim in pool.sims:
        sim.silent = True
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Staging")
    assert plan.barrier == pool.barrier
    assert update_of(plan).message == (
        "0 of 3 replicas have staged (1, 2); pool-0-0 does not answer"
    )
    pool.sims[0].silent = pool.sims[1].silent = False
    assert phase_of(pool.plan()) == ((1, 2), "Staging"), "what it has staged was not seen"
    pool.pods[2] = replace(pool.pods[2], phase="Failed")
    assert phase_of(pool.plan()) == ((1, 2), "Committing"), "its pod is dead"
    pool.pods[2] = replace(pool.pods[2], phase="Running")
    pool.sims[2] = SimWorker("b9", required=OLD, loading=False)
    pool.sims[2].jump(OLD)
    assert phase_of(pool.plan()) == ((1, 2), "Committing"), "another process answers"


def test_a_new_leader_counts_who_is_silent_and_once_served() -> None:
    pool = Pool(state="Paused")
    pool.pods = [replace(p, gate=False, ready=False) for p in pool.pods]
    for sim in pool.sims:
        sim.silent = True
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Staging")
    assert plan.barrier == frozenset({"b0", "b1", "b2"})


@pytest.mark.parametrize("phase", [None, STAGING])
def test_a_worker_ahead_opens_no_barrier(phase: UpdatePhase | None) -> None:
    pool = Pool()
    if phase:
        pool.under_way(phase)
    pool.sims[0].jump(NEWER)
    plan = pool.plan()
    assert phase_of(plan) == ((1, 2), "Staging")
    assert pool.names(plan.version_for) == [1, 2]
    pool.update = plan.update
    pool.stage(1, 2)
    assert phase_of(pool.plan()) == ((1, 2), "Committing")
