"""Pushed weights of a replica of several nodes: the trainer reaches the head, the others fetch from it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_common.transfer.connections import frame_stream
from rollout_common.transfer.connections.frames import Kind, encode_frame
from rollout_common.transfer.memory import slot
from rollout_common.transfer.memory.mapped_memory import SharedMemoryError
from rollout_common.transfer.memory.memory_limits import MARGIN_BYTES
from rollout_common.transfer.piece_server import PieceServer
from rollout_common.wire.problems import ProblemError
from rollout_common.wire.root_hash import LEAF_BYTES, HashedTensor, root_hash_of
from rollout_worker.engines.shared_memory.sinks import read_index
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.gang.member_slots import MemberSlots
from rollout_worker.ports.weights_port import WeightsPort
from rollout_worker.schemas import DiscardRequest, StagedWeights, WeightsId
from rollout_worker.settings import InvalidSettings
from rollout_worker.sources.pushed.kept_folder import KeptFolder
from tests.support.unit.pushing import (
    Version,
    held,
    kept_of,
    publish,
    push,
    quiet,
    stage,
    tensors_of,
    trainer,
)
from tests.support.unit.tiny_gang import (
    NODES,
    Node,
    TinyGang,
    hash_of_checkpoint,
    head,
    node,
)
from tests.support.unit.tiny_worker import settings
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("quick_gang")

CHECKPOINT = WeightsId(epoch=0, version=0)


PART = pytest.mark.parametrize("member", [("rest",)], indirect=True, ids=["part"])
BOTH = pytest.mark.parametrize("member", [(), ("rest",)], indirect=True, ids=["all", "part"])


@contextlib.asynccontextmanager
async def pushed_head(home: Path, member: Node, *flags: str) -> AsyncIterator[TinyGang]:
    """Run a head that takes pushed weights over both ways."""
    ways = ("--weights-port", "0", "--weights-socket", str(home / "weights.sock"))
    at = f"127.0.0.1:{member.port}"
    async with head(home, at, *ways, "--data-host", "127.0.0.1", *flags) as gang:
        port = WeightsPort(gang.worker.settings, gang.updates.pushes.pushed_source)
        port.start()
        try:
            yield gang
        finally:
            await asyncio.to_thread(port.stop)


@pytest.fixture
async def gang(tmp_path: Path, member: Node) -> AsyncIterator[TinyGang]:
    async with pushed_head(tmp_path, member) as gang:
        yield gang


def votes(member: Node) -> list[tuple[str, str | None]]:
    """Phase and content of the member's slots."""
    return [(slot.phase, slot.root_hash) for slot in member.worker.gang_state().slots]


def content(member: Node, slot: str) -> dict[str, bytes]:
    """The first bytes of each tensor that a slot of the member has."""
    handle = os.open(member.member.slots / slot, os.O_RDONLY)
    try:
        return {name: os.pread(handle, 1, at) for name, at in read_index(handle).items()}
    finally:
        os.close(handle)


def memory() -> set[str]:
    """What both nodes have open of weights; the trainer's is closed first."""
    return {each for each in held() if "rollout-" in each}


def memory_of(gang: TinyGang) -> int:
    """How much of it there is beside what the head keeps to use again."""
    gang.updates.pushes.spare.drop_memory()
    return len(memory())


async def nothing_left(gang: TinyGang, member: Node, before: int) -> None:
    """Wait until no slot, no task and no memory of a transfer is left on either node."""
    await until(lambda: not votes(member), what="the member's slot")
    await quiet()
    folders = (gang.slots, member.member.slots)
    await until(lambda: not any(any(each.iterdir()) for each in folders), what="empty folders")
    await until(lambda: memory_of(gang) <= before, what=f"{before} pieces of memory")


@BOTH
@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_what_is_pushed_to_the_head_is_staged_on_every_node(
    gang: TinyGang, member: Node, kind: str
) -> None:
    before = len(memory())
    given = Version(7)
    staged = await push(gang, 1, given, kind)
    assert (staged.phase, staged.root_hash, staged.error) == ("Staged", given.root_hash, None)
    assert votes(member) == [("Filled", given.root_hash)]
    (slot,) = member.worker.gang_state().slots
    assert content(member, slot.id)["number"] == b"\7"
    await gang.commit(1, root_hash=given.root_hash)
    assert gang.active == WeightsId(epoch=1, version=1)
    await gang.update(2, 8)
    given.slot.close()
    await nothing_left(gang, member, before)


