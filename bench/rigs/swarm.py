"""One version from the nodes of a trainer to many workers: a process for each, on a node of its own whose link has a rate.

Only the transfer runs: a piece server in each of the trainer's nodes, which have equal parts of the version, and in
each worker a fetcher and servers for all others. No engine, no control port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from bench import ROOT
from bench.rigs.limited_links import LinkedNode
from rollout_client.steering.pushing.routes import count_shares
from rollout_common.transfer import pieces
from rollout_common.transfer.connections.dialing import dial_stream
from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import TransferError
from rollout_common.transfer.connections.transfer_loop import TaskSet, waking
from rollout_common.transfer.held_version import HeldVersion
from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.memory.slot import Slot
from rollout_common.transfer.nixl.memory_serving import memory_server
from rollout_common.transfer.nixl.piece_reading import piece_reader
from rollout_common.transfer.piece_choice import HolderLink
from rollout_common.transfer.piece_fetcher import PieceFetcher
from rollout_common.transfer.piece_server import PieceServer
from tests.support.unit.memory_versions import PlainMemory, fill_version

TENSOR_BYTES = 8 << 20
DEADLINE_SECONDS = 300.0


def layout_of(tensors: int) -> PushLayout:
    return PushLayout.plan(
        (f"layer.{number:03}", "U8", (TENSOR_BYTES,)) for number in range(tensors)
    )


class _Node:
    """One process: it serves what it holds to all that connect."""

    def __init__(self, held: HeldVersion, slot: Slot | None) -> None:
        self.held, self._slot = held, slot
        self.tasks = TaskSet()

    async def listen(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        while True:
            connected, _ = await asyncio.get_running_loop().sock_accept(sock)
            self.tasks.start_task(self._serve(FrameStream(connected)))

    async def _serve(self, stream: FrameStream) -> None:
        stream.start_pinging()
        with contextlib.suppress(TransferError):  # it closes once it has everything
            async with self.registered() as memory:
                await PieceServer(stream, self.held, registered=memory).run()
        await stream.close()

    @contextlib.asynccontextmanager
    async def registered(self) -> AsyncIterator[Mapping[str, Any] | None]:
        """Let NIXL read it for the block, if it has memory for that."""
        if self._slot is None:
            yield None
            return
        async with memory_server().serve_memory(self._slot.handle, self._slot.size) as memory:
            yield memory


async def _run_worker(
    node: _Node,
    fetcher: PieceFetcher,
    holders: Sequence[tuple[str, int]],
    origins: int,
    number: int,
) -> None:
    async def fetch(host: str, port: int, *, is_origin: bool) -> None:
        stream = await dial_stream(host, port, 10)
        stream.start_pinging()
        with contextlib.suppress(TransferError):  # it ends with everybody else's
            await fetcher.fetch_from(HolderLink(f"{host}:{port}", stream, is_origin))

    for index, holder in enumerate(holders):
        if index != number + origins:  # the first ones are the trainer's
            node.tasks.start_task(fetch(*holder, is_origin=index < origins))
    news = asyncio.Event()
    node.held.subscribe(waking(news))
    while not fetcher.is_whole:
        news.clear()
        await news.wait()


async def _main(order: dict[str, Any]) -> None:
    """Be a node of the trainer (numbers below 0) or a worker; says when it began to listen, and when it has everything."""
    pieces.MOST_PIECES = order["pieces"]
    number, count, layout = order["number"], order["count"], layout_of(order["tensors"])
    origins = order["origins"]
    store = PlainMemory(layout.nbytes)
    slot = Slot(layout.nbytes) if order["nixl"] else None
    if slot is not None:
        store.memory = slot.view_bytes(0, layout.nbytes)
        await piece_reader().start_ring()
    held = HeldVersion(layout, store.read_bytes)
    node = _Node(held, slot)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(node.registered())  # not once for each connection
        server = socket.create_server((order["address"], 0), backlog=count + 1)
        sock = stack.enter_context(server)
        print(json.dumps({"listens": sock.getsockname()}), flush=True)
        node.tasks.start_task(node.listen(sock))
        begin = json.loads(await asyncio.to_thread(sys.stdin.readline))
        busy = time.thread_time()
        if number < 0:
            _fill_part(held, number + origins, origins)
        else:
            shares = count_shares(count, origins)
            share = number % shares, shares
            fetcher = PieceFetcher(held, store, share, expected_peers=count - 1)
            await _run_worker(node, fetcher, begin["holders"], origins, number)
        busy = time.thread_time() - busy
        print(json.dumps({"whole_at": time.monotonic(), "loop_seconds": busy}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


def _fill_part(held: HeldVersion, node: int, nodes: int) -> None:
    """Note the pieces that a node of the trainer has; the first node knows what everything hashes to."""
    if node == 0:
        whole = HeldVersion(held.layout, held.read_bytes)
        fill_version(whole)
        assert whole.end is not None
        held.finish(whole.end)
    count = len(held.pieces)
    for piece in range(count * node // nodes, count * (node + 1) // nodes):
        with held.read_bytes(*held.pieces.span(piece)) as content:
            held.mark_piece(piece, held.pieces.hash_leaves(piece, content))


@contextlib.contextmanager
def _started(
    origins: int, count: int, order: dict[str, Any], nodes: Sequence[LinkedNode]
) -> Iterator[list[subprocess.Popen[str]]]:
    def start_process(number: int) -> subprocess.Popen[str]:
        node = nodes[number + origins] if nodes else None
        numbers = {"origins": origins, "count": count, "number": number}
        given = json.dumps({**order, **numbers, "address": node.address if node else "127.0.0.1"})
        command = [sys.executable, "-m", "bench.rigs.swarm", given]
        return subprocess.Popen(
            node.command_inside(*command) if node else command,
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip

    processes = [start_process(number) for number in range(-origins, count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def seconds_to_all(
    origins: int,
    count: int,
    tensors: int,
    most_pieces: int = pieces.MOST_PIECES,
    *,
    nodes: Sequence[LinkedNode] = (),
    nixl: bool = False,
) -> tuple[float, float]:
    """Return the seconds until all workers have a version, and those of the processor that the busiest loop took.

    Args:
        origins: The nodes of the trainer.
        count: The workers.
        tensors: Of the version, of 8 MiB each.
        most_pieces: Pieces are larger, up to 4 MiB, where the version would have more of them.
        nodes: Where the trainer's nodes and the workers run, in this order; none: on this machine's loopback.
        nixl: Whether NIXL reads the pieces.
    """
    order = {"tensors": tensors, "pieces": most_pieces, "nixl": nixl}
    with _started(origins, count, order, nodes) as processes:

        def told(process: subprocess.Popen[str]) -> dict[str, Any]:
            assert process.stdout is not None
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            return answer

        holders = [told(process)["listens"] for process in processes]
        began = time.monotonic()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"holders": holders}) + "\n")
            process.stdin.flush()
        said = [told(process) for process in processes[origins:]]
        return max(each["whole_at"] for each in said) - began, max(
            each["loop_seconds"] for each in said
        )


if __name__ == "__main__":
    asyncio.run(asyncio.wait_for(_main(json.loads(sys.argv[1])), DEADLINE_SECONDS))
