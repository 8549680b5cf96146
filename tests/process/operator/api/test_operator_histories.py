"""Whatever happens to a pool: each pass is safe (`safety`), and at rest all is as it was asked for.

Hypothesis draws histories of users, trainers, strangers, accidents and delays.
"""

from __future__ import annotations

import copy
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_operator.api.revision import is_current_revision
from rollout_operator.api.spec import PoolMode, WeightsStrategy
from rollout_operator.core.pass_plan import ControlVerb
from rollout_operator.core.settings import FAILURE_RESET_SECONDS
from rollout_operator.core.updates.weights_plan import target_version
from rollout_worker.schemas import WeightsId
from tests.support.unit.poolspecs import pushed, spec_of, target
from tests.support.unit.simtrainers import SimTrainers
from tests.support.unit.simworker import SimWorker, root_hash
from tests.support.unit.world import World

USER: dict[str, dict[str, object]] = {
    "pause": {"state": "Paused"},
    "sleep": {"state": "Asleep"},
    "wake": {"state": "Active", "suspend": False},
    "suspend": {"suspend": True},
    "up": {"replicas": 3},
    "down": {"replicas": 1},
}
GANG: dict[str, object] = {
    "engine": {"type": "vllm"},
    "parallelism": {"tensor": 2, "nodes": 2},
    "accelerator": {"resource": "nvidia.com/gpu"},
}
BESIDE: dict[str, object] = {
    "mode": "Colocated",
    "colocation": {"trainerSelector": {"matchLabels": {"job": "grpo"}}, "slots": 2},
}
"""Two trainer pods with two devices each."""
SURGE: dict[str, object] = {"updateStrategy": {"maxUnavailable": 0, "maxSurge": 2}}
INSIDE: dict[str, object] = {
    "mode": "Hybrid",
    "colocation": {"trainerSelector": {"matchLabels": {"job": "grpo"}}},
    "replicas": 1,
}
"""The pods are the trainer's own."""
NOT_INSIDE = ("up", "down", "suspend", "template", "unlabel")
"""The API server refuses these; and who loses the trainer's label has left, as when the trainer ends one."""
ACTIONS = (
    *("raise", "raise", "epoch", "template", "up", "down", "pause", "sleep",
      "wake", "wake", "suspend", "kill", "fail", "reboot", "break", "mend", "forget", "intrude",
      "leave", "silence", "unask", "speak", "hold", "let go", "age", "slow", "quick", "lag", "no lag",
      "publishes", "ahead", "ask too much", "ask less", "publish to refusers and rest"),
    *("finalize", "free", "set clock", "refuse writes", "take writes", "unlabel", "make again",
      "drain", "ask to go", "freeze", "dawdle", "cordon", "evict", "uncordon",
      "ask some for much"),
    *("restart trainer", "restart trainer", "end trainer", "more trainers", "all trainers",
      "give claims back", "lose sight of the trainer", "edit slices"),
    *("push", "push", "push", "push to some", "push and die", "point to nothing", "lose copies"),
    *["refuse", "raise", "pause, raise and hush"] * 3,
)  # fmt: skip


