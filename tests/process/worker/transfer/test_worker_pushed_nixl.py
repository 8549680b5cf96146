"""Weights that NIXL reads: by replicas from the trainer and from each other, by a joiner, and where it is missing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_client import PublishFailed
from rollout_client.steering.pushing.options import PushPlan
from rollout_client.steering.pushing.push import Push
from rollout_client.steering.pushing.pusher import Pusher
from rollout_client.steering.pushing.routes import Receiver
from rollout_common.transfer.connections.frames import Kind
from rollout_common.transfer.connections.transfer_loop import run_on_loop
from rollout_common.transfer.nixl import piece_reading
from rollout_common.transfer.nixl.agent_handle import NixlFailed, NixlProcess
from rollout_common.transfer.nixl.memory_serving import MemoryServer, memory_server
from rollout_common.transfer.nixl.piece_reading import PieceReader
from rollout_common.wire.root_hash import LEAF_BYTES
from rollout_worker.schemas import OfferRequest, Transfer
from tests.support.unit.links import Link
from tests.support.unit.nixl_library import nixl_installed
from tests.support.unit.pushing import Version, pushed_worker, quiet, stage, ticket, trainer
from tests.support.unit.replica_process import start_replica
from tests.support.unit.tiny_engine import LAYOUT
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("any_size")

PIECES = 12
NBYTES = PIECES * LEAF_BYTES
"""Of the tensor `number`: all others have one byte."""


@pytest.fixture
def nixl() -> Iterator[None]:
    with nixl_installed():
        yield


@pytest.fixture
def pusher() -> Iterator[Pusher]:
    made = Pusher()
    yield made
    made.close()


def begin_push(pusher: Pusher, ends: dict[str, Transfer], rate: float | None = None) -> Push:
    tensors = {name: torch.zeros(1, dtype=torch.uint8) for name in LAYOUT.required}
    tensors["number"] = torch.randint(256, (NBYTES,), dtype=torch.uint8)
    tensors["number"][:] = 7
    push = pusher.begin(tensors, PushPlan("nixl", rate=rate))
    push.fill_here()
    receivers = [Receiver(name, "127.0.0.1", transfer) for name, transfer in ends.items()]
    push.start(receivers, threading.Event().set)
    return push


async def end_push(push: Push) -> int:
    """Wait until all replicas have it; returns the bytes of tensors that left the trainer."""
    names = [route.receiver.name for route in push._routes]
    await until(lambda: all(push.progress.settled(name) for name in names), 30, what="the end")
    for name in names:
        assert push.progress.of(name).root_hash == push.filling.root_hash, push.progress.of(name)
    for each in push.senders:
        assert await asyncio.to_thread(each.join, 10)
    push.stop()
    push.close()
    await quiet()
    return sum(each.sent for each in push.senders)


async def test_replicas_read_from_the_trainer_and_from_each_other(
    nixl: None, tmp_path: Path, pusher: Pusher
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        links, ends, processes = [], {}, []
        starting = [start_replica(tmp_path / name) for name in "ab"]
        started = await asyncio.gather(*map(stack.enter_async_context, starting))
        for name, (process, transfer) in zip("ab", started, strict=True):
            assert transfer.port is not None
            links.append(Link(transfer.port))
            stack.callback(links[-1].close)
            ends[name] = transfer.model_copy(update={"port": links[-1].port})
            processes.append(process)
        push = begin_push(pusher, ends)
        sent = await end_push(push)
        assert sum(link.passed + link.returned for link in links) < LEAF_BYTES, "NIXL read it all"
        # Each reads its share from here. If a piece is late, as on a busy machine, it is read a second time.
        assert NBYTES <= sent < 1.8 * NBYTES
        for process in processes:
            said, _ = await process.communicate(b"")
            assert json.loads(said)["root_hash"] == push.filling.root_hash


async def test_a_joiner_reads_from_a_worker_what_nixl_brought_there(
    nixl: None, tmp_path: Path, pusher: Pusher
) -> None:
    async with pushed_worker(tmp_path / "a") as a, pushed_worker(tmp_path / "b") as b:
        begun = await ticket(a, 1)
        push = begin_push(pusher, {"a": begun})
        await end_push(push)
        await a.commit(1)
        offered = a.updates.offer_weights("me", OfferRequest(epoch=1, version=1))
        with contextlib.closing(Link(offered.port)) as link:
            peer = {"host": "127.0.0.1", "port": link.port, "ticket": offered.ticket}
            await stage(b, 1, source={"pushed": {"peers": [peer]}}, root_hash=offered.root_hash)
            slot = b.slot
            await until(lambda: slot.to_view().phase != "Staging", 30, what="the end")
            assert slot.to_view().root_hash == push.filling.root_hash, slot.to_view().error
            assert link.passed + link.returned < LEAF_BYTES, "NIXL read it all"
        await b.commit(1)
        assert b.engine.active.number == 7


async def test_a_publish_goes_on_though_the_trainers_nixl_is_killed_or_stopped(
    nixl: None, tmp_path: Path, pusher: Pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes come over the connections then, and the next publish starts it again."""
    monkeypatch.setattr(piece_reading, "HOP_SECONDS", 1.0)
    for number, end in enumerate((signal.SIGKILL, signal.SIGSTOP, None)):
        async with contextlib.AsyncExitStack() as stack:
            starting = pushed_worker(tmp_path / str(number))
            begun = await ticket(await stack.enter_async_context(starting), 1)
            assert begun.port is not None
            link = stack.enter_context(contextlib.closing(Link(begun.port)))
            begun = begun.model_copy(update={"port": link.port})
            push = begin_push(pusher, {"a": begun}, rate=NBYTES / 0.5)
            await until(lambda: push.senders[0].sent > 0, what="the first piece")  # noqa: B023
            serving = await asyncio.wrap_future(run_on_loop(serving_pid()))
            if end is not None:
                os.kill(serving, end)
            await end_push(push)
            assert (link.passed > LEAF_BYTES) == (end is not None)
            with contextlib.suppress(ProcessLookupError):
                os.kill(serving, signal.SIGKILL)
            await until(lambda: not Path(f"/proc/{serving}/fd").exists(), what="its end")  # noqa: B023