@BOTH
async def test_what_the_head_keeps_fills_every_node_again(gang: TinyGang, member: Node) -> None:
    """After sleep at level 2, and for the file of level 1."""
    given = Version(7)
    await publish(gang, 1, given)
    await until(lambda: not votes(member), what="the member's memory")
    for on_disk in (False, True):
        sink = await gang.updates.refill_active(on_disk=on_disk)
        assert member.member.asked[-1] == (sink.slot, on_disk)
        assert votes(member) == [("Filled", given.root_hash)]
        sink.close()
        await until(lambda: not votes(member), what="the member's memory")


@contextlib.asynccontextmanager
async def begun(
    gang: TinyGang, monkeypatch: pytest.MonkeyPatch, pieces: int, **fields: Any
) -> AsyncIterator[tuple[Any, StagedWeights]]:
    """Push the first pieces of a large version over TCP; yields the trainer's end."""
    for module in ("updates.pushed_weights", "gang.member_slots"):
        monkeypatch.setattr(f"rollout_worker.{module}.check_layout", lambda *_, where: None)
    given = Version(7, tensors_of(5))
    view = await stage(gang, 1, **fields)
    assert view.transfer is not None
    with trainer(view.transfer, given, "tcp") as end:
        end.hello(view.transfer)
        await asyncio.to_thread(end.ready)
        end.announce(range(pieces))
        while len(end.sent) < pieces:
            end.give(await asyncio.to_thread(end.asked))
        yield end, view


def done(member: Node) -> int:
    """Bytes that the member has read of what it fetches."""
    return sum(slot.bytes_done for slot in member.worker.gang_state().slots)


@BOTH
async def test_the_members_fetch_while_the_bytes_still_arrive(
    gang: TinyGang, member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun(gang, monkeypatch, 4) as (end, _):
        await until(lambda: done(member) == 4 * LEAF_BYTES, what="the first four pieces")
        end.announce([4, 5])
        end.end()
        assert (await asyncio.to_thread(end.serve)).kind is Kind.STAGED
    assert votes(member) == [("Filled", end.version.root_hash)]
    await gang.commit(1)
    assert gang.engine.active.number == 7


@PART
async def test_a_member_has_nothing_of_what_its_ranks_do_not_read(
    gang: TinyGang, member: Node
) -> None:
    """Pushed, from what the head keeps, and from files, which it reads for their hash."""
    given = Version(7)
    await push(gang, 1, given, "tcp")
    (slot,) = member.worker.gang_state().slots
    assert content(member, slot.id) == {"number": b"\7"}
    assert (slot.bytes_done, slot.bytes_total) == (1, 1), "of two"
    await gang.commit(1)
    sink = await gang.updates.refill_active(on_disk=False)
    assert content(member, sink.slot) == {"number": b"\7"}
    sink.close()
    await gang.stage(2, 8)
    (slot,) = member.worker.gang_state().slots
    assert content(member, slot.id) == {"number": b"\10"}
    assert (slot.phase, slot.bytes_total) == ("Filled", 2)


async def test_a_member_that_is_told_so_takes_all(tmp_path: Path) -> None:
    root_hash = await hash_of_checkpoint(tmp_path)
    async with node(tmp_path, root_hash, "--gang-fetch", "all") as member:
        member.member.left_alone = frozenset({"rest"})
        async with pushed_head(tmp_path, member) as gang:
            await push(gang, 1, Version(7), "tcp")
            (slot,) = member.worker.gang_state().slots
            assert content(member, slot.id) == {"number": b"\7", "rest": b"\0"}


@pytest.mark.parametrize("left_alone", [(), ("number",)], ids=["all", "part"])
async def test_a_member_is_charged_for_what_it_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_alone: tuple[str, ...]
) -> None:
    root_hash = await hash_of_checkpoint(tmp_path)
    async with node(tmp_path, root_hash, "--staging-memory", "2Mi") as member:
        member.member.left_alone = frozenset(left_alone)
        async with (
            pushed_head(tmp_path, member) as gang,
            begun(gang, monkeypatch, 0) as (end, _),
        ):
            end.announce()
            end.end()
            # The refusal may come before the head has asked for everything.
            answer = await asyncio.to_thread(end.serve)
            assert answer.kind is (Kind.STAGED if left_alone else Kind.FAILED)


