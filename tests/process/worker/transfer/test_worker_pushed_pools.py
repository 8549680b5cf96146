"""Pools whose replicas fetch from each other: one copy leaves the trainer, and nobody waits for a replica that
freezes, trickles, dies or has no room."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from rollout_client.steering.pushing import sending
from rollout_client.steering.pushing.options import PushPlan
from rollout_client.steering.pushing.push import Push
from rollout_client.steering.pushing.pusher import Pusher
from rollout_client.steering.pushing.routes import Receiver
from rollout_common.transfer import piece_choice
from rollout_common.transfer.connections import frame_stream
from rollout_common.transfer.settings import BURST_SECONDS
from rollout_common.wire.root_hash import LEAF_BYTES
from rollout_worker.ports import weights_port as port
from rollout_worker.schemas import Transfer
from rollout_worker.sources.pushed import incoming_version as incoming
from rollout_worker.sources.pushed import peer_route as outward
from rollout_worker.sources.pushed import trainer_connection as receiving
from rollout_worker.sources.pushed import version_fetching
from tests.support.unit.links import Link
from tests.support.unit.pushing import (
    Version,
    holder,
    no_file_above,
    pushed_worker,
    quiet,
    tensors_of,
    ticket,
    trainer,
)
from tests.support.unit.tiny_engine import LAYOUT
from tests.support.unit.tiny_worker import TinyWorker
from tests.support.waiting import until

RESUME_SECONDS = 0.5
"""How long a worker waits for a trainer that is gone, here."""
PIECES = 12
NBYTES = PIECES * LEAF_BYTES
"""Of the tensor `number`: all others have one byte."""


@pytest.fixture(autouse=True)
def quick(any_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of some pieces, replicas that are late soon, and a trainer that is patient for a while."""
    monkeypatch.setattr(frame_stream, "PING_SECONDS", 0.1)
    monkeypatch.setattr(outward, "HOP_SECONDS", 1.0)
    monkeypatch.setattr(sending, "HOP_SECONDS", 1.0)
    monkeypatch.setattr(receiving, "TAKEOVER_SECONDS", 0.5)


@pytest.fixture
def pusher() -> Iterator[Pusher]:
    made = Pusher()
    yield made
    made.close()


def large() -> dict[str, torch.Tensor]:
    """A version of many pieces."""
    whole = {name: torch.zeros(1, dtype=torch.uint8) for name in LAYOUT.required}
    whole["number"] = torch.full((NBYTES,), 7, dtype=torch.uint8)
    return whole


class Pool:
    """Replicas that get one version; each may be reached through a link that the test breaks."""

    def __init__(self) -> None:
        self.workers: dict[str, TinyWorker] = {}
        self.receivers: list[Receiver] = []
        self.links: dict[str, Link] = {}
        self.news = threading.Event()
        self.pushes: list[Push] = []

    def add(self, name: str, transfer: Transfer) -> None:
        self.receivers.append(Receiver(name, "127.0.0.1", transfer))

    def push(self, pusher: Pusher) -> Push:
        made = pusher.begin(large(), PushPlan("tcp"))
        self.pushes.append(made)
        made.fill_here()
        made.start(self.receivers, self.news.set)
        return made

    async def has(self, push: Push, *names: str, staged: bool = True) -> None:
        """Wait for what becomes of these."""
        await until(lambda: all(push.progress.settled(name) for name in names), 20, what="the end")
        for name in names:
            of = push.progress.of(name)
            assert (of.root_hash is not None) == staged, (name, of.why)

    async def end(self) -> None:
        for push in self.pushes:
            push.stop()
            push.close()
        await quiet()


async def sent(push: Push) -> int:
    """Bytes of tensors that left the trainer, once its connections have ended."""
    for each in push.senders:
        assert await asyncio.to_thread(each.join, 10)
    return sum(each.sent for each in push.senders)


