"""Pushed weights from a trainer's memory to a serving engine, over real sockets and through the whole worker."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_common.transfer.connections.frames import Kind, Refused, TransferError
from rollout_common.transfer.connections.transfer_loop import run_on_loop
from rollout_common.transfer.memory.slot import Slot
from rollout_common.wire.problems import ProblemError
from rollout_worker.lifecycle import governor
from rollout_worker.schemas import DiscardRequest, Lifecycle, OfferRequest, Peer
from rollout_worker.sources.pushed import version_fetching
from rollout_worker.sources.pushed.incoming_version import IncomingVersion
from rollout_worker.sources.pushed.pushed_memory import OwnMemory
from tests.support.unit.pushing import (
    TINY,
    Version,
    held,
    publish,
    push,
    pushed_worker,
    quiet,
    stage,
    ticket,
    trainer,
)
from tests.support.unit.tiny_engine import TinyEngine
from tests.support.unit.tiny_worker import TinyWorker, refused, tiny_worker
from tests.support.waiting import until

WAYS = ("unix", "tcp")


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[TinyWorker]:
    async with pushed_worker(tmp_path / "a") as made:
        yield made


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("takes", [True, False])
async def test_pushed_weights_serve_once_they_are_committed(
    worker: TinyWorker, kind: str, *, takes: bool
) -> None:
    worker.engine.takes = takes
    given = Version(7)
    staged = await push(worker, 1, given, kind)
    assert (staged.phase, staged.root_hash, staged.error) == ("Staged", given.root_hash, None)
    assert staged.source.pushed is not None
    assert staged.chunks == 1
    assert worker.engine.active.number == 100, "the old weights serve"
    answer = await worker.commit(1, root_hash=given.root_hash)
    assert answer.active.root_hash == given.root_hash
    assert worker.engine.active.number == 7
    kept = worker.updates.to_view().kept
    assert kept is not None
    assert (kept.version, kept.root_hash, kept.bytes) == (1, given.root_hash, given.layout.nbytes)


@pytest.mark.parametrize("kind", WAYS)
async def test_nothing_is_left_of_pushed_weights_that_are_gone(
    worker: TinyWorker, kind: str
) -> None:
    for version in (1, 2):  # the memory of the version before stays, for the next one
        await publish(worker, version, Version(version), kind)
    await quiet()
    before = held()
    for version in (3, 4, 5):
        await publish(worker, version, given := Version(version), kind)
        given.slot.close()
    await quiet()
    assert len(held()) == len(before)
    await worker.update(6, 5)
    assert worker.updates.to_view().kept is None
    await quiet()
    assert len(held()) < len(before)


async def test_the_trainer_gets_its_memory_back_when_a_later_version_serves(
    worker: TinyWorker,
) -> None:
    given = Version(7)
    transfer = await ticket(worker, 1)
    with trainer(transfer, given, "unix") as end:
        await asyncio.to_thread(end.whole, transfer)
        assert (await asyncio.to_thread(end.answer)).kind is Kind.STAGED
        await worker.commit(1)
        await worker.stage(2, 8)
        assert not held_back(end), "it is kept for joiners"
        await worker.commit(2)
        assert (await asyncio.to_thread(end.answer)).kind is Kind.RELEASED


async def test_no_commit_waits_until_what_was_kept_is_freed(worker: TinyWorker) -> None:
    await publish(worker, 1, Version(1))
    kept, freed = worker.updates.pushes.kept, list[threading.Thread]()
    committing = list[object]()
    assert kept is not None

    def release() -> None:
        freed.append(threading.current_thread())
        committing.append(worker.runtime.holds.committing)
        kept.release()

    worker.updates.pushes.kept = replace(kept, release=release)
    await publish(worker, 2, Version(2))
    await quiet()
    assert len(freed) == 1
    assert freed != [threading.current_thread()], "the engine would have stood still"
    assert committing == [None], "whoever maps memory would have stood still"


async def test_bytes_that_are_given_up_are_freed_in_a_thread(worker: TinyWorker) -> None:
    await stage(worker, 1)
    slot, freed = worker.updates.slot, list[threading.Thread]()
    assert slot is not None
    assert slot.incoming is not None
    slot.incoming.begin(Version(7).layout)
    memory = await asyncio.to_thread(slot.incoming.take_room)
    memory.on_freed = lambda: freed.append(threading.current_thread())
    await worker.updates.discard_staged("me", DiscardRequest(epoch=1, version=1))
    await quiet()
    assert len(freed) == 1
    assert freed != [threading.current_thread()], "the worker would have stood still"


def held_back(end: object) -> bool:
    """Whether the worker has said that it is done with the memory."""
    frame = end.connection.poll(0.5)  # type: ignore[attr-defined]
    return frame is not None and frame.kind is Kind.RELEASED


async def test_a_trainer_whose_connection_broke_before_it_heard_of_the_end_hears_of_it_in_the_next(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is busy, and has not noticed either when it says so."""
    transfer, given, staged = await ticket(worker, 1), Version(7), IncomingVersion.succeed
    with trainer(transfer, given, "tcp") as first:

        def break_first(incoming: IncomingVersion, root_hash: str) -> None:
            run_on_loop(hold_loop())
            first.connection.close()
            time.sleep(0.1)
            staged(incoming, root_hash)

        monkeypatch.setattr(IncomingVersion, "succeed", break_first)
        with contextlib.suppress(TransferError):
            await asyncio.to_thread(first.whole, transfer)
    await until(lambda: worker.slot.is_staged, what="the version")
    with trainer(transfer, given, "tcp") as second:
        await asyncio.to_thread(second.hello, transfer)
        await asyncio.to_thread(second.ready)
        assert (await asyncio.to_thread(second.answer)).kind is Kind.STAGED


