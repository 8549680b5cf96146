"""What else goes wrong with a push: other trainers, replays, no memory, lost answers, the commit.

The table in docs/weights-faults.md is this list, as `table` writes it.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import mmap
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollout_common.transfer.held_version import HeldVersion
from rollout_common.transfer.memory import mapped_memory as maps
from rollout_common.transfer.memory import slot
from rollout_common.transfer.memory.memory_limits import LIMIT
from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import EngineCrashed, EngineError
from rollout_worker.ports import weights_port as port
from rollout_worker.schemas import DiscardRequest, StageRequest, Transfer
from rollout_worker.sources.pushed import trainer_connection as receiving
from rollout_worker.sources.pushed.incoming_version import IncomingVersion
from tests.support.unit.arrows import (
    KINDS,
    ROOM,
    SECONDS,
    STEPS,
    do,
    goes_on,
    hurry,
    left,
    not_ready_or_serves,
    serves,
)
from tests.support.unit.pushing import (
    Trainer,
    Version,
    publish,
    pushed_worker,
    quiet,
    stage,
    ticket,
    trainer,
)
from tests.support.unit.tiny_engine import raising
from tests.support.unit.tiny_worker import TinyWorker, refused
from tests.support.waiting import until

PAGE = Path(__file__).parents[3] / "docs" / "weights-faults.md"
WAYS = ("shared memory", "TCP")
TCP, SHARED = ("TCP",), ("shared memory",)
OLD, NEW = 1, 7
"""What the weights are that serve, and that come."""
COMING = 5
"""The version that comes."""


@dataclass
class Scene:
    """A worker that serves, and a trainer that brings the next version.

    `done`: how many of the arrows it has sent; `transfer`: what its stage was answered.
    """

    worker: TinyWorker
    end: Trainer
    transfer: Transfer
    way: str
    patch: pytest.MonkeyPatch
    done: int = 0

    async def play(self, until_: str | None = None) -> None:
        """Go on as a sound trainer does, up to an arrow, or to the last one."""
        steps = STEPS[self.way]
        upto = len(steps) if until_ is None else steps.index(until_)
        for step in steps[self.done : upto]:
            await asyncio.to_thread(do, self.end, self.transfer, step)
        self.done = upto

    async def begin(self) -> None:
        """Go on until the bytes are due, or for shared memory have begun to come."""
        await self.play("PIECE" if self.way == "TCP" else "FILLED")

    async def reach_staged(self) -> None:
        """Go on to the last arrow, and wait until the worker has staged it."""
        await self.play()
        await self.phase("Staged")

    async def phase(self, phase: str) -> None:
        """Wait for a phase of the slot."""
        slot = self.worker.slot
        await until(lambda: slot.to_view().phase == phase, what=f"{phase}, it is {slot.to_view()}")

    async def told(self) -> str:
        """Return what the trainer is told last, if it is told."""
        frame = await asyncio.to_thread(self.end.answer)
        return f"{frame.kind.name} {frame.head.get('slug')} {frame.head.get('detail')}"

    async def another(self, transfer: Transfer) -> str:
        """Call with a ticket; returns how that was answered."""
        with trainer(transfer, Version(8), KINDS[self.way]) as end:
            end.hello(transfer)
            frame = await asyncio.to_thread(end.answer)
            return f"{frame.kind.name} {frame.head.get('slug')}"

    async def stages(self, caller: str = "another trainer", **fields: Any) -> str:
        """Stage what somebody else wants; returns what they are told."""
        body = {"epoch": 1, "version": COMING, "source": {"pushed": {}}, **fields}
        try:
            async with asyncio.timeout(SECONDS):
                view = await self.worker.updates.stage_weights(
                    caller, StageRequest.model_validate(body)
                )
        except ProblemError as problem:
            return problem.slug
        return f"{view.phase}, {'no ticket' if view.transfer is None else 'a ticket'}"

    async def discards(self) -> str:
        """Discard what comes."""
        request = DiscardRequest(epoch=1, version=COMING)
        async with asyncio.timeout(SECONDS):
            return (await self.worker.updates.discard_staged("me", request)).outcome

    async def commits(self, **fields: Any) -> str:
        """Commit what comes; returns how that is answered."""
        try:
            return f"version {(await self.worker.commit(COMING, **fields)).active.version}"
        except ProblemError as problem:
            return problem.slug


Act = Callable[[Scene], Awaitable[str]]


# Two trainers, and tickets that are void.


async def ticket_in_use(scene: Scene) -> str:
    scene.patch.setattr(receiving, "TAKEOVER_SECONDS", 0.4)
    scene.patch.setattr(port, "LEASE_SECONDS", 5.0)
    await scene.begin()
    return await scene.another(scene.transfer)


async def ticket_of_a_frozen_one(scene: Scene) -> str:
    scene.patch.setattr(receiving, "TAKEOVER_SECONDS", 0.2)
    scene.patch.setattr(port, "LEASE_SECONDS", 5.0)
    await scene.begin()
    with trainer(scene.transfer, Version(NEW), KINDS[scene.way]) as end:
        await asyncio.to_thread(end.whole, scene.transfer)
        scene.done = len(STEPS[scene.way])
        return (await asyncio.to_thread(end.answer)).kind.name


async def replay_after_staged(scene: Scene) -> str:
    await scene.reach_staged()
    return await scene.another(scene.transfer)


async def replay_after_failed(scene: Scene) -> str:
    await scene.begin()
    scene.end.connection.close()
    await scene.phase("Failed")
    return await scene.another(scene.transfer)


async def replay_after_discarded(scene: Scene) -> str:
    await scene.begin()
    await scene.discards()
    return await scene.another(scene.transfer)


async def replay_after_committed(scene: Scene) -> str:
    await scene.reach_staged()
    await scene.commits()
    return await scene.another(scene.transfer)


async def voided(scene: Scene) -> str:
    again = await stage(scene.worker, COMING)
    former, scene.transfer = scene.transfer, again.transfer or scene.transfer
    return await scene.another(former)


def stages_meanwhile(caller: str = "another trainer", **fields: Any) -> Act:
    """Somebody stages while the bytes come."""

    async def act(scene: Scene) -> str:
        await scene.begin()
        return await scene.stages(caller, **fields)

    return act


async def other_content(scene: Scene) -> str:
    await scene.begin()
    told = await scene.stages(root_hash="xxh3_128_tree:" + "0" * 32)
    await scene.play()
    return told


async def higher_version(scene: Scene) -> str:
    await scene.begin()
    await scene.stages(version=COMING + 1)
    return await scene.told()


async def higher_epoch(scene: Scene) -> str:
    await scene.begin()
    await scene.stages(epoch=2)
    told = await scene.told()
    await scene.worker.updates.discard_staged("me", DiscardRequest(epoch=2, version=COMING))
    return told


async def discarded(scene: Scene) -> str:
    await scene.begin()
    await scene.discards()
    return await scene.told()


# No memory.


async def no_budget(scene: Scene) -> str:
    give_back = scene.worker.updates.pushes._claim(100)
    scene.end.hello(scene.transfer)
    told = await scene.told()
    give_back()
    return told


async def no_memory(scene: Scene) -> str:
    scene.patch.setattr(slot, "memory_left", lambda *_: (0, LIMIT))
    scene.end.hello(scene.transfer)
    told = await scene.told()
    scene.patch.undo()
    return told


async def no_page(scene: Scene) -> str:
    """The kernel has no page for a piece of what is there in part."""
    await scene.begin()
    scene.patch.setattr(os, "pwrite", _full)
    await scene.play("END")
    told = await scene.told()
    scene.patch.undo()
    return told


async def no_mapping(scene: Scene) -> str:
    await scene.play("MEMORY")
    scene.patch.setattr(maps, "map_private", _full)
    await scene.play("FILLED")
    told = await scene.told()
    scene.patch.undo()
    return told


async def no_slot(scene: Scene) -> str:
    refuses = raising(EngineError("there is no room on the device"))
    scene.worker.engine.before["open_slot"] = refuses
    await scene.begin()
    told = await scene.told()
    del scene.worker.engine.before["open_slot"]
    return told


def _full(*_: object) -> mmap.mmap:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


# Answers that nobody reads.


async def gone_at_ready(scene: Scene) -> str:
    scene.end.hello(scene.transfer)
    scene.end.connection.close()
    return ""


async def frozen_at_ready(scene: Scene) -> str:
    scene.end.hello(scene.transfer)
    return ""


async def gone_at_staged(scene: Scene) -> str:
    """Gone before the worker has read all that it sent: nobody takes its progress any more."""
    for owner, name in ((HeldVersion, "mark_piece"), (IncomingVersion, "advance")):
        scene.patch.setattr(owner, name, _late(getattr(owner, name)))
    await scene.play()
    scene.end.connection.close()
    return ""


def _late(noted: Callable[..., None]) -> Callable[..., None]:
    def late(*given: Any) -> None:
        time.sleep(0.1)
        noted(*given)

    return late


async def frozen_at_staged(scene: Scene) -> str:
    await scene.reach_staged()
    await quiet()  # the worker has given its connection up
    return ""


async def gone_before_commit(scene: Scene) -> str:
    await scene.play()
    told = await scene.told()
    scene.end.connection.close()
    await quiet()
    return told


async def gone_at_released(scene: Scene) -> str:
    await scene.reach_staged()
    told = await scene.commits()
    scene.end.connection.close()
    return told


async def frozen_at_released(scene: Scene) -> str:
    """It is silent for longer than its lease, and what serves are its pages."""
    await scene.reach_staged()
    told = await scene.commits()
    await quiet()  # the worker has given its connection up
    return told


# The commit.


async def early_commit(scene: Scene) -> str:
    await scene.begin()
    return await scene.commits()


async def other_root(scene: Scene) -> str:
    await scene.reach_staged()
    return await scene.commits(root_hash="xxh3_128_tree:" + "0" * 32)


async def discarded_before_commit(scene: Scene) -> str:
    await scene.reach_staged()
    _, told = await asyncio.gather(scene.discards(), scene.commits())
    return told


async def discarded_in_commit(scene: Scene) -> str:
    """The commit waits for a request that runs, the discard for the commit."""
    worker = scene.worker
    await scene.reach_staged()
    worker.engine.free = False
    running = await worker.runs("running")
    committing = asyncio.create_task(scene.commits())
    await until(lambda: worker.runtime.holds.committing is not None, what="the commit")
    discarding = asyncio.create_task(scene.discards())
    await asyncio.sleep(0)
    output = await worker.ends(running)
    assert set(output.token_ids) == {OLD}
    told = await committing
    assert await discarding == "unchanged"
    return told


async def refused_by_the_engine(scene: Scene) -> str:
    await scene.reach_staged()
    scene.worker.engine.before["commit"] = raising(EngineError("it can't"))
    told = await scene.commits()
    del scene.worker.engine.before["commit"]
    return told


async def death_in_commit(scene: Scene) -> str:
    await scene.reach_staged()
    scene.worker.engine.before["commit"] = raising(EngineCrashed("it is dead"))
    told = await scene.commits()
    scene.worker.engine.die()
    return told


async def death_in_transfer(scene: Scene) -> str:
    await scene.begin()
    scene.worker.engine.die()
    return await scene.told()


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that goes wrong.

    `at`: the arrow. `told`: what who errs is told, or else the trainer. `slot`: what becomes of it, which
    is `Staged` (and then commits), `Failed` for what it `says`, `free`, or `committed`.
    `ways`: on which ways. `pings`: whether the trainer says that it is there. `dies`: the engine does.
    """

    name: str
    at: str
    act: Act
    told: str
    slot: str
    says: str = ""
    ways: tuple[str, ...] = WAYS
    pings: bool = True
    dies: bool = False


