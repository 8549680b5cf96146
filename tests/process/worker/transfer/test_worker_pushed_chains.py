"""Chains whose hops freeze, trickle, die and have no room: the others have all of it in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from rollout_client.steering.pushing import sending
from rollout_client.steering.pushing.push import Push
from rollout_client.steering.pushing.pusher import Pusher
from rollout_client.steering.pushing.routes import Receiver
from rollout_common.transfer import connection, pace
from rollout_common.transfer.frames import CHUNK_BYTES
from rollout_worker.schemas import Transfer
from rollout_worker.sources import incoming, outward
from tests.support.unit import hop_process
from tests.support.unit.links import Link
from tests.support.unit.pushing import no_file_above, pushed_worker, quiet, stage
from tests.support.unit.tiny_engine import LAYOUT
from tests.support.unit.tiny_worker import TinyWorker
from tests.support.waiting import until

CHUNKS = 12


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of some chunks, hops that are late soon, and a trainer that is patient for a while."""
    monkeypatch.setattr(
        "rollout_worker.updates.pushed_weights.check_layout", lambda *_, where: None
    )
    monkeypatch.setattr(connection, "PING_SECONDS", 0.1)
    monkeypatch.setattr(outward, "HOP_SECONDS", 1.0)
    monkeypatch.setattr(sending, "HOP_SECONDS", 1.0)
    monkeypatch.setattr(incoming, "TAKEOVER_SECONDS", 0.5)


@pytest.fixture
def pusher() -> Iterator[Pusher]:
    made = Pusher()
    yield made
    made.close()


class Chain:
    """Workers in a row; each may be reached through a link that the test breaks."""

    def __init__(self) -> None:
        self.workers: dict[str, TinyWorker] = {}
        self.receivers: list[Receiver] = []
        self.links: dict[str, Link] = {}
        self.news = threading.Event()

    def add(self, name: str, transfer: Transfer) -> None:
        self.receivers.append(Receiver(name, "127.0.0.1", transfer))

    def push(self, pusher: Pusher) -> Push:
        whole = {name: torch.zeros(1, dtype=torch.uint8) for name in LAYOUT.required}
        whole["number"] = torch.full((CHUNKS * CHUNK_BYTES,), 7, dtype=torch.uint8)
        made = pusher.begin(whole, "tcp")
        made.fill_here()
        made.start(self.receivers, self.news.set)
        return made

    async def has(self, push: Push, *names: str, staged: bool = True) -> None:
        """Wait for what becomes of these."""
        await until(lambda: all(push.board.settled(name) for name in names), 20, what="the end")
        for name in names:
            of = push.board.of(name)
            assert (of.root_hash is not None) == staged, (name, of.why)

    async def end(self, push: Push) -> None:
        push.stop()
        push.close()
        await quiet()


@contextlib.asynccontextmanager
async def chain(
    home: Path, names: str, linked: str = "", flags: dict[str, list[str]] | None = None
) -> AsyncIterator[Chain]:
    made = Chain()
    async with contextlib.AsyncExitStack() as stack:
        for name in names:
            worker = pushed_worker(home / name, *(flags or {}).get(name, []))
            made.workers[name] = await stack.enter_async_context(worker)
            begun = (await stage(made.workers[name], 1)).transfer
            assert begun is not None
            assert begun.port is not None
            if name in linked:
                made.links[name] = Link(begun.port)
                stack.callback(made.links[name].close)
                begun = begun.model_copy(update={"port": made.links[name].port})
            made.add(name, begun)
        yield made


async def test_six_hops_pass_on_one_copy(tmp_path: Path, pusher: Pusher) -> None:
    async with chain(tmp_path, "abcdef", linked="bf") as made:
        push = made.push(pusher)
        await made.has(push, *"abcdef")
        assert len(push.senders) == 1
        for link in made.links.values():
            assert CHUNKS * CHUNK_BYTES < link.passed < (CHUNKS + 1) * CHUNK_BYTES
        for worker in made.workers.values():
            await worker.commit(1)
            assert worker.engine.active.number == 7
        await made.end(push)