@contextlib.asynccontextmanager
async def pool(
    home: Path, names: str, linked: str = "", flags: dict[str, list[str]] | None = None
) -> AsyncIterator[Pool]:
    made = Pool()
    async with contextlib.AsyncExitStack() as stack:
        for name in names:
            worker = pushed_worker(home / name, *(flags or {}).get(name, []))
            made.workers[name] = await stack.enter_async_context(worker)
            begun = await ticket(made.workers[name], 1)
            assert begun.port is not None
            if name in linked:
                made.links[name] = Link(begun.port)
                stack.callback(made.links[name].close)
                begun = begun.model_copy(update={"port": made.links[name].port})
            made.add(name, begun)
        yield made
        await made.end()


async def test_one_copy_leaves_the_trainer_for_six_replicas(
    tmp_path: Path, pusher: Pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_choice, "LEAST_LATE_SECONDS", 10.0)
    async with pool(tmp_path, "abcdef") as made:
        push = made.push(pusher)
        await made.has(push, *"abcdef")
        assert await sent(push) == sum(map(push.filling.held.pieces.nbytes_of, range(PIECES + 1)))
        for worker in made.workers.values():
            await worker.commit(1)
            assert worker.engine.active.number == 7


@pytest.mark.parametrize("frozen", ["a", "b", "d"])
async def test_nobody_waits_for_a_replica_that_freezes(
    tmp_path: Path, pusher: Pusher, frozen: str
) -> None:
    """It has the version once it goes on."""
    others = [name for name in "abcd" if name != frozen]
    async with pool(tmp_path, "abcd", linked=frozen) as made:
        made.links[frozen].frozen.set()
        push = made.push(pusher)
        await made.has(push, *others)
        assert not push.progress.settled(frozen)
        made.links[frozen].frozen.clear()
        await made.has(push, frozen)


async def test_nobody_waits_for_a_replica_that_freezes_while_it_gives(
    tmp_path: Path, pusher: Pusher
) -> None:
    async with pool(tmp_path, "abc", linked="b") as made:
        made.links["b"].freeze_at = int(1.5 * LEAF_BYTES)
        push = made.push(pusher)
        await made.has(push, "a", "c")
        await until(made.links["b"].frozen.is_set, what="it to freeze")
        made.links["b"].frozen.clear()
        await made.has(push, "b")


async def test_a_replica_that_stays_frozen_is_reported_once_its_time_is_over(
    tmp_path: Path, pusher: Pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "LEASE_SECONDS", 3.0)
    monkeypatch.setattr(port, "GREETING_TIMEOUT_SECONDS", 3.0)  # the frozen link greets nobody
    async with pool(tmp_path, "abc", linked="b") as made:
        made.links["b"].frozen.set()
        push = made.push(pusher)
        await made.has(push, "a", "c")
        await made.has(push, "b", staged=False)
        assert "nothing came for 3 s" in str(push.progress.of("b").why)


@pytest.mark.parametrize("slow", ["a", "b"])
async def test_nobody_waits_for_a_replica_that_trickles(
    tmp_path: Path, pusher: Pusher, slow: str
) -> None:
    """What the trainer can't bring it in time it gets from the others, and they don't wait for its share."""
    rate = 1 << 20
    async with pool(tmp_path, "abcd", linked=slow) as made:
        made.links[slow].rate = rate
        began = time.monotonic()
        push = made.push(pusher)
        await made.has(push, *"abcd")
        assert time.monotonic() - began < NBYTES / rate / 2


async def test_a_transfer_that_was_cut_in_a_piece_goes_on_and_sends_nothing_twice(
    tmp_path: Path, pusher: Pusher
) -> None:
    async with pool(tmp_path, "a", linked="a") as made:
        made.links["a"].cut_at = int(5.5 * LEAF_BYTES)
        push = made.push(pusher)
        await made.has(push, "a")
        assert NBYTES < made.links["a"].passed < NBYTES + 1.1 * LEAF_BYTES


async def test_all_have_it_though_a_connection_broke_in_a_piece(
    tmp_path: Path, pusher: Pusher
) -> None:
    async with pool(tmp_path, "abc", linked="bc") as made:
        # In the first piece: on a busy machine it may get the others from its peers.
        made.links["b"].cut_at = LEAF_BYTES // 2
        push = made.push(pusher)
        await made.has(push, "a", "b", "c")
        assert made.links["b"].cut_at is None, "it broke"