async def hold_loop() -> None:
    """Keep the loop of transfers from everything for a moment."""
    time.sleep(0.3)  # noqa: ASYNC251


async def test_a_dead_holder_is_skipped(worker: TinyWorker) -> None:
    begun = await ticket(worker, 1)
    dead = {"host": "127.0.0.1", "port": 1, "ticket": "0" * 32, "name": "dead"}
    with trainer(begun, Version(7), "tcp") as end:
        await asyncio.to_thread(end.whole, begun, share=[1, 2], holders=[dead])
        assert (await asyncio.to_thread(end.answer)).kind is Kind.STAGED
        assert end.sent == [0], "a piece of the share that is not its own"


async def test_a_joiner_fetches_from_peers_and_drops_those_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_fetching, "PEER_RETRY_SECONDS", 0.01)
    given = Version(7)
    async with pushed_worker(tmp_path / "a") as a, pushed_worker(tmp_path / "b") as b:
        await publish(a, 1, given)
        offered = a.updates.offer_weights("me", OfferRequest(epoch=1, version=1))
        assert (offered.root_hash, offered.bytes) == (given.root_hash, given.layout.nbytes)
        peers = [
            Peer(host="127.0.0.1", port=1, ticket="0" * 32),
            Peer(host="127.0.0.1", port=offered.port, ticket=offered.ticket),
        ]
        source = {"pushed": {"peers": [peer.model_dump() for peer in peers]}}
        staged = await b.stage(1, 0, source=source, root_hash=given.root_hash)
        assert (staged.phase, staged.error) == ("Staged", None)
        await b.commit(1)
        assert b.engine.active.number == 7
        assert b.updates.to_view().kept == a.updates.to_view().kept
        again = await b.stage(2, 0, source=source)
        assert again.phase == "Failed"
        assert "no peer could give" in str(again.error)
        assert "used or void" in str(again.error)


@pytest.mark.parametrize("by_path", [True, False])
async def test_memory_that_no_other_process_maps_is_private(
    by_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinyEngine, "by_path", by_path)
    async with pushed_worker(tmp_path) as worker:
        for number in (1, 2, 3):
            await publish(worker, number, Version(number))
            assert worker.engine.active.number == number
            kept = worker.updates.pushes.kept
            assert kept is not None
            assert (kept.memory.handle is not None) is by_path
        await publish(worker, 4, Version(4), "unix")
        assert worker.engine.active.number == 4


@pytest.mark.parametrize("private", [False, True], ids=["shared", "private"])
def test_hollow_memory_is_used_again_only_if_all_of_it_came(private: bool) -> None:
    spare: list[Slot] = []

    for root_hash in (None, "root"):
        memory = OwnMemory(Slot(8, expected=8, private=private), spare.append)
        assert (memory.handle is None) is private
        release = memory.add_hold()
        with memory.writable(0, 8) as place:
            place[:] = b"12345678"
            memory.commit_run(0, place, in_place=True)
        assert bytes(memory.view_bytes(0, 8)) == b"12345678"
        memory.commit_run(4, memoryview(b"abcd"), in_place=False)
        assert bytes(memory.view_bytes(0, 8)) == b"1234abcd"
        if root_hash is not None:
            memory.note_verified(root_hash)
        release()
    [used] = spare
    assert used.root_hash == "root"
    used.close()


async def test_an_offer_of_what_is_not_kept_is_refused(worker: TinyWorker) -> None:
    with refused("no-copy") as caught:
        worker.updates.offer_weights("me", OfferRequest(epoch=1, version=1))
    assert "ask another member" in str(caught.value)
    await publish(worker, 1, Version(7))
    with refused("no-copy"):
        worker.updates.offer_weights("me", OfferRequest(epoch=1, version=2))


