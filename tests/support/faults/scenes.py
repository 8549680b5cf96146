"""A cluster in memory on which a story is played, and the judge of all that happens there meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from tests.support.faults.faulty_operator import FaultyOperator
from tests.support.faults.memory_api import Change, MemoryApi
from tests.support.faults.memory_nodes import Nodes, make_trainer
from tests.support.faults.memory_wire import Act, MemoryServer
from tests.support.unit.virtualtime import VirtualLoop

T = TypeVar("T")

EPOCH = 1_000_000_000.0
POOL = ("rolloutreplicas", "rl", "math")
QUIET_SECONDS = 12.0
"""A pool at rest, whose heads are polled every five seconds, writes nothing for so long."""
END_SECONDS = 400.0
"""A watch that stands still counts as dead after 135 s, and a pod of a lost node goes after about as long."""
LATE_END_SECONDS = 2000.0
"""A call of which nothing comes, such as sleep, is tried again after ten minutes, and two may be lost."""
START_SECONDS = 8.0
COMMIT = "weights/commit"

Spec = Mapping[str, Any]
Accident = Callable[["Scene", FaultyOperator, str, Act], Awaitable[tuple[int, bytes]]]
"""Happens in a scene instead of an act of an operator: what that is, and does."""


@dataclass(frozen=True)
class Base:
    """A cluster at rest, from which stories start."""

    snapshot: tuple[Any, ...]
    uids: int
    nodes: Nodes
    now: float


@dataclass(frozen=True)
class Story:
    """What happens to a pool, how it must end, and what must hold all the while.

    Attributes:
        act: What happens.
        missing: Returns what is missing of the end; empty: it is reached.
        floor: So many replicas serve all the while.
        before: Spec of the pool that is at rest before; None: there is none.
    """

    name: str
    act: Callable[[Scene], None]
    missing: Callable[[Scene], str]
    floor: int
    before: Spec | None


@dataclass(eq=False)
class Scene:
    """See the module. `problems` are what the judge has found."""

    base: Base | None
    plan: Mapping[int, Accident] = field(default_factory=dict)
    """What happens instead of acts, by their number since the story began (from 1)."""
    floor: int = 0
    acts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        loop, start = asyncio.get_running_loop(), self.base.now if self.base else EPOCH
        self.clock: Callable[[], float] = lambda: start + loop.time()
        self.playing, self.patience = False, END_SECONDS
        self.skew = 0.0
        """How wrong the operator's wall clock is."""
        self.api = MemoryApi(self.clock)
        self.nodes = Nodes(self.api)
        if self.base is not None:
            self.api.restore(self.base.snapshot)
            self.api.uids = self.base.uids
            self.nodes = self.base.nodes.copy_to(self.api)
        self.server = MemoryServer(self.api)
        self.decided: set[tuple[int, int]] = {(0, 0)}
        self.operators: list[FaultyOperator] = []
        self.late: list[FaultyOperator] = []
        """Frozen ones."""
        self.restorable: tuple[Any, ...] | None = None
        self.api.on_change.append(self._note_decision)
        for pool in self.api.of("rolloutreplicas"):
            self._note_decision(Change(0, "rolloutreplicas", "ADDED", pool))
        self.others: list[asyncio.Task[None]] = [asyncio.create_task(self._turn())]
        """The nodes, and who else acts."""

    # What stories see and do.

    @property
    def pool(self) -> Obj:
        return self.api.get(POOL)

    @property
    def pods(self) -> list[Obj]:
        found = self.api.of("pods", "rl")
        return [pod for pod in found if names.LABEL_POOL in pod["metadata"]["labels"]]

    def make_pool(self, spec: Spec) -> None:
        """Let a user create the pool, and a trainer's pods first if it is beside them."""
        for number in range(spec["replicas"] if "colocation" in spec else 0):
            make_trainer(self.api, number)
        body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "spec": dict(spec)}
        self.api.create("rolloutreplicas", body | {"metadata": {"namespace": "rl", "name": "math"}})

    def edit(self, **spec: Any) -> None:
        self.api.patch(POOL, {"spec": spec}, "merge", "")

    def served(self) -> int:
        """Return how many replicas serve, as Services see it and in truth."""
        count = 0
        for pod in self.pods:
            process = self.nodes.processes.get(pod["metadata"]["uid"])
            ready = any(
                c["type"] == "Ready" and c["status"] == "True"
                for c in pod["status"].get("conditions", ())
            )
            there = process is not None and process.node not in self.nodes.lost
            if ready and there and process is not None and process.worker.serving:
                count += not pod["metadata"].get("deletionTimestamp")
        return count

    # The operator's processes.

    async def send_act(self, operator: FaultyOperator, what: str, act: Act) -> tuple[int, bytes]:
        """Let an operator do one act, or the accident that is planned for it happen."""
        self.acts.append(what)
        accident = self.plan.get(len(self.acts)) if self.playing else None
        if accident is None:
            return operator.do(what, act)
        # Who can't commit what others serve leaves the Service until it can.
        self.floor -= what.startswith(COMMIT)
        return await accident(self, operator, what, act)

    def start_operator(self) -> None:
        """Start a process that leads."""
        made = FaultyOperator(
            self.server,
            self.nodes,
            lambda: self.clock() + self.skew,
            self.send_act,
            self._watch_act,
        )
        self.operators.append(made)

    def succeed(self, seconds: float) -> None:
        """Let another process lead after so many seconds."""
        asyncio.get_running_loop().call_later(seconds, self.start_operator)

    def thaw(self) -> None:
        """What frozen processes had begun takes effect now, at last."""
        for operator in self.late:
            for what, act in operator.late:
                operator.do(what, act)
        self.late.clear()

    async def end(self) -> None:
        for task in self.others:
            task.cancel()
        await asyncio.gather(*self.others, return_exceptions=True)
        for operator in self.operators:
            await operator.end()

    # Accidents.

    def delete_a_pod(self) -> None:
        """Somebody deletes the last pod by force, and it counts as none that has to serve."""
        if self.pods:
            name = self.pods[-1]["metadata"]["name"]
            self.api.delete(("pods", "rl", name), grace=0)
            self.floor -= 1

    def go_down(self, seconds: float) -> None:
        """The API server ends, and starts again after so long."""
        self.server.up = False
        self.server.end_watches()
        asyncio.get_running_loop().call_later(seconds, self._come_up)

    def _come_up(self) -> None:
        self.server.up = True

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Etcd comes back from a snapshot, with the API server; what was made since is gone."""
        self.go_down(3.0)
        self.api.restore(snapshot)
        self.floor = 0

    def set_skew(self, seconds: float) -> None:
        """Set how wrong the operator's clock is."""
        self.skew = seconds

    async def play(self, story: Story) -> None:
        """Play a story to its end; what is frozen then goes on, or what was kept comes back."""
        self.start_operator()
        await asyncio.sleep(START_SECONDS)
        self.acts.clear()
        self.playing, self.floor = True, story.floor
        story.act(self)
        await self.settle(story.missing)
        if self.late:
            self.thaw()
            await self.settle(story.missing)
        if self.restorable is not None:
            self.restore(self.restorable)
            await self.settle(story.missing)

    # The judge.

    async def settle(self, missing: Callable[[Scene], str]) -> None:
        """Wait until the end is reached and nothing moves; a problem if that takes too long."""
        loop = asyncio.get_running_loop()
        end, since, before = loop.time() + self.patience, loop.time(), None
        while (now := loop.time()) < end:
            state = self.api.version, len(self.acts)
            if state != before or missing(self):
                since, before = now, state
            elif now - since >= QUIET_SECONDS:
                break
            await asyncio.sleep(1)
        else:
            self.problems.append(f"no end: {missing(self) or 'it writes without end'}")
        owners = {pool["metadata"]["uid"] for pool in self.api.of("rolloutreplicas")}
        for (kind, _, name), obj in self.api.objects.items():
            refs = obj["metadata"].get("ownerReferences", ())
            ours = names.LABEL_MANAGED_BY in obj["metadata"].get("labels", ())
            if ours and not any(ref["uid"] in owners for ref in refs):
                self.problems.append(f"a ghost: {kind} {name}")

    async def _turn(self) -> None:
        while True:
            await asyncio.sleep(1)
            self.nodes.turn()
            self._judge()

    def _judge(self) -> None:
        running = [p.pod for p in self.nodes.processes.values() if p.node not in self.nodes.lost]
        for name in {each for each in running if running.count(each) > 1}:
            self._note(f"two processes of pod {name}")
        if self.served() < self.floor:
            self._note(f"less than {self.floor} replicas serve")

    def _watch_act(self, what: str) -> None:
        verb, _, rest = what.partition(" ")
        if verb == COMMIT:
            body = json.loads(rest.partition(" ")[2])
            if (body["epoch"], body["version"]) not in self.decided:
                self._note(f"a commit without a decision: {what}")

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def _note_decision(self, change: Change) -> None:
        if change.resource != "rolloutreplicas" or change.kind == "DELETED":
            return
        self.decided |= decided_weights(change.obj)