class History:
    """A world, and what may happen to it."""

    def __init__(self, strategy: str, random: Random, shape: dict[str, object]) -> None:
        self.random = random
        weights = {"strategy": strategy, "deadlineSeconds": random.choice([4, 600])}
        self.world = World(spec_of(**{"replicas": 2, "weights": weights, **shape}))
        self.trainers: SimTrainers | None = None
        if self.world.spec.mode is PoolMode.COLOCATED:
            self.trainers = SimTrainers(self.world.spec, generated=random.random() < 0.5)
            self.world.trainers = self.trainers

    def happen(self, action: str) -> None:
        """Let this happen, where it can."""
        if self.world.hybrid is not None and action in NOT_INSIDE:
            return
        if action in USER:
            self.world.set(**USER[action])
        else:
            getattr(self, action.replace(",", "").replace(" ", "_"))()

    @property
    def _workers(self) -> list[SimWorker]:
        return list(self.world.workers.values())

    def _some(self) -> list[SimWorker]:
        return [worker for worker in self._workers if self.random.random() < 0.5]

    def _running(self) -> list[str]:
        return [n for n, p in self.world.pods.items() if not p.is_finished and not p.is_deleting]

    def raise_(self, epochs: int = 0) -> None:
        now = target_version(self.world.spec).identity
        version = self.random.randint(0, 3) if epochs else now.version + 1
        self.world.set(weights=target(now.epoch + epochs, version))

    def epoch(self) -> None:
        self.raise_(1)

    def _next(self, epochs: int = 0) -> WeightsId:
        """The identity of the next push: above all that anybody has."""
        now = target_version(self.world.spec).identity
        slots = [w.staged for w in self._workers if w.staged]
        found = [(s.epoch, s.version) for s in slots] + [w.active.as_tuple() for w in self._workers]
        epoch, version = max([now.as_tuple(), *found])
        return WeightsId(epoch=epoch + epochs, version=0 if epochs else version + 1)

    def _point_to(self, identity: WeightsId) -> None:
        self.world.set(weights=pushed(identity.epoch, identity.version))

    def push(self) -> None:
        """A trainer stages on every worker, and moves the pointer once those that serve have it."""
        identity = self._next(epochs=self.random.random() < 0.2)
        took = {worker.boot: worker.push(identity) for worker in self._workers}
        if all(took[worker.boot] for worker in self._workers if worker.serving):
            self._point_to(identity)

    def push_to_some(self) -> None:
        """Some have lost the bytes again by the time that the pointer moves."""
        identity = self._next()
        for worker in self._some():
            worker.push(identity)
        self._point_to(identity)

    def push_and_die(self) -> None:
        identity = self._next(epochs=self.random.random() < 0.2)
        for worker in self._some():
            worker.push(identity)

    def point_to_nothing(self) -> None:
        self._point_to(self._next())

    def lose_copies(self) -> None:
        """Their room is needed for something else."""
        for worker in self._some():
            worker.kept = None

    def template(self) -> None:
        self.world.set(podTemplate={"labels": {"a": str(self.random.random())[:8]}})

    def kill(self) -> None:
        if running := self._running():
            self.world.kill(self.random.choice(running))

    def fail(self) -> None:
        if self.world.hybrid is not None:
            for name in self._running()[:1]:
                self.world.hybrid.end(name)
        elif running := self._running():
            self.world.fail(self.random.choice(running), told=self.random.random() < 0.5)

    def ask_to_go(self) -> None:
        if running := self._running():
            self.world.ask_to_go(self.random.choice(running))

    def cordon(self) -> None:
        """All pods are on this node, also new ones; nobody may be hurt by what that asks for."""
        self.world.cordoned = frozenset({"node-1"})

    def uncordon(self) -> None:
        self.world.cordoned = frozenset()

    def evict(self) -> None:
        """A drain takes what the budget leaves."""
        budget, running = self.world.step().budget, self._running()
        if budget is None or not running:
            return
        pod = self.world.pods[self.random.choice(running)]
        ready = sum(each.ready for each in self.world.pods.values())
        unready_goes = not pod.ready and (budget.unready_go or ready >= budget.min_available)
        if unready_goes or ready > budget.min_available:
            self.world.ask_to_go(pod.name)

    def ask_some_for_much(self) -> None:
        """Trainers leave more work with some than with others."""
        for worker in self._some():
            worker.in_flight = self.random.randint(0, 3)

    def freeze(self) -> None:
        """One rank of a gang stands still; of a pool of single pods `silence` has it."""
        if self.world.spec.parallelism.nodes > 1 and (running := self._running()):
            self.world.freeze(self.random.choice(running))

    def dawdle(self) -> None:
        """Ranks take a while to notice that another one has gone."""
        self.world.gang_seconds = float(self.random.randint(0, 10))

    def edit_slices(self) -> None:
        """Somebody deletes an EndpointSlice, or writes something else into it."""
        if self.world.hybrid is None:
            return
        for name, each in list(self.world.hybrid.slices.items()):
            edited = copy.deepcopy(each)
            match self.random.randrange(4):
                case 0:
                    del self.world.hybrid.slices[name]
                    continue
                case 1:
                    edited["endpoints"] = edited["endpoints"][1:]
                case 2:
                    edited["metadata"]["annotations"] = {"rollout.dev/gates": '{"uid1": 5}'}
                case 3:
                    for endpoint in edited["endpoints"]:
                        endpoint["conditions"]["ready"] = not endpoint["conditions"]["ready"]
            self.world.hybrid.slices[name] = edited

    def restart_trainer(self) -> None:
        if self.trainers is not None:
            self.trainers.restart(self.random.choice(self.trainers.wanted))

    def end_trainer(self) -> None:
        """A pod of the trainer's ends, and nobody makes it again for now."""
        if self.world.hybrid is not None:
            self.world.hybrid.wanted = self.world.hybrid.wanted[:1]
        if self.trainers is not None and len(self.trainers.wanted) > 1:
            name = self.random.choice(self.trainers.wanted)
            self.trainers.wanted.remove(name)
            self.trainers.restart(name)

    def more_trainers(self) -> None:
        """One comes whose name is before or behind those of the others."""
        if self.world.hybrid is not None:
            self.world.hybrid.wanted = ["a", "t-0", "t-1", "t-10"]
        if self.trainers is not None:
            name = self.random.choice(["a", "t-0-b", "t-10"])
            if name not in self.trainers.wanted:
                self.trainers.wanted.append(name)

    def all_trainers(self) -> None:
        if self.world.hybrid is not None:
            self.world.hybrid.wanted = ["t-0", "t-1"]
            self.world.unlabelled.clear()
        if self.trainers is not None:
            for name in {*self.trainers.wanted} - {"t-0", "t-1"}:
                self.trainers.restart(name)
            self.trainers.wanted = ["t-0", "t-1"]

    def give_claims_back(self) -> None:
        """The trainer stops, and its claims are allocated elsewhere when it comes back."""
        if self.trainers is not None:
            self.trainers.sites += 1
            for name in self.trainers.wanted:
                self.trainers.restart(name)

    def lose_sight_of_the_trainer(self) -> None:
        """A new operator has yet to list its pods and claims."""
        if self.world.hybrid is not None:
            self.world.hybrid.listed = False
        if self.trainers is not None:
            self.trainers.listed = False

    def reboot(self) -> None:
        if self.world.hybrid is not None:
            for name in self._running()[-1:]:
                self.world.hybrid.restart(name)
        elif running := [name for name in self._running() if name.endswith("-0")]:
            self.world.reboot(self.world.pods[self.random.choice(running)].replica)

    def break_(self) -> None:
        for worker in self._some():
            worker.broken_stage = self.random.random() < 0.5
            worker.broken_commit = not worker.broken_stage
            worker.other_bytes = f" as {worker.boot} reads it"
        if self._workers:
            self._workers[0].broken_commit = False

    def mend(self) -> None:
        for worker in self._workers:
            worker.broken_stage = worker.broken_commit = False
            worker.other_bytes = ""

    def forget(self) -> None:
        self.world.forget()

    def intrude(self) -> None:
        rank = self.random.randrange(self.world.spec.parallelism.nodes)
        self.world.intrude(self.random.randint(0, 2), rank)

    def leave(self) -> None:
        self.world.strangers.clear()

    def silence(self) -> None:
        if self.world.spec.state == "Active":
            for worker in self._some():
                worker.silent = True

    def pause_raise_and_hush(self) -> None:
        self.world.set(state="Paused", suspend=False)
        self.slow()
        self.world.run()
        self.raise_()
        self.world.step()
        for worker in self._workers:
            worker.silent = True

    def refuse(self) -> None:
        """Nobody can commit, say for lack of memory."""
        for worker in self._workers:
            worker.broken_commit = True

    def unask(self) -> None:
        """A new operator has yet to ask them."""
        self.world.forget()
        for worker in self._some():
            worker.unasked = True

    def speak(self) -> None:
        for worker in self._workers:
            worker.silent = worker.unasked = False

    def hold(self) -> None:
        for worker in self._some():
            worker.foreign_hold = self.random.choice(["Paused", "Asleep"])
            if worker.foreign_hold == "Asleep":
                worker.staged = None  # it is given back with the active weights
                worker.woken = worker.empty = False

    def age(self) -> None:
        """Some come of an image from before weights woke without values."""
        for worker in self._some():
            worker.wakes_empty = worker.empty

    def let_go(self) -> None:
        for worker in self._workers:
            worker.foreign_hold = None

    def slow(self) -> None:
        verbs = (
            ControlVerb.STAGE,
            ControlVerb.COMMIT,
            ControlVerb.SLEEP,
            ControlVerb.WAKE,
            ControlVerb.PAUSE,
            ControlVerb.RESUME,
        )
        self.world.seconds_of = {verb: float(self.random.randint(0, 6)) for verb in verbs}

    def quick(self) -> None:
        self.world.seconds_of = {}

    def lag(self) -> None:
        self.world.lag, self.world.grace = 2.0, float(self.random.randint(0, 5))

    def no_lag(self) -> None:
        self.world.lag = self.world.grace = 0.0

    def finalize(self) -> None:
        """Somebody else's controller wants to see some pods off."""
        pods = [p for p in self.world.pods.values() if not p.is_deleting]
        self.world.held |= {p.uid for p in pods if self.random.random() < 0.5}

    def free(self) -> None:
        self.world.held.clear()

    def set_clock(self) -> None:
        self.world.skew += self.random.choice([-3600.0, 3600.0])

    def refuse_writes(self) -> None:
        kinds = self.random.sample(["status", "gate", "delete", "create"], 2)
        self.world.refuses = lambda kind: kind in kinds and self.random.random() < 0.7

    def take_writes(self) -> None:
        self.world.refuses = lambda kind: False

    def unlabel(self) -> None:
        if running := self._running():
            self.world.unlabelled.add(self.world.pods[self.random.choice(running)].uid)

    def drain(self) -> None:
        self.world.set(drainSeconds=self.random.randint(1, 90))

    def make_again(self) -> None:
        self.world.recreate()

    def publishes(self) -> None:
        """Quicker than they can be staged; nobody may be left behind for it."""
        for action in ("mend", "ask less", "quick"):
            self.happen(action)
        for worker in self._workers:
            worker.unasked = False  # within seconds each poll has ended, one way or the other
        self.world.seconds_of = {ControlVerb.STAGE: 2.0}
        above = (
            self._next()
        )  # whoever pushed without moving the pointer has ended: another one took over
        self.world.set(weights=target(above.epoch, above.version))
        before = {worker.boot: len(worker.commits) for worker in self._workers if worker.serving}
        for _ in range(60):
            self.raise_()
            self.world.step()
        together = self.world.spec.weights.strategy is WeightsStrategy.ALL_AT_ONCE
        if together and any(worker.silent for worker in self._workers):
            return  # nobody commits over what a silent member may have staged
        for worker in self._workers:
            serves = worker.serving and not worker.silent
            assert not serves or len(worker.commits) > before.get(worker.boot, 0), "left behind"

    def publish_to_refusers_and_rest(self) -> None:
        """Some can't commit, and the trainer wants the memory back: it gets it all the same."""
        for action in ("leave", "speak", "let go", "quick", "no lag", "free", "take writes", "wake",
                       "ask less", "raise"):  # fmt: skip
            self.happen(action)
        for worker in self._workers[1:]:
            worker.broken_commit = True
        for _ in range(self.random.randint(2, 12)):
            self.world.step()
        state = self.random.choice(["Paused", "Asleep"])
        self.world.set(state=state)
        for _ in range(40):
            self.world.step()
        assert {worker.lifecycle for worker in self._workers} <= {state}, self.world.status.message

    def ask_too_much(self) -> None:
        """Some engines can't do what the spec asks of a commit."""
        self.world.set(weights={"inFlight": {"policy": "Keep"}})
        for worker in self._some():
            worker.policies = ("Drain", "Abort")

    def ask_less(self) -> None:
        self.world.set(weights={"inFlight": {"policy": "Drain"}})

    def ahead(self) -> None:
        for worker in self._some():
            now = worker.active
            worker.jump(WeightsId(epoch=now.epoch, version=now.version + 9))

    def end_well(self) -> None:
        """Everything that disturbs ends, and all comes to be as asked."""
        for action in ("mend", "ask less", "leave", "speak", "let go", "quick", "no lag", "wake",
                       "free", "take writes", "all trainers", "uncordon"):  # fmt: skip
            self.happen(action)
        world = self.world
        if self.random.random() < 0.5:
            self._push_when_all_listen()
        else:
            # The last version may be bound to bytes that nobody finds any more, who is ahead is not
            # rolled back, and no trainer uses an identity that another one has pushed.
            above = self._next()
            world.set(weights=target(above.epoch, above.version))
        for _ in range(700):
            world.step()
            if _settled(world):
                break
        world.run(400)
        degraded = world.status.find_condition("Degraded")
        if degraded is not None and degraded.reason == "CrashLooping":
            world.tick += FAILURE_RESET_SECONDS  # all have done their work for so long
            world.run(400)

    def _push_when_all_listen(self) -> None:
        """One publish heals all, whatever was lost before; workers need not serve to take it."""
        quiet = 0
        for _ in range(700):
            plan = self.world.step()
            quiet = 0 if plan.create or plan.delete or not self._all_listen() else quiet + 1
            if quiet == 20:
                break
        identity = self._next()
        took = [worker.push(identity) for worker in self._workers]
        assert all(took), self.world.status.message
        self._point_to(identity)

    def _all_listen(self) -> bool:
        """Each wanted worker runs, as it is to stay, and is awake."""
        world = self.world
        heads = [p for p in world.pods.values() if p.rank == 0 and not p.is_deleting]
        theirs = world.hybrid is not None  # pods of no revision of ours, as many as there are
        ready = [
            p
            for p in heads
            if p.uid in world.workers and (theirs or is_current_revision(p.revision, world.spec))
        ]
        awake = [p for p in ready if world.workers[p.uid].lifecycle == "Active"]
        wanted = 2 if theirs else world.spec.replicas
        return len(awake) == len(heads) == wanted