async def serving_pid() -> int:
    process = memory_server().process
    assert process is not None
    return process.pid


async def test_nixl_starts_in_a_process_with_more_open_files_than_select_takes(nixl: None) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        process = NixlProcess()
        await process.start()
        await process.call("drop", peer=0)
        process.end("the test is over")
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_memory_whose_registration_was_cancelled_is_not_kept(nixl: None) -> None:
    server, handle = MemoryServer(), os.memfd_create("cancelled")
    os.ftruncate(handle, 1 << 20)
    process = await server.start_process()

    async def serve() -> None:
        async with server.serve_memory(handle, 1 << 20):
            pass

    os.kill(process.pid, signal.SIGSTOP)
    serving = asyncio.create_task(serve())
    await asyncio.sleep(0.05)
    serving.cancel()
    await asyncio.wait([serving])
    os.kill(process.pid, signal.SIGCONT)
    await process.call("drop", peer=0)
    maps = await asyncio.to_thread(Path(f"/proc/{process.pid}/maps").read_text)
    assert "memfd:cancelled" not in maps
    process.end("the test is over")
    os.close(handle)


def test_a_trainer_without_nixl_says_what_is_missing() -> None:
    with pytest.raises(
        PublishFailed, match=r"this trainer has no NIXL: .*pip install '\.\[nixl\]'"
    ):
        PushPlan.of(..., {"transport": "nixl"})


async def test_a_worker_without_nixl_says_what_is_missing(tmp_path: Path) -> None:
    async with pushed_worker(tmp_path) as worker:
        begun = await ticket(worker, 1)
        with trainer(begun, Version(7), "tcp") as end:
            end.hello(begun, by="nixl")
            answer = await asyncio.to_thread(end.connection.expect, Kind.ERROR, Kind.READY)
            assert answer.head.get("slug") == "no-nixl", answer
            assert "pip install '.[nixl]'" in answer.text("detail")


async def test_a_process_that_can_not_have_the_ring_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without enough memory that may be locked: each publish would leave one behind."""
    ended: list[str] = []

    class Full(NixlProcess):
        async def start(self) -> None:
            pass

        async def call(self, *_: Any, **__: Any) -> dict[str, Any]:
            raise NixlFailed("no memory can be locked")

        def end(self, why: str) -> None:
            ended.append(why)

    monkeypatch.setattr(piece_reading, "NixlProcess", Full)
    with pytest.raises(NixlFailed, match="no memory can be locked"):
        await PieceReader().start_ring()
    assert ended == ["its ring could not be made"]
