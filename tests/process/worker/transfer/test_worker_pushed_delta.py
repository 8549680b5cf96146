"""Versions that come as what differs from the one that serves: what is told, refused, applied and used again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollout_common.transfer.connections.frames import Frame, Kind
from rollout_common.transfer.memory.slot import Slot
from rollout_common.wire.root_hash import LEAF_BYTES
from rollout_worker.engine import EngineError
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.schemas import PushedBytes, StagedWeights
from rollout_worker.sources.pushed.arrived_deltas import DeltaBase
from tests.support.unit.pushing import (
    Version,
    base_of,
    holder,
    publish,
    push,
    pushed_worker,
    stage,
    tensors_of,
    trainer,
)
from tests.support.unit.tiny_worker import TinyWorker, refused
from tests.support.waiting import until

LARGE = tensors_of(5)


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[TinyWorker]:
    async with pushed_worker(tmp_path / "a") as made:
        yield made


def changed(base: Version, places: Mapping[int, int]) -> Version:
    """A version with other values at these places of the tensor `number`."""
    tensors = {}
    for each in base.layout.tensors:
        content = bytearray(base.slot.view_tensor(each))
        for place, value in places.items() if each.name == "number" else ():
            content[place] = value
        tensors[each.name] = (each.dtype, each.shape, bytes(content))
    return Version.of(tensors)


async def staged_on(
    worker: TinyWorker, version: int, base: Version, kind: str = "tcp", **fields: object
) -> StagedWeights:
    """Stage (1, version), which may come as what differs from (1, version - 1)."""
    pushed = {"base": base_of(version - 1, base), **fields}
    return await stage(worker, version, source={"pushed": pushed})


async def delta(worker: TinyWorker, version: int, base: Version, given: Version) -> Frame:
    """Bring (1, version) as what differs from the version before; returns the last word."""
    begun = await staged_on(worker, version, base)
    assert begun.transfer is not None

    def send() -> Frame:
        assert begun.transfer is not None
        with trainer(begun.transfer, given, "tcp") as end:
            end.base = base
            end.whole(begun.transfer, base=base_of(version - 1, base))
            assert sorted(end.sent) == list(range(len(given.pieces)))
            return end.answer()

    return await asyncio.to_thread(send)


async def test_what_differs_is_enough_once_the_base_serves(worker: TinyWorker) -> None:
    versions = [Version(number) for number in range(1, 6)]
    await publish(worker, 1, versions[0])
    for number in range(2, 6):
        base, given = versions[number - 2 : number]
        told = await delta(worker, number, base, given)
        assert (told.kind, told.head.get("root_hash")) == (Kind.STAGED, given.root_hash)
        assert worker.engine.active.number == number - 1, "the base serves until the commit"
        await worker.commit(number)
        assert worker.engine.active.number == number
        kept = worker.updates.to_view().kept
        assert kept is not None
        assert kept.root_hash == given.root_hash


async def test_a_base_that_came_through_shared_memory_will_do(worker: TinyWorker) -> None:
    base, given = Version(1), Version(2)
    pushing = asyncio.create_task(push(worker, 1, base, "unix"))
    assert (await pushing).error is None
    await worker.commit(1)
    assert (await delta(worker, 2, base, given)).kind is Kind.STAGED
    await worker.commit(2)
    assert worker.engine.active.number == 2


async def test_a_stage_with_a_base_takes_whole_bytes_and_shared_memory_too(
    worker: TinyWorker,
) -> None:
    await publish(worker, 1, Version(1))
    for number, kind in ((2, "tcp"), (3, "unix")):
        begun = await staged_on(worker, number, Version(number - 1))
        assert begun.transfer is not None
        with trainer(begun.transfer, Version(number), kind) as end:
            await asyncio.to_thread(end.whole, begun.transfer)
            assert (await asyncio.to_thread(end.answer)).kind is Kind.STAGED
        await worker.commit(number)
        assert worker.engine.active.number == number


async def test_memory_is_used_again_and_both_deltas_are_applied_to_it(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed: list[bool] = []
    known = DeltaBase._renewed

    def watched(self: DeltaBase, *given: object) -> bool:
        renewed.append(known(self, *given))  # type: ignore[arg-type]
        return renewed[-1]

    monkeypatch.setattr(DeltaBase, "_renewed", watched)
    versions = [Version(number) for number in range(1, 6)]
    await publish(worker, 1, versions[0])
    handles = []
    for number in range(2, 6):
        assert (await delta(worker, number, *versions[number - 2 : number])).kind is Kind.STAGED
        slot = worker.slot
        assert slot.incoming is not None
        assert slot.incoming.memory is not None
        handles.append(slot.incoming.memory.handle)
        await worker.commit(number)
        await until(lambda: worker.updates.pushes.spare.nbytes > 0, what="the one before")
    assert handles[0::2] == [handles[0]] * 2
    assert handles[1::2] == [handles[1]] * 2, "two slots, in turn"
    assert renewed == [False, True, True, True], "once the version before the base is there"


async def test_what_was_begun_as_whole_bytes_is_not_taken_for_the_version_before(
    worker: TinyWorker,
) -> None:
    versions = [Version(number) for number in range(1, 5)]
    await publish(worker, 1, versions[0])
    for number in (2, 3):
        await delta(worker, number, *versions[number - 2 : number])
        await worker.commit(number)
        await until(lambda: worker.updates.pushes.spare.nbytes > 0, what="the one before")
    begun = await staged_on(worker, 4, versions[2])
    assert begun.transfer is not None
    with trainer(begun.transfer, versions[3], "tcp") as end:
        end.hello(begun.transfer, base=base_of(3, versions[2]))
        await asyncio.to_thread(end.ready)
        end.announce()
        await asyncio.to_thread(end.asked)
        end.piece(0, b"\xff" * len(versions[3].piece(0)))
        assert await asyncio.to_thread(end.asked) == [0]
        end.delta(versions[2])
        end.end()
        assert (await asyncio.to_thread(end.answer)).kind is Kind.STAGED


async def test_replicas_with_the_same_base_pass_deltas_on(tmp_path: Path) -> None:
    base, given = Version(1), Version(2)
    async with pushed_worker(tmp_path / "a") as a, pushed_worker(tmp_path / "b") as b:
        for each in (a, b):
            await publish(each, 1, base)
        first, last = [(await staged_on(each, 2, base)).transfer for each in (a, b)]
        assert first is not None
        assert last is not None
        with trainer(first, given, "tcp") as to_a, trainer(last, given, "tcp") as to_b:
            to_b.hello(last, base=base_of(1, base), holders=[holder(first, "a")])
            await asyncio.to_thread(to_b.ready)
            to_a.base = base
            await asyncio.to_thread(to_a.whole, first, base=base_of(1, base))
            to_b.end()
            for end in (to_a, to_b):
                assert (await asyncio.to_thread(end.answer)).kind is Kind.STAGED
            assert to_b.sent == []
        slot = b.slot
        assert slot.incoming is not None
        assert list(slot.incoming.deltas.by_offset) == [0], "it came as a delta"
        for each in (a, b):
            await each.commit(2)
            assert each.engine.active.number == 2


async def test_a_cut_transfer_goes_on_with_deltas_where_nothing_is_there(
    worker: TinyWorker, any_size: None
) -> None:
    base = Version(1, LARGE)
    given = changed(base, {0: 2, 3 * LEAF_BYTES + 5: 9})
    await publish(worker, 1, base)
    begun = await staged_on(worker, 2, base)
    assert begun.transfer is not None
    with trainer(begun.transfer, given, "tcp") as end:
        end.hello(begun.transfer, base=base_of(1, base))
        await asyncio.to_thread(end.ready)
        end.announce([0, 1])
        end.give(await asyncio.to_thread(end.asked))
        slot = worker.slot
        await until(lambda: slot.to_view().chunks == 2, what="two pieces")
    with trainer(begun.transfer, given, "tcp") as end:
        end.base = base
        await asyncio.to_thread(end.whole, begun.transfer, base=base_of(1, base))
        assert sorted(end.sent) == list(range(2, len(given.pieces)))
        assert (await asyncio.to_thread(end.answer)).kind is Kind.STAGED
    await worker.commit(2)
    assert worker.engine.active.number == 2


async def test_a_base_that_does_not_serve_with_its_bytes_is_refused(worker: TinyWorker) -> None:
    base = Version(1)
    with refused("wrong-base") as caught:
        await staged_on(worker, 2, base)
    assert "stage without source.pushed.base" in str(caught.value)
    await publish(worker, 1, base)
    for named in (Version(9), base):
        if named is base:
            worker.updates.pushes.drop_kept()
        with refused("wrong-base"):
            await staged_on(worker, 2, named)
    assert worker.updates.slot is None


async def test_a_base_with_another_layout_or_without_room_is_refused(tmp_path: Path) -> None:
    async with pushed_worker(tmp_path, "--staging-memory", "600") as worker:
        base = Version(1)
        await publish(worker, 1, base)
        with refused("wrong-base") as caught:
            await staged_on(worker, 2, base, layout_id="xxh3_128:other")
        assert "it has the layout" in str(caught.value)
        with refused("wrong-base") as caught:
            await staged_on(worker, 2, base, bytes=1000)
        assert "stagingMemory" in str(caught.value)
        assert (await staged_on(worker, 2, base, bytes=512)).transfer is not None


async def test_others_go_on_while_a_stage_waits_for_memory_that_is_still_being_freed(
    worker: TinyWorker,
) -> None:
    base, freed = Version(1), threading.Event()
    await publish(worker, 1, base)
    worker.updates.freeing.free_soon(lambda: freed.wait(20))
    begin = time.monotonic()
    asyncio.get_running_loop().call_later(0.1, freed.set)
    assert (await staged_on(worker, 2, base, bytes=512)).transfer is not None
    assert time.monotonic() - begin < 5, "the timer waited, too"


async def test_a_stage_that_was_begun_without_a_base_gets_none_later(worker: TinyWorker) -> None:
    base = Version(1)
    await publish(worker, 1, base)
    await stage(worker, 2)
    with refused("wrong-base") as caught:
        await staged_on(worker, 2, base)
    assert "being staged without one" in str(caught.value)


def test_peers_give_whole_versions() -> None:
    peer = {"host": "a", "port": 1, "ticket": "0" * 32}
    base = {"epoch": 1, "version": 1, "root_hash": "x"}
    with pytest.raises(ValidationError, match="leave base out"):
        PushedBytes.model_validate({"peers": [peer], "base": base})


async def test_memory_of_before_goes_with_pushed_weights_and_into_sleep(worker: TinyWorker) -> None:
    spare, size = worker.updates.pushes.spare, Version(1).layout.nbytes
    for sleeps in (True, False):
        at = worker.active.version + 1 if worker.active else 1
        for version in (at, at + 1):
            await publish(worker, version, Version(version))
        await until(lambda: spare.nbytes == size, what="memory to be used again")
        if sleeps:
            await worker.sleep(level=1)
            assert spare.nbytes == 0
            await worker.wake()
        else:
            await worker.update(at + 2, 7)
            await until(lambda: spare.nbytes == 0, what="it to go")


def test_memory_of_before_counts_as_staged_and_makes_room() -> None:
    staging = StagingBudget(1000)
    staging.spare.keep_memory(Slot(600))
    staging.claim_memory(400)
    assert staging.spare.nbytes == 600
    give_back = staging.claim_memory(500)
    assert staging.spare.nbytes == 0
    with pytest.raises(EngineError, match="100 bytes are left"):
        staging.claim_memory(200)
    give_back()
    staging.spare.keep_memory(Slot(64))
    assert staging.spare.take_memory(65) is None, "it is of another size"
    staging.spare.keep_memory(Slot(64))
    assert staging.spare.take_memory(64) is not None
    assert staging.spare.take_memory(64) is None


async def test_one_root_hash_for_shared_memory_tcp_and_deltas(
    worker: TinyWorker, any_size: None
) -> None:
    """Of tensors of several leaves: what a trainer's plain loop computes, a worker finds."""
    base = Version(1, LARGE)
    given = changed(base, {3: 7, 5 * LEAF_BYTES - 1: 7})
    for number, kind in ((1, "tcp"), (2, "unix")):
        told = await push(worker, number, given, kind)
        assert (told.error, told.root_hash) == (None, given.root_hash)
    await publish(worker, 3, base)
    last = await delta(worker, 4, base, given)
    assert (last.kind, last.head.get("root_hash")) == (Kind.STAGED, given.root_hash)