async def test_weights_that_sleep_dropped_are_staged_again_where_no_copy_was_kept(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(governor, "TRANSITION_RETRY_SECONDS", 0.1)
    await publish(worker, 1, Version(7))
    await worker.sleep(level=2)
    worker.updates.pushes.drop_kept()
    with refused("weights-rejected"):
        await worker.wake()
    assert "NoLiveCopy" in str(worker.runtime.last_error)
    assert worker.updates.to_view().active is None
    assert worker.worker.readiness_problem() is not None
    await publish(worker, 1, Version(7))
    await worker.reaches(Lifecycle.ACTIVE)
    assert worker.engine.active.number == 7


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("load", [True, False])
async def test_bytes_that_come_asleep_wait_for_the_wake(
    worker: TinyWorker, kind: str, level: int, *, load: bool
) -> None:
    await publish(worker, 1, Version(7), kind)
    await worker.sleep(level=level)
    staged = await push(worker, 2, Version(8), kind)
    assert (staged.phase, staged.error) == ("Staged", None)
    with refused("asleep"):
        await worker.commit(2)
    await worker.sleep(level=2)
    assert worker.updates.slot is not None, "a deeper sleep leaves it alone"
    await worker.wake(tags=["weights"], load=load)
    await worker.commit(2)
    await worker.wake()
    await worker.reaches(Lifecycle.ACTIVE)
    assert worker.engine.active.number == 8
    await worker.sleep(level=level)
    await worker.wake()
    assert worker.engine.active.number == 8


async def test_a_sleeping_worker_takes_the_next_push_and_no_files(worker: TinyWorker) -> None:
    await worker.sleep(level=1)
    with refused("asleep"):
        await worker.begin_stage(1, 7)
    for version in (1, 2):
        await push(worker, version, Version(version), "tcp")
    with refused("version-regressed"):
        await stage(worker, 1)
    await worker.wake()
    await worker.commit(2)
    assert worker.engine.active.number == 2


async def test_weights_that_fall_asleep_take_what_is_staged_with_them(worker: TinyWorker) -> None:
    await push(worker, 1, Version(7), "tcp")
    await worker.sleep(tags=["kv_cache"])
    assert worker.updates.slot is not None
    await worker.sleep(level=1)
    assert worker.updates.slot is None


async def test_bytes_that_sleep_lost_come_again_while_it_lasts(worker: TinyWorker) -> None:
    await publish(worker, 1, Version(7))
    await worker.sleep(level=2)
    assert (await stage(worker, 1)).phase == "Staged", "they are kept"
    worker.updates.pushes.drop_kept()
    await push(worker, 1, Version(7), "tcp")
    await worker.wake(tags=["weights"], load=False)
    await worker.commit(1)
    await worker.wake()
    await worker.reaches(Lifecycle.ACTIVE)
    assert worker.engine.active.number == 7
    worker.updates.pushes.drop_kept()
    assert (await stage(worker, 1)).phase == "Staged", "they serve"


async def test_an_engine_that_dies_asleep_loses_what_came(worker: TinyWorker) -> None:
    await worker.sleep(level=1)
    await push(worker, 1, Version(7), "tcp")
    worker.engine.die()
    await until(lambda: len(worker.engines) == 2, what="another engine")
    await worker.reaches(Lifecycle.ASLEEP)
    await worker.wake()
    with refused("not-staged"):
        await worker.commit(1)
    assert worker.engine.active.number == 100
    await publish(worker, 1, Version(7))
    assert worker.engine.active.number == 7


async def test_without_a_copy_the_worker_falls_back_fenced_and_says_so(
    worker: TinyWorker,
) -> None:
    await publish(worker, 1, Version(7))
    worker.updates.pushes.drop_kept()
    worker.engine.die()
    await until(lambda: len(worker.engines) == 2, what="another engine")
    await until(lambda: "NoLiveCopy" in str(worker.runtime.last_error), what="the reason")
    await until(lambda: worker.runtime.lifecycle.has_engine, what="the checkpoint")
    assert worker.worker.readiness_problem() is not None, "it is fenced"


async def test_what_is_kept_stays_where_the_limit_has_no_room(tmp_path: Path) -> None:
    async with pushed_worker(tmp_path, "--staging-memory", "600") as worker:
        await publish(worker, 1, Version(1))
        larger = Version(2, {**TINY, "copy": ("U8", (1,))})
        with pytest.raises(Refused, match="stagingMemory"):
            await push(worker, 2, larger, "tcp")
        kept = worker.updates.to_view().kept
        assert kept is not None
        assert kept.version == 1


async def test_who_can_take_no_pushed_weights_says_how_to_change_that(tmp_path: Path) -> None:
    async with tiny_worker(tmp_path) as alone:
        with pytest.raises(ProblemError, match="--weights-port or --weights-socket") as caught:
            await stage(alone, 1)
        assert caught.value.slug == "unsupported"