def test_a_member_needs_room_for_what_it_fetches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 2 * LEAF_BYTES
    monkeypatch.setattr(slot, "memory_left", lambda: (MARGIN_BYTES + room, "the limit"))
    staging = StagingBudget()
    slots = MemberSlots(settings(), staging)
    memory, give_back = slots._allocate_memory(5 * LEAF_BYTES, room)
    assert (memory.size, staging._taken) == (5 * LEAF_BYTES, room)
    memory.add_hold()()
    give_back()
    with pytest.raises(SharedMemoryError, match=f"no room for {room + 1} bytes"):
        slots._allocate_memory(5 * LEAF_BYTES, room + 1)
    assert not staging._taken


@PART
async def test_a_member_frees_what_it_has_fetched_beside_its_event_loop(
    gang: TinyGang, member: Node
) -> None:
    with member.staging.freeing.postpone_freeing():
        assert (await push(gang, 1, Version(7), "tcp")).phase == "Staged"
        assert member.staging._taken, "nothing is freed in the loop"
    await until(lambda: not member.staging._taken, what="the fetched bytes to be freed")


@PART
async def test_a_head_whose_hashes_lie_of_what_stays_there_finds_another_root_hash(
    gang: TinyGang, member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the member is told fits together; the head has read the bytes."""
    before = len(memory())

    encode = encode_frame

    def lied(kind: Kind, head: Mapping[str, Any], payload: int) -> bytes:
        if kind is not Kind.END:
            return encode(kind, head, payload)
        digests = {**head["digests"], "rest": head["digests"]["number"]}
        root = root_hash_of(
            {name: HashedTensor("U8", (1,), each) for name, each in digests.items()}
        )
        return encode(kind, {"root_hash": root, "digests": digests}, payload)

    with monkeypatch.context() as lying:
        lying.setattr(frame_stream, "encode_frame", lied)
        given = Version(7)
        await push(gang, 1, given, "tcp")
        why = await failed(gang, member, before)
    assert f"rank 1 at 127.0.0.1:{member.port} found root_hash" in why
    assert f"where the head found {given.root_hash}" in why
    assert (await push(gang, 1, Version(7), "tcp")).phase == "Staged", "and it goes on"


# Faults: the old weights serve, and nothing is left on either node.


async def failed(gang: TinyGang, member: Node, before: int) -> str:
    """Wait for the end of a stage that fails; returns why it did."""
    slot = gang.slot
    await until(lambda: slot.to_view().phase == "Failed", what="the failure")
    await nothing_left(gang, member, before)
    assert gang.active == CHECKPOINT
    return str(slot.error)


async def test_a_trainer_that_dies_midway_leaves_nothing_on_any_node(
    gang: TinyGang, member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(memory())
    monkeypatch.setattr("rollout_worker.sources.pushed.incoming_version.RESUME_SECONDS", 0.2)
    async with begun(gang, monkeypatch, 4):
        await until(lambda: done(member) > 0, what="the first bytes")
    assert "the sender is gone" in await failed(gang, member, before)
    assert (await gang.stage(1, 7)).phase == "Staged", "and it goes on"


async def test_a_discarded_transfer_leaves_nothing_on_any_node(
    gang: TinyGang, member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(memory())
    async with begun(gang, monkeypatch, 4) as (end, _):
        await until(lambda: done(member) > 0, what="the first bytes")
        await gang.updates.discard_staged("me", DiscardRequest(epoch=1, version=1))
        assert (await asyncio.to_thread(end.answer)).kind is Kind.FAILED
    await nothing_left(gang, member, before)


async def test_a_member_without_room_fails_the_push_by_name(
    gang: TinyGang, member: Node, tmp_path: Path
) -> None:
    before = len(memory())
    member.member.room = False
    await push(gang, 1, Version(7), "unix")
    why = await failed(gang, member, before)
    assert why.startswith(f"rank 1 at 127.0.0.1:{member.port} can't stage: no room")
    member.member.room = True
    assert (await push(gang, 1, Version(7), "unix")).phase == "Staged", "and it goes on"


async def test_a_member_that_stands_still_fails_the_push_at_its_deadline(
    gang: TinyGang, member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(memory())
    monkeypatch.setattr("rollout_worker.sources.pushed.trainer_connection.LEAVE_SECONDS", 0.1)
    member.member.go.clear()
    async with begun(gang, monkeypatch, 6, deadline_seconds=2) as (end, _):
        end.end()
        why = await failed(gang, member, before)
    assert "not staged within 2 s" in why or "did not stage within 2 s" in why


def flipped(hashes: bool) -> Callable[[PieceServer, int], Awaitable[None]]:
    """Give a byte of a piece changed; `hashes`: with the hash of what is sent."""

    async def send(self: PieceServer, piece: int) -> None:
        held = self._held
        bad = bytearray(held.read_bytes(*held.pieces.span(piece)))
        bad[0] ^= 1
        digests = held.leaf_digests(piece)
        if hashes:
            digests = held.pieces.hash_leaves(piece, memoryview(bad))
        head = {"piece": piece, "digests": digests.hex()}
        await self._stream.send(Kind.PIECE, head, bytes(bad))

    return send


@PART
@pytest.mark.parametrize(("hashes", "why"), [(False, "arrived damaged"), (True, "arrived with")])
async def test_other_bytes_on_a_member_are_never_staged(
    gang: TinyGang, member: Node, monkeypatch: pytest.MonkeyPatch, why: str, *, hashes: bool
) -> None:
    before = len(memory())
    with monkeypatch.context() as broken:
        broken.setattr(PieceServer, "_send_piece", flipped(hashes))
        await push(gang, 1, Version(7), "tcp")
        found = await failed(gang, member, before)
    assert f"rank 1 at 127.0.0.1:{member.port} can't stage" in found
    assert why in found
    assert (await push(gang, 1, Version(7), "tcp")).phase == "Staged", "and it goes on"


async def test_a_member_that_dies_midway_ends_the_gang(
    gang: TinyGang, member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun(gang, monkeypatch, 4):
        await until(lambda: done(member) > 0, what="the first bytes")
        await member.silence()
        assert "it has not answered for" in await gang.why()
    assert gang.active == CHECKPOINT


async def test_a_head_that_dies_midway_ends_the_member_and_its_slots(
    tmp_path: Path, member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pushed_head(tmp_path, member) as gang, begun(gang, monkeypatch, 4):
        await until(lambda: done(member) > 0, what="the first bytes")
        gang.running.cancel()
    assert "the head has not asked for" in await member.why()
    await member.worker.stop_worker()
    assert votes(member) == []
    await quiet()


async def test_a_head_without_a_port_for_weights_says_so(tmp_path: Path, member: Node) -> None:
    async with head(tmp_path, f"127.0.0.1:{member.port}") as gang:
        with pytest.raises(ProblemError, match="start the head with --weights-port"):
            await stage(gang, 1)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--rank", "1", "--weights-port", "8002"), "only the head takes pushed weights"),
        (("--rank", "1", "--weights-socket", "/tmp/w"), "only the head takes pushed weights"),
        (("--weights-socket", "/tmp/w"), "--nodes above 1 needs --weights-port"),
    ],
)
def test_where_a_gang_takes_pushed_weights(flags: tuple[str, ...], why: str) -> None:
    with pytest.raises(InvalidSettings, match=why):
        settings(*NODES, "--member-addresses", "127.0.0.1:9", *flags)


@BOTH
async def test_a_new_gang_serves_what_the_former_head_left_on_its_node(
    tmp_path: Path, member: Node
) -> None:
    version = Version(7)
    kept = replace(kept_of(version), identity=WeightsId(epoch=1, version=1))
    (tmp_path / "kept").mkdir()
    KeptFolder(tmp_path / "kept", "tiny").write_version(kept, lambda: True)
    keep = ("--keep-folder", str(tmp_path / "kept"), "--served-name", "tiny")
    async with pushed_head(tmp_path, member, *keep) as gang:
        pushes = gang.updates.pushes
        await until(lambda: pushes.kept is not None, what="the kept weights")
        peer = {"host": "127.0.0.1", "port": 1, "ticket": "0" * 32}
        source = {"pushed": {"peers": [peer]}}
        staged = await gang.stage(1, 0, source=source, root_hash=version.root_hash)
        assert (staged.phase, staged.error) == ("Staged", None)
        assert [found for _, found in votes(member)] == [version.root_hash]
        await gang.commit(1)
        assert gang.active == WeightsId(epoch=1, version=1)
