"""Any order of verbs, updates, deaths, requests and turns: every token is what its label says it is.

And where a trainer has the device by turns, nobody has memory of it out of turn, and nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import given, note, settings
from hypothesis import strategies as st

from rollout_common.turn import Turn, TurnTimeout
from rollout_common.wire.problems import ProblemError
from rollout_worker.requests.in_flight_requests import InFlightRequest
from rollout_worker.schemas import DiscardRequest, Lifecycle
from tests.support.unit.tiny_worker import LONG, TinyWorker, tiny_worker
from tests.support.waiting import until

SOON: dict[str, Any] = {"deadline_seconds": 0.01}
HOLDERS = ("operator", "trainer")
TAGS = (("weights",), ("kv_cache",), ("weights", "kv_cache"))

Action = tuple[str, dict[str, Any]]

# More often what leaves requests running: only they can come to span versions.
MODES = ("keep", "keep", "keep", "drain", "abort")
POLICIES = ("Pin", "Pin", "Pin", "Keep", "Recompute", "Drain", "Abort")
NAMES = (
    *("begin", "begin", "step", "stage", "update", "update", "update", "discard"),
    *("pause", "resume", "sleep", "sleep", "sleep", "wake", "wake", "die"),
)
TURNS = ("train", "train", "train", "trained", "trained")
"""What there is to do besides where a trainer uses the device by turns."""
GPU = "gpu-0"
FIELDS: dict[str, dict[str, Sequence[Any]]] = {
    "step": {"count": (1, 2, 3)},
    "update": {"in_flight": POLICIES, "on_deadline": ("Abort", "Keep")},
    "pause": {"holder": HOLDERS, "mode": MODES},
    "resume": {"holder": HOLDERS},
    "sleep": {"holder": HOLDERS, "mode": MODES, "level": (1, 2), "tags": TAGS},
    "wake": {"holder": HOLDERS, "tags": TAGS, "load": (True, False)},
}


def drawn(random: Random, more: Sequence[str] = ()) -> list[Action]:
    """A history of as many actions as a commit, a sleep and what leads to them need."""
    names = random.choices((*NAMES, *more), k=random.randint(4, 12))
    return [
        (name, {key: random.choice(among) for key, among in FIELDS.get(name, {}).items()})
        for name in names
    ]


class History:
    """A worker, what was asked of it, and which weights bear which identity."""

    def __init__(self, worker: TinyWorker) -> None:
        self.worker = worker
        self.flights: list[InFlightRequest] = []
        self.numbers = {(0, 0): 100}
        self.version = 0

    async def do(self, name: str, fields: dict[str, Any]) -> None:
        """Do it, or be refused by name."""
        calls: dict[str, Callable[..., Coroutine[Any, Any, object]]] = {
            "begin": self._begin,
            "step": self._step,
            "stage": self._stage,
            "update": self._update,
            "discard": self._discard,
            "die": self._die,
            "pause": lambda **more: self.worker.pause(**more, **SOON),
            "sleep": lambda **more: self.worker.sleep(**more, **SOON),
            "resume": self.worker.resume,
            "wake": self.worker.wake,
        }
        refusal = None
        try:
            await calls[name](**fields)
        except ProblemError as error:
            refusal = error
        assert refusal is None or refusal.slug != "internal-error", str(refusal)

    async def _begin(self) -> None:
        active = self.worker.active
        assert active is not None
        for bounds in ({"exact_version": active.version}, {}):
            name = f"r{len(self.flights)}"
            self.flights.append(await self.worker.begin(name, LONG, **bounds))
        await self._step(count=2)

    async def _step(self, *, count: int) -> None:
        engine = self.worker.engine
        if all(engine.resident.values()) and not engine.empty:
            self.worker.engine.step(count)
        await asyncio.sleep(0)

    async def _stage(self) -> None:
        self.version += 1
        self.numbers[1, self.version] = self.version
        await self.worker.stage(self.version, self.version)

    async def _update(self, **fields: Any) -> None:
        await self._stage()
        await self.worker.commit(self.version, **fields, **SOON)

    async def _discard(self) -> None:
        request = DiscardRequest(epoch=1, version=self.version)
        await self.worker.updates.discard_staged("me", request)

    async def _die(self) -> None:
        runtime = self.worker.runtime
        if runtime.engine is None:  # the last one is gone already: only the next one can die
            if runtime.hold_target().is_all_released:
                return
            await until(lambda: runtime.engine is not None, what="an engine that can die")
        restarts = runtime.restarts
        self.worker.engine.die()
        runtime.report_crash("the history says so")
        if runtime.turn is not None and runtime.hold_target().is_all_released:
            await until(lambda: runtime.engine is None, what="its burial")
            await self.worker.reaches(Lifecycle.ASLEEP)
            return
        await until(lambda: runtime.restarts > restarts, what="the restart")
        await until(lambda: runtime.lifecycle.has_engine, what="the engine")

    def check(self) -> None:
        """What holds after every call."""
        worker, state = self.worker, self.worker.worker.worker_state()
        assert "commit" not in {hold.holder for hold in state.holds}
        if not worker.runtime.lifecycle.has_engine:  # none, or one that loads what was active
            assert not state.serving
            return
        slot = state.weights.staged
        assert len(worker.engine.sinks) == (slot is not None and slot.phase == "Staged")
        if not state.resident.weights:
            assert slot is None, "what is staged goes with the active weights"
        assert not (state.serving and state.weights.active is None)
        if state.resident.weights and state.weights.active is None:
            return
        assert not worker.engine.empty
        assert self.numbers[worker.engine.active.identity.as_tuple()] == worker.engine.active.number
        assert worker.engine.active.identity == worker.active

    async def finish(self) -> None:
        """Open it again; then every request ends, as it was told that it would."""
        for holder in HOLDERS:
            await self.do("wake", {"holder": holder})
            await self.do("resume", {"holder": holder})
        await self.worker.reaches(Lifecycle.ACTIVE)
        for flight in self.flights:
            await self.worker.ends(flight)
            self._judge(flight)

    def _judge(self, flight: InFlightRequest) -> None:
        [output] = flight.outputs
        assert (output.abort_reason is None) is (len(output.token_ids) == LONG)
        edges = [0, *(span.end for span in output.spans)]
        assert [span.start for span in output.spans] == edges[:-1]
        assert edges[-1] == len(output.token_ids)
        for span in output.spans:
            identity = (span.epoch, span.version)
            made = set(output.token_ids[span.start : span.end])
            assert made == {self.numbers[identity]}
            assert flight.exact is None or flight.exact.as_tuple() == identity


class TurnHistory(History):
    """The same with a trainer that takes the device when it can."""

    def __init__(self, worker: TinyWorker, trainer: Turn) -> None:
        super().__init__(worker)
        self.trainer = trainer
        self.overlaps: list[str] = []
        judged = {"wake": self._judge_turn, "start": self._judge_turn}
        worker.engine.before.update(judged)
        worker.before_start.update(judged)

    async def _judge_turn(self) -> None:
        if self.trainer.held:
            self.overlaps.append("an engine takes memory in the trainer's turn")

    async def do(self, name: str, fields: dict[str, Any]) -> None:
        """Do it; what has to wait for the trainer gets its turn when it waits."""
        if name == "train":
            await self._train()
        elif name == "trained":
            self.trainer.give()
        else:
            doing = asyncio.create_task(super().do(name, fields))
            while not doing.done():
                turn = self.worker.worker.worker_state().turn
                if turn is not None and turn.waiting_for:
                    self.trainer.give()
                await asyncio.wait({doing}, timeout=0.01)
            await doing

    async def _train(self) -> None:
        released = self.worker.runtime.hold_target().is_all_released
        try:
            await self.trainer.take_async(5 if released else 0)
        except TurnTimeout:
            assert not released, "who sleeps keeps nobody waiting"

    def check(self) -> None:
        """Who has memory has the turn."""
        super().check()
        assert not self.overlaps
        engine = self.worker.runtime.engine
        resident = engine is not None and any(self.worker.engine.resident.values())
        assert not (resident and self.trainer.held)
        turn = self.worker.worker.worker_state().turn
        assert turn is not None
        assert turn.state == "Held" if resident else True

    async def finish(self) -> None:
        """Wake it, as often as it takes: who died asleep loads first."""
        self.trainer.give()
        await self._wake()
        await super().finish()

    async def _wake(self) -> None:
        for holder in HOLDERS:
            await self.do("wake", {"holder": holder})
        await until(lambda: self.worker.runtime.is_alive, what="an engine")
        await until(lambda: self.worker.runtime.lifecycle.has_engine, what="the engine")


async def run_in_turns(actions: list[Action]) -> None:
    with tempfile.TemporaryDirectory() as home:
        trainer = Turn(Path(home), [GPU], "trainer-0")
        flags = ("--turn-directory", home, "--turn-devices", GPU)
        async with tiny_worker(Path(home), *flags, rows=5) as worker:
            history = TurnHistory(worker, trainer)
            for name, fields in actions:
                await history.do(name, fields)
                history.check()
            await history.finish()


async def run(actions: list[Action]) -> None:
    with tempfile.TemporaryDirectory() as home:
        async with tiny_worker(Path(home), rows=5) as worker:
            history = History(worker)
            for name, fields in actions:
                await history.do(name, fields)
                history.check()
            await history.finish()


@settings(max_examples=settings().max_examples // 2)  # each takes a worker of its own
@given(st.integers(0, 2**32))
def test_no_history_mixes_weights(seed: int) -> None:
    actions = drawn(Random(seed))
    note(actions)
    asyncio.run(run(actions))


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 2**32))
def test_no_history_with_a_trainer_holds_memory_out_of_turn(seed: int) -> None:
    actions = drawn(Random(seed), TURNS)
    note(actions)
    asyncio.run(run_in_turns(actions))