@pytest.mark.parametrize("frozen", ["a", "b", "d"])
async def test_nobody_waits_for_a_hop_that_freezes(
    tmp_path: Path, pusher: Pusher, frozen: str
) -> None:
    """It is tried by itself meanwhile, and has it once it goes on."""
    others = [name for name in "abcd" if name != frozen]
    async with chain(tmp_path, "abcd", linked=frozen) as made:
        made.links[frozen].frozen.set()
        push = made.push(pusher)
        await made.has(push, *others)
        assert not push.board.settled(frozen)
        made.links[frozen].frozen.clear()
        await made.has(push, frozen)
        await made.end(push)


async def test_nobody_waits_for_a_process_that_is_stopped(tmp_path: Path, pusher: Pusher) -> None:
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, hop_process.__file__, str(tmp_path / "s")]
    process = await asyncio.create_subprocess_exec(
        *words, env=path, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        told = Transfer.model_validate_json(await process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        async with chain(tmp_path, "ab") as made:
            last = made.receivers.pop()
            made.add("stopped", told)
            made.receivers.append(last)
            push = made.push(pusher)
            await made.has(push, "a", "b")
            assert not push.board.settled("stopped")
            process.send_signal(signal.SIGCONT)
            await made.has(push, "stopped")
            said, _ = await process.communicate(b"")
            assert json.loads(said)["root_hash"] == push.board.of("a").root_hash
            await made.end(push)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("slow", ["a", "b"])
async def test_nobody_waits_for_a_hop_that_trickles(
    tmp_path: Path, pusher: Pusher, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    monkeypatch.setattr(pace, "SLOW_SECONDS", 0.5)
    others = [name for name in "abcd" if name != slow]
    async with chain(tmp_path, "abcd", linked=slow) as made:
        made.links[slow].rate = 2 << 20
        push = made.push(pusher)
        await made.has(push, *others)
        assert not push.board.settled(slow)
        made.links[slow].rate = None
        await made.has(push, slow)
        await made.end(push)


async def test_who_comes_after_a_hop_that_died_in_a_chunk_gets_only_the_rest(
    tmp_path: Path, pusher: Pusher
) -> None:
    async with chain(tmp_path, "abc", linked="bc") as made:
        made.links["b"].cut_at = int(5.5 * CHUNK_BYTES)
        push = made.push(pusher)
        await made.has(push, "a", "b", "c")
        for name in "bc":
            assert made.links[name].passed < (CHUNKS + 3) * CHUNK_BYTES, "resumed, not repeated"
        await made.end(push)


async def test_a_hop_without_room_says_so_and_the_others_have_it(
    tmp_path: Path, pusher: Pusher
) -> None:
    async with chain(tmp_path, "abc", flags={"b": ["--staging-memory", "1Mi"]}) as made:
        push = made.push(pusher)
        await made.has(push, "a", "c")
        await made.has(push, "b", staged=False)
        assert "stagingMemory" in str(push.board.of("b").why)
        await made.end(push)


async def test_memory_that_the_kernel_refuses_is_told_and_given_back(
    tmp_path: Path, pusher: Pusher
) -> None:
    async with chain(tmp_path, "a") as made:
        whole = {name: torch.zeros(1, dtype=torch.uint8) for name in LAYOUT.required}
        whole["number"] = torch.full((CHUNKS * CHUNK_BYTES,), 7, dtype=torch.uint8)
        push = pusher.begin(whole, "tcp")
        push.fill_here()
        with no_file_above(CHUNK_BYTES):
            push.start(made.receivers, made.news.set)
            await made.has(push, "a", staged=False)
        slot = made.workers["a"].updates.slot
        assert slot is not None
        await until(lambda: slot.to_view().phase == "Failed", what="the slot to end")
        assert "File too large" in str(slot.to_view().error)
        assert push.board.of("a").why == slot.to_view().error
        await made.end(push)


async def test_a_worker_sends_no_more_than_its_limit(tmp_path: Path, pusher: Pusher) -> None:
    rate = 16 << 20
    async with chain(tmp_path, "ab", flags={"a": ["--weights-egress", str(rate)]}) as made:
        push = made.push(pusher)
        await made.has(push, "a", "b")
        whole = [push.board.of(name).whole_at for name in "ab"]
        assert whole[0] is not None
        assert whole[1] is not None
        begun = push.filling.filled_at
        assert whole[1] - begun > (CHUNKS - 2) * CHUNK_BYTES / rate - pace.BURST_SECONDS
        await made.end(push)
