"""Memory of a version that is given up while pieces of it are still written: nobody gets it before that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.memory.slot import Slot
from rollout_common.wire import PushedBytes, WeightsId
from rollout_worker.sources.pushed.incoming_version import IncomingVersion
from rollout_worker.sources.pushed.kept_version import take_kept
from rollout_worker.sources.pushed.pushed_memory import Memory, OwnMemory, TransferFailed
from tests.support.unit.pushing import Version, kept_of


def no_room(nbytes: int) -> tuple[Memory, Callable[[], None]]:
    raise AssertionError("nothing is copied")


LAYOUT = PushLayout.plan([("a", "U8", (5000,))])


def begin_version(room: Callable[[int], tuple[Memory, Callable[[], None]]]) -> IncomingVersion:
    incoming = IncomingVersion(
        WeightsId(epoch=1, version=1), PushedBytes(), lambda entries: None, room
    )
    incoming.begin(LAYOUT)
    incoming.take_room()
    return incoming


async def test_a_version_that_is_given_up_keeps_its_memory_until_nothing_writes_it() -> None:
    recycled: list[object] = []
    memory = OwnMemory(Slot(LAYOUT.nbytes, private=True), recycled.append)
    incoming = begin_version(lambda nbytes: (memory, lambda: None))
    with incoming.hold_memory():
        incoming.close("a later version takes its place")
        with incoming.writable(0, 5000) as place:
            place[:] = b"\1" * 5000
        assert not memory.freed.is_set()
        assert not recycled, "a later version would be written to by this one"
    assert memory.freed.is_set()
    assert recycled
    with pytest.raises(TransferFailed), incoming.hold_memory():
        pass


async def test_a_fetch_that_is_cancelled_gives_the_memory_back() -> None:
    memory = OwnMemory(Slot(LAYOUT.nbytes, private=True))
    incoming = begin_version(lambda nbytes: (memory, lambda: None))

    async def fetch() -> None:
        with incoming.hold_memory():
            await asyncio.Event().wait()

    task = asyncio.create_task(fetch())
    await asyncio.sleep(0)
    incoming.close("discarded")
    assert not memory.freed.is_set()
    task.cancel()
    await asyncio.wait([task])
    assert memory.freed.is_set()


async def test_memory_that_comes_once_a_version_is_over_is_freed_and_the_reason_told() -> None:
    """As its engine dies while a thread maps the trainer's memory."""
    memory = OwnMemory(Slot(LAYOUT.nbytes, private=True))
    given_back: list[int] = []

    def room(nbytes: int) -> tuple[Memory, Callable[[], None]]:
        incoming.fail("the engine was restarted: stage again")
        return memory, lambda: given_back.append(nbytes)

    incoming = IncomingVersion(
        WeightsId(epoch=1, version=1), PushedBytes(), lambda entries: None, room
    )
    incoming.begin(LAYOUT)
    with pytest.raises(TransferFailed, match="the engine was restarted"):
        incoming.take_room()
    assert incoming.memory is None
    assert memory.freed.is_set()
    assert given_back == [LAYOUT.nbytes]


async def test_kept_bytes_that_are_gone_leave_no_piece_marked() -> None:
    """Else they would be taken for verified, and the version be committed with empty memory."""
    version = Version(1)
    kept = kept_of(version)
    kept.release()
    assert kept.memory.freed.is_set()
    incoming = IncomingVersion(kept.identity, PushedBytes(), lambda entries: None, no_room)
    with pytest.raises(TransferFailed, match="the bytes are gone"):
        take_kept(incoming, kept)
    assert incoming.held is None


async def test_bytes_that_are_kept_are_taken_without_a_copy() -> None:
    kept = kept_of(Version(1))
    incoming = IncomingVersion(kept.identity, PushedBytes(), lambda entries: None, no_room)
    take_kept(incoming, kept)
    kept.release()
    assert incoming.memory is kept.memory
    assert incoming.held is not None
    assert incoming.held.end == kept.end
    assert not kept.memory.freed.is_set(), "the new version holds it"