IN_USE = "ERROR bad-ticket"
TROUBLES = (
    Trouble("a second connection with a ticket in use", "HELLO", ticket_in_use, IN_USE, "Staged"),
    Trouble("a second connection, the first one frozen", "HELLO", ticket_of_a_frozen_one, "STAGED",
            "Staged", ways=TCP, pings=False),
    Trouble("a ticket replayed once it is staged", "HELLO", replay_after_staged, IN_USE, "Staged"),
    Trouble("a ticket replayed once it failed", "HELLO", replay_after_failed, IN_USE, "Failed",
            "the sender is gone"),
    Trouble("a ticket replayed after a discard", "HELLO", replay_after_discarded, IN_USE, "free"),
    Trouble("a ticket replayed after the commit", "HELLO", replay_after_committed, IN_USE,
            "committed"),
    Trouble("a ticket that a repeated stage voided", "HELLO", voided, IN_USE, "Staged"),
    Trouble("another trainer stages the same version", "stage", stages_meanwhile(),
            "Staging, no ticket", "Staged"),
    Trouble("the same trainer stages it again", "stage", stages_meanwhile("me"),
            "Staging, a ticket", "Staged"),
    Trouble("another trainer stages the same version with another hash", "stage", other_content,
            "Staging, no ticket", "Failed", "content-mismatch"),
    Trouble("another trainer stages a lower version", "stage",
            stages_meanwhile(version=COMING - 1), "version-regressed", "Staged"),
    Trouble("another trainer stages in a lower epoch", "stage",
            stages_meanwhile(epoch=0, version=COMING + 1), "stale-epoch", "Staged"),
    Trouble("another trainer stages a higher version", "stage", higher_version, "given up", "free"),
    Trouble("another trainer stages in a higher epoch", "stage", higher_epoch, "given up", "free"),
    Trouble("a discard while it transfers", "stage", discarded, "discarded", "free"),
    Trouble("no room by `--staging-memory`", "LAYOUT", no_budget, "ERROR no-room", "Failed",
            "stagingMemory", ways=TCP),
    Trouble("no memory left to the process", "LAYOUT", no_memory, "ERROR no-room", "Failed",
            "there is no room", ways=TCP),
    Trouble("the kernel has no page left", "PIECE", no_page, "FAILED", "Failed",
            "Cannot allocate memory", ways=TCP),
    Trouble("the kernel does not map the trainer's memory", "MEMORY", no_mapping,
            "ERROR bad-memory", "Failed", "Cannot allocate memory", ways=SHARED),
    Trouble("the engine has no room", "slot", no_slot, "FAILED", "Failed", "no room on the device"),
    Trouble("the trainer is killed", "READY", gone_at_ready, "", "Failed", "the sender is gone"),
    Trouble("the trainer freezes", "READY", frozen_at_ready, "", "Failed", "the sender is gone",
            pings=False),
    Trouble("the trainer is killed", "STAGED", gone_at_staged, "", "Staged"),
    Trouble("the trainer freezes", "STAGED", frozen_at_staged, "", "Staged", pings=False),
    Trouble("the trainer is killed after `STAGED`", "commit", gone_before_commit, "STAGED",
            "Staged"),
    Trouble("the trainer is killed", "RELEASED", gone_at_released, "version 5", "committed",
            ways=SHARED),
    Trouble("the trainer freezes", "RELEASED", frozen_at_released, "version 5", "committed",
            ways=SHARED, pings=False),
    Trouble("a commit before all is there", "commit", early_commit, "not-staged", "Staged"),
    Trouble("a commit of another root hash", "commit", other_root, "content-mismatch", "Staged"),
    Trouble("a discard just before", "commit", discarded_before_commit, "not-staged", "free"),
    Trouble("a discard while it waits for requests", "commit", discarded_in_commit, "version 5",
            "committed"),
    Trouble("the engine refuses", "commit", refused_by_the_engine, "engine-refused", "Failed",
            "it can't"),
    Trouble("the engine dies", "commit", death_in_commit, "failed", "Failed", "it is dead",
            dies=True),
    Trouble("the engine dies", "PIECE", death_in_transfer, "FAILED", "free", dies=True),
)  # fmt: skip
CASES = [
    pytest.param(way, trouble, id=f"{way.split()[-1]}-{trouble.at}-{trouble.name}")
    for trouble, way in itertools.product(TROUBLES, WAYS)
    if way in trouble.ways
]


