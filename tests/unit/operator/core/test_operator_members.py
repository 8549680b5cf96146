"""What one head is told next, and when its gate turns: the checks in order, call by call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollout_operator.api.status import CommittedWeights, LastUpdate, UpdatePhase
from rollout_operator.core.observed_pool import FailedCall, ObservedWorker
from rollout_operator.core.pass_plan import CallWorker, ControlVerb, RequeueAfter, SetGate
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion, stage_failures
from rollout_operator.core.replicas.head_planner import HeadPlanner
from rollout_operator.core.updates.weights_plan import WeightsPlan
from rollout_worker.schemas import (
    Checkpoint,
    CommitRequest,
    DiscardRequest,
    Lifecycle,
    PauseRequest,
    Pushed,
    ReleaseRequest,
    RequireRequest,
    Resident,
    SleepRequest,
    StagedWeights,
    StageRequest,
    StageSource,
    WakeRequest,
    WeightsId,
    WeightsSource,
)
from tests.support.unit.poolspecs import NOW, observed, spec_of
from tests.support.unit.poolspecs import a_pod as pod
from tests.support.unit.simworker import SimWorker

ZERO, ONE, TWO = (WeightsId(epoch=1, version=v) for v in (0, 1, 2))
SOURCE = WeightsSource(path="/rollout/weights/1-1")
NEW = WeightsVersion(ONE, SOURCE, "known")


class Bench:
    """One head, and what the planner says of it."""

    def __init__(self, **spec: Any) -> None:
        self.spec = spec_of(drainSeconds=7, **spec)
        checkpoint = WeightsSource(checkpoint=Checkpoint())
        self.weights = WeightsPlan(CommittedWeights(epoch=1, version=0, source=checkpoint), None)
        self.weights.fence_epoch = 1
        self.sim = SimWorker("b1", active=ZERO, required=ZERO, loading=False, fence_epoch=1)
        self.pod = pod(self.spec, gate=True, gate_boot="b1")
        self.running: frozenset[str] = frozenset()
        self.failures: dict[str, FailedCall] = {}
        self.lifecycle: Lifecycle | None = None
        self.wait = RequeueAfter()
        self.now = NOW

    @property
    def head(self) -> ReplicaHead:
        state = self.sim.state()
        if self.lifecycle:
            there = self.lifecycle is not Lifecycle.ASLEEP
            resident = Resident(weights=there or self.sim.woken, kv_cache=there)
            changed = {"lifecycle": self.lifecycle, "serving": False, "resident": resident}
            state = state.model_copy(update=changed)
        told = None if self.sim.silent else state
        return ReplicaHead(self.pod, ObservedWorker(told, None, self.running, self.failures))

    @property
    def planner(self) -> HeadPlanner:
        seen = observed(self.pod, generation=9)
        return HeadPlanner(self.spec, seen, self.weights, self.now, self.wait)

    def bring(self, version: WeightsVersion = NEW, *, commit: bool = True) -> None:
        self.weights.version_for[self.pod.uid] = version
        if commit:
            self.weights.may_commit.add(self.pod.uid)

    def stage(
        self, version: int = 1, phase: str = "Staged", path: str | None = None, **fields: Any
    ) -> None:
        source = WeightsSource(path=path) if path else SOURCE
        known = {"epoch": 1, "version": version, "source": source, "phase": phase}
        self.sim.staged = StagedWeights(**{**known, "root_hash": "known", **fields})

    def call(self) -> CallWorker | None:
        found = self.planner.plan_calls(self.head)
        assert len(found) <= 1
        return found[0] if found else None

    def told(self) -> tuple[Any, float] | None:
        call = self.call()
        assert call is None or (call.uid, call.pod) == (self.pod.uid, self.pod.name)
        return (call.body, call.deadline_seconds) if call else None

    def body(self) -> Any:
        """The body of its call, which must be due."""
        call = self.told()
        assert call is not None
        return call[0]

    def change(self, *, leaving: bool = False) -> SetGate:
        """The change of its gate, which must be due."""
        found = self.planner.plan_gate(self.head, leaving)
        assert found is not None
        return found

    def gate(self, leaving: bool = False) -> tuple[bool, str] | None:
        change = self.planner.plan_gate(self.head, leaving)
        assert change is None or (change.name, change.uid) == (self.pod.name, self.pod.uid)
        return (change.serving, change.boot) if change else None


def test_a_head_that_serves_what_is_committed_is_left_alone() -> None:
    assert Bench().told() is None


def test_the_floor_is_what_is_committed_and_comes_first() -> None:
    bench = Bench()
    bench.sim.required = None
    bench.sim.hold = "Paused"
    assert bench.told() == (RequireRequest(epoch=1, min_version=0), 10)
    bench.sim.required = WeightsId(epoch=0, version=9)
    assert bench.told() == (RequireRequest(epoch=1, min_version=0), 10)


def test_a_worker_learns_how_long_to_drain_at_its_end() -> None:
    """Its environment has what was so at its start, and spec may change without a new pod."""
    bench = Bench()
    bench.sim.drain = 30
    assert bench.told() == (RequireRequest(epoch=1, drain_seconds=7), 10)
    bench.sim.drain = 7
    assert bench.told() is None
    bench.sim.drain = None
    assert bench.told() is None, "an older worker takes no other value"


def test_a_sleeper_gives_up_what_it_has_only_for_weights_that_can_be_had() -> None:
    empty = WakeRequest(tags=("weights",), load=False, generation=9)
    whole = WakeRequest(generation=9)

    bench = Bench()
    bench.sim.hold = "Asleep"
    bench.bring()
    assert bench.body() == empty
    bench.failures = {"commit": FailedCall("no", 1, 0, about=ONE)}
    assert bench.body() == whole, "else it would never come out of its sleep"
    bench.failures = {}
    bench.bring(WeightsVersion(ONE, WeightsSource(pushed=Pushed()), "known"))
    assert bench.body() == whole, "nobody has them"
    bench.weights.peers = {bench.pod.uid: ("10.0.0.2",)}
    assert bench.body() == empty


def test_who_is_out_gets_the_floor_of_the_update() -> None:
    bench = Bench()
    bench.weights.update = LastUpdate(epoch=1, version=1, phase=UpdatePhase.COMMITTING)
    assert bench.told() is None
    bench.weights.out_of_service = {bench.pod.uid}
    assert bench.told() == (RequireRequest(epoch=1, min_version=1), 10)


@pytest.mark.parametrize("lifecycle", ["Starting", "Loading", "Failed"])
def test_who_has_no_model_yet_is_told_nothing(lifecycle: str) -> None:
    bench = Bench()
    bench.sim.required = None
    bench.lifecycle = Lifecycle(lifecycle)
    assert bench.told() is None
    bench.lifecycle, bench.sim.silent = None, True
    assert bench.told() is None


def test_pause() -> None:
    bench = Bench(state="Paused")
    body = PauseRequest(mode="drain", deadline_seconds=7, generation=9)
    assert bench.told() == (body, 22)
    bench.sim.hold = "Asleep"
    assert bench.told() == (body, 607), "the weights come back from where they sleep"
    bench.sim.hold = "Paused"
    assert bench.told() is None
    bench.sim.foreign_hold = "Asleep"
    assert bench.told() is None, "somebody else's hold keeps it asleep, ours stands"
    bench.sim.foreign_hold = None
    bench.lifecycle = Lifecycle.PAUSING
    assert bench.told() == (body, 22)


def test_a_worker_that_knows_a_newer_generation_is_called_with_that_one() -> None:
    """An etcd restored from a snapshot counts from an older one, and the worker refuses what is older."""
    bench = Bench(state="Paused")
    for known, told in ((8, 9), (12, 12)):
        bench.sim.generation = known
        assert bench.body().generation == told


def test_sleep() -> None:
    bench = Bench(state="Asleep", sleep={"level": 2})
    body = SleepRequest(level=2, mode="drain", deadline_seconds=7, generation=9)
    assert bench.told() == (body, 607)
    bench.sim.foreign_hold = "Asleep"
    assert bench.told() == (body, 607), "another's sleep is not ours"
    bench.sim.hold, bench.sim.foreign_hold = "Paused", "Asleep"
    assert bench.told() == (body, 607)
    bench.sim.hold, bench.lifecycle = "Asleep", Lifecycle.DRAINING
    assert bench.told() == (body, 607)
    bench.lifecycle = None
    assert bench.told() is None


def test_what_is_staged_goes_before_sleep() -> None:
    bench = Bench(state="Asleep")
    bench.stage()
    assert bench.told() == (DiscardRequest(epoch=1, version=1), 10)
    bench.sim.hold, bench.sim.foreign_hold = "Paused", "Asleep"
    assert isinstance(bench.body(), SleepRequest), "asleep, it can discard nothing"


@pytest.mark.parametrize("state", ["Asleep", "Paused"])
def test_a_commit_that_has_begun_comes_before_rest(state: str) -> None:
    bench = Bench(state=state)
    bench.weights.update = LastUpdate(epoch=1, version=1, phase=UpdatePhase.COMMITTING)
    bench.bring()
    bench.stage()
    assert isinstance(bench.body(), CommitRequest)


def test_only_our_own_hold_is_dropped() -> None:
    bench = Bench()
    bench.sim.foreign_hold = "Paused"
    assert bench.told() is None
    bench.sim.hold = "Paused"
    assert bench.told() == (ReleaseRequest(generation=9), 10)
    bench.sim.hold = "Asleep"
    assert bench.told() == (WakeRequest(generation=9), 600)


def test_stage() -> None:
    bench = Bench(weights={"deadlineSeconds": 40})
    bench.bring()
    body = StageRequest(
        epoch=1, version=1, source=StageSource.of(SOURCE), root_hash="known", deadline_seconds=40
    )
    assert bench.told() == (body, 55)
    for phase in ("Staging", "Failed"):
        bench.stage(phase=phase)
        assert bench.told() == (body, 55)
    for lifecycle in (Lifecycle.ASLEEP, Lifecycle.WAKING):
        bench.lifecycle = lifecycle
        assert bench.told() is None


def test_commit_names_the_staged_bytes() -> None:
    policy = {"policy": "Abort", "deadlineSeconds": 5, "onDeadline": "Keep"}
    bench = Bench(weights={"inFlight": policy})
    bench.bring()
    bench.stage()
    body = CommitRequest(
        epoch=1, version=1, root_hash="known", in_flight="Abort", deadline_seconds=5,
        on_deadline="Keep",
    )  # fmt: skip
    assert bench.told() == (body, 605)
    bench.lifecycle = Lifecycle.ASLEEP
    assert bench.told() is None


@pytest.mark.parametrize(
    ("policy", "asked", "below"),
    [
        ({"policy": "Drain", "onDeadline": "Keep"}, ("Drain", "Keep"), ("Abort", "Abort")),
        ({"policy": "Pin"}, ("Pin", "Abort"), ("Abort", "Abort")),
        ({"policy": "Abort", "onDeadline": "Keep"}, ("Abort", "Keep"), ("Abort", "Keep")),
        ({"policy": "Drain"}, ("Drain", "Abort"), ("Drain", "Abort")),
    ],
)
def test_who_is_below_the_floor_needs_no_policy_that_its_engine_lacks(
    policy: dict[str, str], asked: tuple[str, str], below: tuple[str, str]
) -> None:
    bench = Bench(weights={"inFlight": policy})
    bench.sim.policies = ("Drain", "Abort")
    bench.bring()
    bench.stage()

    def commit() -> tuple[str, str]:
        body = bench.body()
        assert isinstance(body, CommitRequest)
        return body.in_flight, body.on_deadline

    assert commit() == asked, "it serves: what the spec asks for, or nothing"
    bench.weights.committed = bench.weights.committed.model_copy(update={"version": 1})
    bench.sim.required = ONE
    assert commit() == below


def test_other_bytes_are_told_and_then_read_anew() -> None:
    bench = Bench()
    bench.bring()
    bench.stage(root_hash="other")
    assert not bench.head.has_staged(NEW)
    body = bench.body()
    assert isinstance(body, StageRequest), "the worker compares, and refuses"
    assert body.root_hash == "known"
    bench.failures = {"stage": FailedCall("content-mismatch: no", 1, 5, about=ONE)}
    assert bench.told() is None
    bench.failures = {"stage": FailedCall("content-mismatch: no", 1, 0, about=ONE)}
    assert bench.told() == (DiscardRequest(epoch=1, version=1), 10)
    bench.failures = {"stage": FailedCall("of earlier weights", 1, 0, about=ZERO)}
    assert isinstance(bench.body(), StageRequest)
    bench.failures = {"stage": FailedCall("no room", 1, 0, about=ONE)}
    bench.stage(phase="Failed")
    assert isinstance(bench.body(), StageRequest), "nothing of it is there"


@pytest.mark.parametrize(
    ("failure", "slot", "odd"),
    [
        (None, None, False),
        (FailedCall("bound to other content", 1, 0, "content-mismatch", ONE), None, True),
        (FailedCall("pool-0-1 found other bytes", 1, 0, "content-mismatch", ONE), None, True),
        (FailedCall("content-mismatch: only words", 1, 0, "stage-failed", ONE), None, False),
        (FailedCall("(1, 2) should", 1, 0, "content-mismatch", TWO), None, False),
        (FailedCall("tensor 'a' is missing", 1, 0, about=ONE), None, False),
        (None, ("rank 1 found root_hash b", "content-mismatch"), True),
        (None, ("content-mismatch: only words", None), False),
        (None, ("tensor 'a' is missing", None), False),
        (
            FailedCall("no answer", 1, 0, "", TWO),
            ("rank 1 found root_hash b", "content-mismatch"),
            True,
        ),
    ],
)
def test_a_mismatch_is_told_from_other_failures(
    failure: FailedCall | None, slot: tuple[str, str | None] | None, odd: bool
) -> None:
    bench = Bench()
    bench.failures = {"stage": failure} if failure else {}
    if slot:
        bench.stage(phase="Failed", error=slot[0], slug=slot[1])
    assert bool(bench.head.mismatch_message(NEW)) == odd


def test_who_may_not_commit_yet_waits() -> None:
    bench = Bench()
    bench.bring(commit=False)
    bench.stage()
    assert bench.told() is None
    bench.sim.jump(TWO)
    bench.bring()
    assert bench.told() is None, "it is ahead already"


@pytest.mark.parametrize(
    ("version", "phase", "path", "gone"),
    [
        (2, "Staged", None, True),
        (2, "Staging", None, True),
        (1, "Staged", "/elsewhere", True),
        (1, "Staging", "/elsewhere", True),
        (0, "Staging", None, True),
        (0, "Staged", None, False),
        (1, "Failed", None, False),
    ],
)
def test_what_stands_in_the_way_is_discarded(
    version: int, phase: str, path: str | None, gone: bool
) -> None:
    bench = Bench()
    bench.bring(commit=False)
    bench.stage(version, phase, path)
    assert isinstance(bench.body(), DiscardRequest) == gone
    if gone:
        assert bench.told() == (DiscardRequest(epoch=1, version=version), 10)
        bench.lifecycle = Lifecycle.ASLEEP
        assert bench.told() is None


def test_a_new_epoch_is_fenced_before_it_is_staged() -> None:
    bench = Bench()
    bench.weights.fence_epoch = 2
    bench.bring(WeightsVersion(WeightsId(epoch=2, version=0), SOURCE))
    assert bench.told() == (RequireRequest(epoch=2), 10)
    for slot in ((1, "Staging"), (3, "Staged")):
        bench.stage(*slot)
        assert bench.told() == (RequireRequest(epoch=2), 10), "else the old trainer stages again"
    bench.sim.staged, bench.sim.fence_epoch = None, 2
    assert isinstance(bench.body(), StageRequest)
    bench.sim.fence_epoch = 1
    bench.bring()
    assert isinstance(bench.body(), StageRequest), "an update of the old epoch ends"


@pytest.mark.parametrize("state", ["Paused", "Asleep"])
def test_a_worker_that_came_to_rest_has_proven_itself_once(state: str) -> None:
    bench = Bench(state=state)
    bench.pod = replace(bench.pod, gate=False)
    assert bench.gate() is None, "it serves still"
    bench.sim.hold = state
    change = bench.change()
    assert (change.serving, change.proven_since) == (False, NOW)
    bench.pod = replace(bench.pod, proven_since=NOW)
    assert bench.gate() is None


def test_what_a_worker_has_proven_stays_with_its_gate() -> None:
    bench = Bench()
    bench.pod = replace(bench.pod, gate=False)
    change = bench.change()
    assert (change.serving, change.proven_since) == (True, NOW)
    bench.pod = replace(bench.pod, proven_since=NOW - 50)
    change = bench.change()
    assert change.proven_since == NOW - 50
    bench.pod = replace(bench.pod, gate=True)
    change = bench.change(leaving=True)
    assert (change.serving, change.proven_since) == (False, NOW - 50)


def test_one_control_call_at_a_time_and_staging_beside_it() -> None:
    bench = Bench()
    bench.bring(commit=False)
    bench.running = frozenset({ControlVerb.REQUIRE})
    assert isinstance(bench.body(), StageRequest)
    bench.running = frozenset({ControlVerb.STAGE})
    assert bench.told() is None
    bench.sim.required = None
    assert isinstance(bench.body(), RequireRequest)
    bench.running = frozenset({ControlVerb.REQUIRE})
    assert bench.told() is None
    bench.running = frozenset({ControlVerb.COMMIT})
    assert bench.told() is None


@pytest.mark.parametrize("waiting", [ControlVerb.WAKE, ControlVerb.PAUSE, ControlVerb.RESUME])
def test_sleep_does_not_wait_for_a_call_that_may_wait_for_who_wants_it(
    waiting: ControlVerb,
) -> None:
    """A worker that wakes waits for its device, which the trainer keeps until the worker sleeps."""
    bench = Bench(state="Asleep")
    bench.running = frozenset({waiting})
    [call] = bench.planner.plan_calls(bench.head)
    assert (call.verb, waiting in call.instead_of) == (ControlVerb.SLEEP, True)
    bench.stage()
    [call] = bench.planner.plan_calls(bench.head)
    assert (call.verb, waiting in call.instead_of) == (ControlVerb.DISCARD, True)
    for other in (ControlVerb.COMMIT, ControlVerb.REQUIRE, ControlVerb.DISCARD):
        bench.running = frozenset({other})
        assert bench.planner.plan_calls(bench.head) == []


def test_a_failed_call_waits_for_its_turn_unless_it_was_about_something_else() -> None:
    bench = Bench()
    bench.bring(commit=False)
    bench.failures = {"stage": FailedCall("no", 1, 6, about=ONE)}
    assert bench.told() is None
    assert bench.wait.seconds == 6
    bench.failures = {"stage": FailedCall("no", 1, 0, about=ONE)}
    assert bench.told() is not None
    bench.failures = {"stage": FailedCall("no", 1, 6, about=ZERO)}
    assert bench.told() is not None
    bench.failures = {"require": FailedCall("no", 1, 6)}
    bench.sim.required = None
    assert bench.told() is None
    assert bench.wait.seconds == 6


def test_the_gate_is_on_for_the_process_that_serves() -> None:
    bench = Bench()
    assert bench.gate() is None
    bench.pod = replace(bench.pod, gate=False)
    assert bench.gate() == (True, "b1")
    bench.pod = replace(bench.pod, gate=True, gate_boot="b0")
    assert bench.gate() == (True, "b1"), "another process answers now"
    bench.sim.required = None
    assert bench.gate() == (False, "b1")


@pytest.mark.parametrize("why", ["leaving", "out", "below", "not serving", "paused", "suspend"])
def test_the_gate_goes_off(why: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "paused": {"state": "Paused"},
        "suspend": {"suspend": True},
    }
    bench = Bench(**changes.get(why, {}))
    if why == "out":
        bench.weights.out_of_service = {bench.pod.uid}
        bench.running = frozenset({ControlVerb.COMMIT})
    if why == "below":
        bench.sim.jump(WeightsId(epoch=0, version=9))
        bench.sim.required = None
        bench.lifecycle = None
    if why == "not serving":
        bench.sim.foreign_hold = "Paused"
    assert bench.gate(why == "leaving") == (False, "b1")
    bench.pod = replace(bench.pod, gate=False)
    assert bench.gate(why == "leaving") is None


def test_a_worker_below_committed_has_no_gate_though_it_says_that_it_serves() -> None:
    bench = Bench()
    bench.sim.jump(WeightsId(epoch=0, version=9))
    bench.sim.required = WeightsId(epoch=0, version=0)
    assert bench.sim.serving
    assert bench.gate() == (False, "b1")


def test_neither_silence_nor_a_commit_turns_the_gate() -> None:
    bench = Bench()
    bench.sim.required = None
    bench.running = frozenset({ControlVerb.COMMIT})
    assert bench.gate() is None
    bench.running, bench.sim.silent = frozenset(), True
    assert bench.gate() is None
    assert bench.gate(leaving=True) == (False, "b1"), "told by the gate itself"


def head(**changes: Any) -> ReplicaHead:
    bench = Bench()
    for field, value in changes.items():
        setattr(bench, field, value)
    return bench.head


def test_who_is_in_service() -> None:
    assert head().is_in_service(ZERO)
    assert not head().is_in_service(ONE)
    for lifecycle in ("Pausing", "Paused", "Draining"):
        assert head(lifecycle=Lifecycle(lifecycle)).is_in_service(ZERO)
    for lifecycle in ("Asleep", "Waking", "Loading", "Failed"):
        assert not head(lifecycle=Lifecycle(lifecycle)).is_in_service(ZERO)
    fenced = Bench()
    fenced.sim.required = None
    assert not fenced.head.is_in_service(ZERO)


def test_a_head_with_other_bytes_is_told_of_once() -> None:
    bench = Bench()
    bench.stage(root_hash="other")
    bench.failures = {"stage": FailedCall("no", 1, NOW, about=ONE)}
    (told,) = stage_failures([bench.head], NEW)
    assert told.startswith("pool-0-0: content-mismatch")


@pytest.mark.parametrize("gate", [True, False])
def test_a_silent_head_that_this_process_never_heard_is_judged_by_its_gate(gate: bool) -> None:
    bench = Bench()
    bench.sim.silent = True
    bench.pod = replace(bench.pod, gate=gate, ready=gate)
    assert bench.head.is_in_service(ZERO), "it was once, and is perhaps paused since"
    assert bench.head.boot_id == "b1", "known by its gate"
    bench.pod = replace(bench.pod, gate=False, gate_boot=None)
    assert not bench.head.is_in_service(ZERO), "it never was"
    bench.pod = replace(bench.pod, gate_boot="b1", phase="Failed")
    assert not bench.head.is_in_service(ZERO), "its process has ended"


def test_a_silent_head_is_judged_by_its_last_answer() -> None:
    bench = Bench()
    last = bench.sim.state()
    for hold, required, serves in (
        ("Paused", ZERO, True),
        ("Asleep", ZERO, False),
        (None, None, False),
    ):
        bench.sim.foreign_hold, bench.sim.required = hold, required
        worker = ObservedWorker(None, "no answer", last=bench.sim.state())
        head = ReplicaHead(replace(bench.pod, gate=False, gate_boot=None), worker)
        assert head.is_in_service(ZERO) == serves
        assert (head.boot_id, head.last_active, head.is_silent) == (last.boot_id, ZERO, True)
        assert worker.active is None, "what it serves now is not known"


def test_what_counts_as_staged() -> None:
    bench = Bench()
    assert not bench.head.has_staged(NEW)
    bench.stage()
    assert bench.head.has_staged(NEW)
    for version, phase, path in ((2, "Staged", None), (1, "Staging", None), (1, "Staged", "/x")):
        bench.stage(version, phase, path)
        assert not bench.head.has_staged(NEW)
    bench.sim.jump(TWO)
    assert bench.head.has_staged(NEW)


def test_why_a_head_has_failed() -> None:
    bench = Bench()
    assert bench.head.failure_message(ONE, "stage") is None
    bench.stage(phase="Failed")
    assert bench.head.failure_message(ONE, "stage") == "pool-0-0: staging failed"
    assert bench.head.failure_message(ONE, "commit") is None
    assert bench.head.failure_message(TWO, "stage") is None
    assert bench.head.failure_message(None, "stage") is None
    bench.stage(phase="Failed", error="a bad shape")
    assert bench.head.failure_message(ONE, "stage") == "pool-0-0: a bad shape"
    bench.failures = {"stage": FailedCall("refused", 1, 0, about=ONE)}
    assert bench.head.failure_message(ONE, "commit", "stage") == "pool-0-0: refused"
    assert bench.head.failure_message(TWO, "stage") is None
    bench.failures = {"wake": FailedCall("no memory", 1, 0)}
    assert bench.head.failure_message(None, "wake") == "pool-0-0: no memory"