# What the names of actions can't be.
setattr(History, "raise", History.raise_)
setattr(History, "break", History.break_)


def _settled(world: World) -> bool:
    ready = world.status.find_condition("Ready")
    committed = world.status.weights.committed
    return (
        ready is not None
        and ready.status == "True"
        and committed is not None
        and committed.identity == target_version(world.spec).identity
    )


def _each_is_in_its_place(world: World) -> None:
    if world.trainers is None:
        return
    wanted = world.spec.weights.target
    if world.spec.replicas == 1 and wanted is not None and wanted.source.pushed is not None:
        return  # the only copy of pushed weights stays where it is, as long as it may
    for pod in world.pods.values():
        beside = world.trainers.pods[f"t-{pod.replica // 2}"]
        claim = world.trainers.claims[beside.claims[0]]
        assert pod.taken is not None
        assert (pod.node, pod.taken.claim_uid) == (beside.node, claim.uid)
        assert pod.taken.devices == (claim.devices[pod.replica % 2].name,)


@settings(max_examples=settings().max_examples * 3 // 5)  # some passes each
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(1, 6)), min_size=5, max_size=25),
    st.sampled_from(["AllAtOnce", "Rolling", "Eager"]),
    st.sampled_from([{}, GANG, BESIDE, INSIDE, SURGE, GANG | SURGE]),
    st.randoms(use_true_random=False),
)
def test_any_history_ends_right(
    actions: list[tuple[str, int]], strategy: str, shape: dict[str, object], random: Random
) -> None:
    """Each pass on the way is safe, and at rest all is as asked and nothing is planned any more."""
    history = History(strategy, random, shape)
    for action, passes in actions:
        history.happen(action)
        for _ in range(passes):
            history.world.step()
    history.end_well()
    world = history.world
    status = world.status
    assert {c.type: c.status for c in status.conditions} == {
        "Ready": "True", "Progressing": "False", "Degraded": "False",
        "WeightsSynced": "True", "Asleep": "False", "Suspended": "False",
    }, status.message  # fmt: skip
    assert status.phase == "Ready"
    assert status.weights.committed is not None
    wanted = target_version(world.spec).identity
    assert status.weights.committed.identity == wanted
    assert status.weights.committed.root_hash == root_hash(wanted)
    nodes = world.spec.parallelism.nodes
    pods = list(world.pods.values()) if world.hybrid is None else world.hybrid.members()
    there = {pod.replica for pod in pods}
    assert len(there) == (2 if world.hybrid else world.spec.replicas)
    assert world.trainers is None or there == set(range(len(there))), "devices go by number"
    assert sorted(world.pods) == (["t-0", "t-1"] if world.hybrid else [
        f"pool-{i}-{rank}" for i in sorted(there) for rank in range(nodes)
    ])  # fmt: skip
    _each_is_in_its_place(world)
    assert all(pod.ready for pod in pods)
    for pod in (p for p in pods if p.rank == 0):
        worker = world.workers[pod.uid]
        assert (pod.gate, pod.gate_boot) == (True, worker.boot)
        assert worker.serving
        assert worker.active == wanted
        assert worker.drain in (None, world.spec.drain_seconds), "None: another process since"
    writes = world.hybrid.writes if world.hybrid else 0
    plan = world.step()
    assert world.hybrid is None or world.hybrid.writes == writes, "only what differs is written"
    assert not any((plan.create, plan.delete, plan.gates, plan.calls, plan.notes))
