"""One version from a trainer to many workers: a process for each, whose links have the same rate.

Only the transfer runs: a trainer's piece server, and in each worker a fetcher and servers for all others. No engine,
no control port. The rate bounds what a process sends, as `--weights-egress` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench import ROOT
from rollout_common.transfer.dialing import dial_stream
from rollout_common.transfer.frame_stream import FrameStream
from rollout_common.transfer.frames import TransferError
from rollout_common.transfer.held_version import HeldVersion
from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.pace import Pace
from rollout_common.transfer.piece_fetcher import HolderLink, PieceFetcher
from rollout_common.transfer.piece_server import PieceServer
from rollout_common.transfer.transfer_loop import TaskSet, waking
from tests.support.unit.memory_versions import PlainMemory, fill_version

TENSOR_BYTES = 8 << 20
DEADLINE_SECONDS = 300.0


def layout_of(tensors: int) -> PushLayout:
    """Return the layout of so many tensors of 8 MiB."""
    return PushLayout.plan(
        (f"layer.{number:03}", "U8", (TENSOR_BYTES,)) for number in range(tensors)
    )


class _Node:
    """One process: it serves what it holds to all that connect."""

    def __init__(self, held: HeldVersion, rate: float) -> None:
        self.held, self._pace = held, Pace(rate)
        self.tasks = TaskSet()

    async def listen(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        while True:
            connected, _ = await asyncio.get_running_loop().sock_accept(sock)
            self.tasks.start_task(self._serve(FrameStream(connected)))

    async def _serve(self, stream: FrameStream) -> None:
        stream.start_pinging()
        with contextlib.suppress(TransferError):  # it closes once it has everything
            await PieceServer(stream, self.held, self._pace).run()
        await stream.close()


async def _run_worker(node: _Node, fetcher: PieceFetcher, ports: list[int], number: int) -> None:
    async def fetch(port: int, *, is_origin: bool) -> None:
        stream = await dial_stream("127.0.0.1", port, 10)
        stream.start_pinging()
        with contextlib.suppress(TransferError):  # it ends with everybody else's
            await fetcher.fetch_from(HolderLink(str(port), stream, is_origin))

    for index, port in enumerate(ports):
        if index != number + 1:  # the first one is the trainer's
            node.tasks.start_task(fetch(port, is_origin=index == 0))
    news = asyncio.Event()
    node.held.subscribe(waking(news))
    while not fetcher.is_whole:
        news.clear()
        await news.wait()


async def _main(order: dict[str, Any]) -> None:
    """Be the trainer (number -1) or a worker; says when it began to listen, and when it has everything."""
    number, count, layout = order["number"], order["count"], layout_of(order["tensors"])
    store = PlainMemory(layout.nbytes)
    held = HeldVersion(layout, store.read_bytes)
    node = _Node(held, order["rate"])
    with socket.create_server(("127.0.0.1", 0), backlog=count + 1) as sock:
        print(json.dumps({"port": sock.getsockname()[1]}), flush=True)
        node.tasks.start_task(node.listen(sock))
        begin = json.loads(await asyncio.to_thread(sys.stdin.readline))
        if number < 0:
            fill_version(held)
        else:
            fetcher = PieceFetcher(held, store, (number, count), expected_peers=count - 1)
            await _run_worker(node, fetcher, begin["ports"], number)
        print(json.dumps({"whole_at": time.time()}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


@contextlib.contextmanager
def _started(count: int, tensors: int, rate: float) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.rigs.swarm", json.dumps(order)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(-1, count)
        for order in [{"number": number, "count": count, "tensors": tensors, "rate": rate}]
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def seconds_to_all(count: int, tensors: int, rate: float) -> float:
    """Return the seconds until all of so many workers have a version, each process sending so many bytes a second."""
    with _started(count, tensors, rate) as processes:

        def told(process: subprocess.Popen[str]) -> dict[str, Any]:
            assert process.stdout is not None
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            return answer

        ports = [told(process)["port"] for process in processes]
        began = time.time()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"ports": ports}) + "\n")
            process.stdin.flush()
        return max(float(told(process)["whole_at"]) for process in processes[1:]) - began


if __name__ == "__main__":
    asyncio.run(asyncio.wait_for(_main(json.loads(sys.argv[1])), DEADLINE_SECONDS))