def decided_weights(pool: Obj) -> set[tuple[int, int]]:
    """Return the weights (epoch, version) that a pool's status lets workers commit."""
    weights = (pool.get("status") or {}).get("weights") or {}
    update, committed = weights.get("lastUpdate") or {}, weights.get("committed")
    found = [committed] if committed else []
    if update.get("commitStartedAt") or update.get("phase") in ("Committing", "Complete"):
        found.append(update)
    return {(each["epoch"], each["version"]) for each in found}


class _Loop(VirtualLoop):
    """Does at once what threads are to do: in this loop nothing may wait for anything outside."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - its waiter gets it
            done.set_exception(error)
        return done


class _Errors(logging.Handler):
    """Keeps what should never be logged: tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@contextlib.contextmanager
def _quiet() -> Iterator[list[str]]:
    handler, logger, level = _Errors(), logging.getLogger("rollout_operator"), 0
    level, logger.level = logger.level, logging.ERROR
    logger.addHandler(handler)
    logging.getLogger("rollout_operator").manager._clear_cache()  # type: ignore[attr-defined]
    try:
        yield handler.found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def play(part: Callable[[], Any]) -> Any:
    """Run a coroutine function in virtual time; the same each time."""
    random.seed(1)
    real = time.time
    with asyncio.Runner(loop_factory=_Loop) as runner, _quiet() as errors:
        loop = runner.get_loop()
        time.time = lambda: EPOCH + loop.time()  # the poller's, for messages
        try:
            found = runner.run(part())
        finally:
            time.time = real
    assert not errors, errors[:3]
    return found


def spec_key(spec: Spec) -> str:
    """Return what `at_rest` takes."""
    return json.dumps(spec)


def _moves(scene: Scene) -> str:
    found = (scene.pool.get("status") or {}).get("conditions", ())
    still = any((c["type"], c["status"]) == ("Progressing", "False") for c in found)
    return "" if still else "rest"


@cache
def at_rest(spec: str) -> Base:
    """Return a cluster in which a pool of this spec (JSON) is at rest."""

    async def part() -> Base:
        scene = Scene(None)
        scene.start_operator()
        scene.make_pool(json.loads(spec))
        await scene.settle(_moves)
        await scene.end()
        assert not scene.problems, scene.problems
        return Base(scene.api.snapshot(), scene.api.uids, scene.nodes, scene.clock() + 60)

    return play(part)  # type: ignore[no-any-return]
