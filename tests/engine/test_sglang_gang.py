"""A real SGLang of two ranks, on one node, and on two: here two engines with a /dev/shm of their own each.

SGLang takes ranks that share a /dev/shm for those of one node.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from rollout_worker.engine import (
    Engine,
    EngineMember,
    GangMembership,
    Sink,
    TensorEntry,
    WeightsRefill,
)
from rollout_worker.engines import EngineOptions, create_engine, create_member
from rollout_worker.engines.sglang.sglang_engine import SglangEngine
from rollout_worker.observe.processes import command_line_of, find_descendants
from rollout_worker.schemas import MemoryTag
from tests.support.engine.engine_kinds import KINDS
from tests.support.engine.engines import (
    PROMPT,
    TWO_RANKS_ON_A_CPU,
    V1,
    V2,
    Staged,
    nothing,
    request,
    run,
    sglang_options,
    staged,
    update,
)
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

PYTHON = KINDS["sglang"].python
NOTICED_SECONDS = 10.0
EVERYTHING: tuple[MemoryTag, ...] = ("weights", "kv_cache")


class Two:
    """The head's engine, the member, and which ranks belong to whom."""

    def __init__(self, options: Callable[[int], EngineOptions]) -> None:
        self.head: Engine = create_engine("sglang", options(0))
        self.member: EngineMember = create_member("sglang", options(1))
        self.beside: Sink | None = None

    async def start(self) -> None:
        """Start both, as neither comes up alone."""
        before = find_descendants(os.getpid())
        starts = (self.head.start(lambda _: None), self.member.start(lambda _: None))
        info, beside = await asyncio.gather(*starts)
        assert beside.root_hash == info.root_hash
        assert beside.layout == info.layout
        new = find_descendants(os.getpid()) - before
        ranks = sorted(
            (each for each in new if command_line_of(each.pid).startswith("sglang::scheduler")),
            key=lambda each: command_line_of(each.pid),
        )
        assert len(ranks) == 2, [command_line_of(each.pid) for each in new]
        self.ranks = [each.pid for each in ranks]  # by tensor rank: the head's, the member's

    async def stage(self, folder: Path) -> Staged:
        """Fill a slot on both nodes, the member's under the id of the head's."""
        if self.beside is not None:
            self.beside.close()
        version = await staged(self.head, folder)
        assert version.sink.slot
        beside = cast("Engine", _Slot(self.member, version.sink.slot))
        self.beside = (await staged(beside, folder)).sink
        return version

    async def update(self, folder: Path, identity: Any, kv: Any) -> None:
        """Stage and commit."""
        version = await self.stage(folder)
        await self.head.pause()
        await self.head.commit(identity, version.sink, kv)
        await self.head.resume()

    def refill(self, folder: Path) -> WeightsRefill:
        """What the worker gives to `wake`; the member's slot is freed at the next update."""

        async def refill(*, on_disk: bool = False) -> Sink:
            return (await self.stage(folder)).sink

        return refill

    async def stop(self) -> None:
        """Stop both."""
        await asyncio.gather(self.head.stop(), self.member.stop())


class _Slot:
    """What `fill` wants of an engine, on the member's side."""

    def __init__(self, member: EngineMember, slot: str) -> None:
        self._member = member
        self._slot = slot

    async def open_slot(self, entries: Sequence[TensorEntry], *, on_disk: bool = False) -> Sink:
        return await self._member.open_slot(self._slot, entries, on_disk=on_disk)


@asynccontextmanager
async def two_nodes(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Two]:
    """Run a gang of two nodes on loopback."""
    for name, value in TWO_RANKS_ON_A_CPU.items():
        monkeypatch.setenv(name, value)
    node = tmp_path / "node"
    mount = "mount -t tmpfs none /dev/shm"
    node.write_text(
        f'#!/bin/sh\nexec unshare --mount sh -c \'{mount} && exec "$@"\' sh {PYTHON} "$@"\n'
    )
    node.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def options(rank: int) -> EngineOptions:
        slots = tmp_path / f"slots-{rank}"
        slots.mkdir()
        gang = GangMembership(nodes=2, rank=rank, leader="127.0.0.1", port=port, slots=slots)
        return sglang_options(tiny_models.model(1), python=node, spill_dir=tmp_path, gang=gang)

    two = Two(options)
    try:
        await two.start()
        yield two
    finally:
        await two.stop()


async def told(alive: Callable[[], str | None], *, wrong: bool = True) -> str:
    """Wait until somebody says that something is wrong, or no longer does."""
    until = time.monotonic() + NOTICED_SECONDS
    while (alive() is None) == wrong:
        assert time.monotonic() < until, f"not noticed within {NOTICED_SECONDS:g} s"
        await asyncio.sleep(0.5)  # the supervisor's interval
    return alive() or ""


async def test_two_nodes_make_the_tokens_of_one_rank_and_miss_nobody(
    tiny_models: TinyModels,
    reference: Reference,
    reference_2: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_nodes(tiny_models, tmp_path, monkeypatch) as two:
        before = await run(two.head, request("before", max_tokens=24))
        assert before.token_ids == reference.greedy(PROMPT, 24)

        long = asyncio.create_task(run(two.head, request("across", max_tokens=200)))
        await two.update(tiny_models.weights(2), V1, "recompute")
        after = await run(two.head, request("after", max_tokens=24))
        assert after.token_ids == reference_2.greedy(PROMPT, 24)
        assert (await long).versions[-1] == (1, False)

        await two.head.pause()
        await two.head.sleep(1, EVERYTHING, nothing)
        await two.head.wake(EVERYTHING, nothing)
        await two.head.sleep(1, EVERYTHING, nothing)
        await two.head.sleep(2, EVERYTHING, nothing)
        await two.head.wake(EVERYTHING, two.refill(tiny_models.weights(2)))
        await two.head.resume()
        awake = await run(two.head, request("awake", max_tokens=24))
        assert awake.token_ids == after.token_ids

        for rank, alive in zip(two.ranks, (two.head.alive, two.member.alive), strict=True):
            os.kill(rank, signal.SIGSTOP)
            assert f"{rank}) is stopped" in await told(alive)
            os.kill(rank, signal.SIGCONT)
            await told(alive, wrong=False)
        await two.update(tiny_models.weights(1), V2, "recompute")
        assert (await run(two.head, request("again", max_tokens=24))).token_ids == before.token_ids

        os.kill(two.ranks[1], signal.SIGKILL)
        assert "ended" in await told(two.member.alive)
        await told(two.head.alive)


async def test_two_ranks_of_one_node_make_the_tokens_of_one(
    tiny_models: TinyModels,
    reference: Reference,
    reference_2: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in TWO_RANKS_ON_A_CPU.items():
        monkeypatch.setenv(name, value)
    engine = SglangEngine(sglang_options(tiny_models.model(1), python=PYTHON))
    try:
        await engine.start(lambda _: None)
        assert engine._parts is not None
        assert engine._parts.versions._facts["ranks"] == 2
        before = await run(engine, request("before", max_tokens=24))
        assert before.token_ids == reference.greedy(PROMPT, 24)
        await update(engine, tiny_models.weights(2), V1, "recompute")
        after = await run(engine, request("after", max_tokens=24))
        assert after.token_ids == reference_2.greedy(PROMPT, 24)
        await engine.pause()
        await engine.sleep(1, EVERYTHING, nothing)
        await engine.wake(EVERYTHING, nothing)
        await engine.resume()
        awake = await run(engine, request("awake", max_tokens=24))
        assert awake.token_ids == after.token_ids
    finally:
        await engine.stop()