@pytest.fixture
async def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TinyWorker]:
    hurry(monkeypatch)
    async with pushed_worker(tmp_path / "a", *ROOM) as made:
        yield made


@pytest.mark.parametrize(("way", "trouble"), CASES)
async def test_either_version_serves_or_none_and_nothing_is_left(
    worker: TinyWorker, way: str, trouble: Trouble
) -> None:
    await publish(worker, 1, Version(OLD))
    before = await left(worker)
    transfer = await ticket(worker, COMING)
    with pytest.MonkeyPatch.context() as patch, trainer(transfer, Version(NEW), KINDS[way]) as end:
        scene = Scene(worker, end, transfer, way, patch)
        if trouble.pings:
            end.keep_alive()
        slot = worker.slot
        assert trouble.told in (told := await trouble.act(scene)), told
        if trouble.slot == "Staged":
            await serves(worker, OLD)
            await scene.play()
            await scene.phase("Staged")
            assert await scene.commits() == f"version {COMING}"
        elif trouble.slot == "Failed":
            await until(lambda: slot.error is not None, what="the slot to end")
            assert trouble.says in str(slot.error)
        now = time.monotonic()
        serving = NEW if trouble.slot in ("Staged", "committed") else OLD
        if trouble.dies:
            await not_ready_or_serves(worker, serving)
        else:
            await serves(worker, serving, now)
        if serving == OLD:
            with refused("not-staged"):
                await worker.commit(COMING)
    await goes_on(worker, before)


ENDS = {
    "Staged": ("`Staged`", "the old weights; the new ones at the commit"),
    "free": ("is free", "the old weights"),
    "committed": ("is free", "the new weights"),
    "Failed": ("`Failed`", "the old weights"),
}


def table() -> str:
    """The list as docs/weights-faults.md shows it."""
    lines = ["| fault | at | the answer | the slot | what serves |", "|---|---|---|---|---|"]
    for each in TROUBLES:
        slot, serving = ENDS[each.slot]
        slot += f": “…{each.says}…”" if each.says else ""
        serving = f"nothing (`NotReady`), then {serving}" if each.dies else serving
        told = f"“…{each.told}…”" if each.told == "given up" else f"`{each.told}`"
        line = (each.name, f"`{each.at}`", told if each.told else "nobody reads it", slot, serving)
        lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_in_the_docs() -> None:
    assert table() in PAGE.read_text(), f"docs/weights-faults.md must hold:\n{table()}"