async def test_a_replica_without_room_says_so_and_the_others_have_it(
    tmp_path: Path, pusher: Pusher
) -> None:
    async with pool(tmp_path, "abc", flags={"b": ["--staging-memory", "1Mi"]}) as made:
        push = made.push(pusher)
        await made.has(push, "a", "c")
        await made.has(push, "b", staged=False)
        assert "stagingMemory" in str(push.progress.of("b").why)


async def test_memory_that_the_kernel_refuses_is_told_and_given_back(
    tmp_path: Path, pusher: Pusher
) -> None:
    async with pool(tmp_path, "a") as made:
        push = pusher.begin(large(), PushPlan("tcp"))
        made.pushes.append(push)
        push.fill_here()
        with no_file_above(LEAF_BYTES):
            push.start(made.receivers, made.news.set)
            await made.has(push, "a", staged=False)
        slot = made.workers["a"].slot
        await until(lambda: slot.to_view().phase == "Failed", what="the slot to end")
        assert "File too large" in str(slot.to_view().error)
        assert push.progress.of("a").why == slot.to_view().error


async def test_a_worker_sends_no_more_than_its_limit(tmp_path: Path, pusher: Pusher) -> None:
    rate = 8 << 20
    flags = {"a": ["--weights-egress", str(rate)]}
    async with pool(tmp_path, "ab", linked="a", flags=flags) as made:
        began = time.monotonic()
        push = made.push(pusher)
        await made.has(push, "a", "b")
        took = time.monotonic() - began
        assert made.links["a"].returned > LEAF_BYTES
        # A piece goes out as soon as the one before it has had its time, and heads come on top.
        most = rate * (took + BURST_SECONDS) + 1.1 * LEAF_BYTES
        assert made.links["a"].returned < most


# A trainer that is gone.


async def test_a_trainer_that_dies_after_the_end_leaves_what_a_replica_has_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes them, as long as something comes."""
    monkeypatch.setattr(incoming, "RESUME_SECONDS", RESUME_SECONDS)
    given = Version(7, tensors_of(PIECES))
    async with pool(tmp_path, "abc", linked="a") as made:
        a, *rest = [each.transfer for each in made.receivers]
        with trainer(a, given, "tcp") as end:
            await asyncio.to_thread(end.whole, a)
        made.links["a"].rate = 8 << 20
        began = time.monotonic()
        for transfer in rest:
            with trainer(transfer, given, "tcp") as end:
                end.hello(transfer, share=[1, 3], holders=[holder(a, "a")])
                await asyncio.to_thread(end.ready)
                end.end()
        for name in "abc":
            slot = made.workers[name].slot
            await until(lambda: slot.to_view().phase != "Staging", 20, what="the end")  # noqa: B023
            assert slot.to_view().root_hash == given.root_hash, slot.to_view().error
            await made.workers[name].commit(1)
        assert time.monotonic() - began > 2 * RESUME_SECONDS


async def test_replicas_that_lack_a_piece_do_not_wait_for_each_other_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is gone, both know the end, and neither has all."""
    monkeypatch.setattr(incoming, "RESUME_SECONDS", RESUME_SECONDS)
    monkeypatch.setattr(version_fetching, "PEER_RETRY_SECONDS", 0.05)
    given = Version(7, tensors_of(PIECES))
    async with pool(tmp_path, "ab") as made:
        transfers = [each.transfer for each in made.receivers]
        with contextlib.ExitStack() as stack:
            ends = [stack.enter_context(trainer(each, given, "tcp")) for each in transfers]
            for end, own, other in zip(ends, transfers, reversed(transfers), strict=True):
                end.hello(own, holders=[holder(other, "other")])
                await asyncio.to_thread(end.ready)
                end.announce([ends.index(end)])
                end.give(await asyncio.to_thread(end.asked))
                end.end()
            slots = [slot for w in made.workers.values() if (slot := w.updates.slot)]
            await until(lambda: [s.to_view().chunks for s in slots] == [2, 2], what="both pieces")
        await until(lambda: {s.to_view().phase for s in slots} == {"Failed"}, 5, what="the end")
        assert all("the sender is gone" in str(slot.to_view().error) for slot in slots)
