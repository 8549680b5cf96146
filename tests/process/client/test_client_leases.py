"""Memory that a replica was given: nothing but its own word, or the kernel's, lets a trainer write it again."""

from __future__ import annotations

import mmap
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from rollout_client import AsyncRolloutPool, PublishFailed
from rollout_common.transfer.memory import memory_users as holders
from rollout_common.transfer.memory.arena import MOST_CONDEMNED, SLOTS, Arena
from rollout_common.transfer.memory.mapped_memory import SharedMemoryError
from rollout_common.transfer.memory.memory_users import nobody_has
from rollout_common.transfer.memory.slot import Slot
from tests.support.unit.receiver import Receiver
from tests.support.unit.scripted_control import scripted_controls
from tests.support.waiting import until_sync

PAGE = mmap.PAGESIZE


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((PAGE,), float(version)), "b": torch.arange(9) + version}


def in_a_process(slot: Slot) -> tuple[int, socket.socket]:
    """Give memory to a process that maps it, and keeps nothing else; it says so, and lives on."""
    ours, its = socket.socketpair()
    if (pid := os.fork()) == 0:
        try:
            ours.close()
            _, (handle,), *_ = socket.recv_fds(its, 1, 1)
            there = mmap.mmap(handle, slot.size, flags=mmap.MAP_PRIVATE)
            os.close(handle)
            its.send(there[:1])
            its.recv(1)
            there.close()
            its.send(b"?")
            its.recv(1)
        finally:
            os._exit(0)
    its.close()
    handle = slot.open_reader()
    socket.send_fds(ours, [b"!"], [handle])
    os.close(handle)
    return pid, ours


# What the kernel says.


@pytest.mark.parametrize("end", ["unmaps it", "is killed"])
def test_the_kernel_knows_whether_another_process_has_a_slot(end: str) -> None:
    slot = Slot(3 * PAGE)
    assert nobody_has(slot.handle)
    pid, ours = in_a_process(slot)
    with ours:
        assert not nobody_has(slot.handle), "it is on its way"
        ours.recv(1)
        assert not nobody_has(slot.handle)
        os.kill(pid, signal.SIGSTOP)
        assert not nobody_has(slot.handle)
        if end == "is killed":
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGCONT)
            ours.send(b".")
            ours.recv(1)
        until_sync(lambda: nobody_has(slot.handle), what="the kernel to say so")
    os.waitpid(pid, 0)
    slot.close()
    assert not nobody_has(slot.handle), "who can't tell proves nothing"


def test_a_slot_in_doubt_is_lent_until_nobody_has_it() -> None:
    arena = Arena()
    slot, release = arena.take_slot(PAGE)
    reader = slot.open_reader()
    slot.note_doubt("w0")
    release()
    assert slot.is_lent
    others = [arena.take_slot(PAGE) for _ in range(2 * SLOTS)]
    assert all(other is not slot for other, _ in others)
    for _, give_back in others:
        give_back()
    assert arena.nbytes == (SLOTS + 1) * slot.size, "it is kept, as it can't be told otherwise"
    os.close(reader)
    assert not slot.is_lent
    arena.take_slot(PAGE)[1]()
    assert (arena.nbytes, slot.handle) == (SLOTS * slot.size, -1)
    arena.close()


def test_slots_in_doubt_are_bounded_and_who_has_them_is_named() -> None:
    arena, readers = Arena(), []
    for number in range(MOST_CONDEMNED + SLOTS):
        slot, release = arena.take_slot(PAGE)
        readers.append(slot.open_reader())
        slot.note_doubt(f"w{number}")
        release()
    with pytest.raises(SharedMemoryError, match=r"4 former versions .*\(w0, w1, w2, w3\): restart"):
        arena.take_slot(PAGE)
    os.close(readers.pop(0))
    arena.take_slot(PAGE)[1]()
    for reader in readers:
        os.close(reader)
    arena.close()


def test_a_kernel_that_grants_every_lease_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "_is_leased", lambda probe: True)
    slot = Slot(PAGE)
    assert not nobody_has(slot.handle)
    slot.close()


# What a replica says.


@pytest.fixture
async def receivers(tmp_path: Path) -> AsyncIterator[tuple[AsyncRolloutPool, list[Receiver]]]:
    async with scripted_controls(2) as controls:
        made = [Receiver(f"w{index}:8000", tmp_path) for index in range(2)]
        for control, receiver in zip(controls, made, strict=True):
            control.transfer, control.phase = receiver.transfer, "Staging"
        urls = [each.member.url for each in controls]
        steered = [each.member.control_url for each in controls]
        async with AsyncRolloutPool.from_urls(urls, control_urls=steered) as pool:
            yield pool, made
        for each in made:
            each.close()


async def test_a_connection_that_ends_without_a_word_gives_nothing_back(
    receivers: tuple[AsyncRolloutPool, list[Receiver]],
) -> None:
    pool, (first, second) = receivers
    arena = pool._pusher._arena
    first.release.clear()
    await pool.publish_weights(1, tensors=weights(1), transport="shm")
    (serving,) = first.keeps
    served = serving[:]
    first.hang_up()
    for sender in pool._pusher._senders:
        assert sender.join(30)
    with pytest.raises(PublishFailed):
        await pool.publish_weights(2, tensors=broken(), transport="tcp")
    for version in range(3, 3 + 2 * SLOTS):
        await pool.publish_weights(version, tensors=weights(version), transport="tcp")
        assert serving[:] == served, f"it serves version 1, with bytes of {version}"
    assert len(arena._condemned) == 1
    first.release.set()
    until_sync(lambda: not arena._condemned[0].is_lent, what="the memory to be let go")
    await pool.publish_weights(9, tensors=weights(9), transport="shm")
    assert not arena._condemned
    assert second.content["b"] == (torch.arange(9) + 9).numpy().tobytes()


def broken() -> Iterator[tuple[str, torch.Tensor]]:
    """A stream that dies once its first bytes are there."""
    yield "a", weights(2)["a"]
    raise PublishFailed("the trainer's own error")
