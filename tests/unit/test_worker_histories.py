"""Any order of verbs, updates, deaths and requests: every token is what its label says it is."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import given, note, settings
from hypothesis import strategies as st

from rollout_worker.requests.flights import Flight
from rollout_worker.schemas import DiscardRequest, Lifecycle
from rollout_worker.wire.problems import ProblemError
from tiny_worker import LONG, TinyWorker, tiny_worker
from waiting import until

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
FIELDS: dict[str, dict[str, Sequence[Any]]] = {
    "step": {"count": (1, 2, 3)},
    "update": {"in_flight": POLICIES, "on_deadline": ("Abort", "Keep")},
    "pause": {"holder": HOLDERS, "mode": MODES},
    "resume": {"holder": HOLDERS},
    "sleep": {"holder": HOLDERS, "mode": MODES, "level": (1, 2), "tags": TAGS},
    "wake": {"holder": HOLDERS, "tags": TAGS},
}


def drawn(random: Random) -> list[Action]:
    """A history of as many actions as a commit, a sleep and what leads to them need."""
    names = random.choices(NAMES, k=random.randint(4, 12))
    return [
        (name, {key: random.choice(among) for key, among in FIELDS.get(name, {}).items()})
        for name in names
    ]


class History:
    """A worker, what was asked of it, and which weights bear which identity."""

    def __init__(self, worker: TinyWorker) -> None:
        self.worker = worker
        self.flights: list[Flight] = []
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
        if all(self.worker.engine.resident.values()):
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
        await self.worker.updates.discard("me", request)

    async def _die(self) -> None:
        restarts = self.worker.runtime.restarts
        self.worker.engine.die()
        self.worker.runtime.crashed("the history says so")
        await until(lambda: self.worker.runtime.restarts > restarts, what="the restart")
        await until(lambda: self.worker.runtime.lifecycle.has_engine, what="the engine")

    def check(self) -> None:
        """What holds after every call."""
        worker, state = self.worker, self.worker.worker.state()
        assert "commit" not in {hold.holder for hold in state.holds}
        slot = state.weights.staged
        assert len(worker.engine.sinks) == (slot is not None and slot.phase == "Staged")
        if not state.resident.weights:
            assert slot is None, "what is staged goes with the active weights"
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

    def _judge(self, flight: Flight) -> None:
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
