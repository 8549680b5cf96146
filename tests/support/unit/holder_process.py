"""Holders of one version, each a process of its own that a test kills, stops and corrupts.

    python -m tests.support.unit.holder_process

Takes a line of JSON from stdin for each holder, `{"flips": whether it damages pieces}`, forks it, and writes `{"pid": …, "port": …}`. Its
holders go with it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import signal
import socket
import sys

from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import TransferError
from rollout_common.transfer.connections.rate_limit import RateLimit
from rollout_common.transfer.held_version import HeldVersion
from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.piece_server import PieceServer
from tests.support.unit.memory_versions import hold_everything

SIZES = (3 << 20, 700, (1 << 20) + 1, 5, 2 << 20, 300_000)
RATE = 150e6
"""Bytes a second that a holder sends: a version takes some hundredths of a second."""
FLIPPED_SHARE = 0.3
PR_SET_PDEATHSIG = 1


def make_layout() -> PushLayout:
    return PushLayout.plan((f"t{number}", "U8", (size,)) for number, size in enumerate(SIZES))


def make_content(layout: PushLayout) -> bytes:
    return random.Random(1).randbytes(layout.nbytes)


async def serve(sock: socket.socket, held: HeldVersion) -> None:
    """Serve to one fetcher after the other."""
    sock.setblocking(False)
    while True:
        connected, _ = await asyncio.get_running_loop().sock_accept(sock)
        stream = FrameStream(connected)
        stream.start_pinging()
        try:
            await PieceServer(stream, held, RateLimit(RATE)).run()
        except TransferError:
            pass
        finally:
            await stream.close()


def be_holder(order: dict[str, bool]) -> None:
    layout = make_layout()
    content, chance = bytearray(make_content(layout)), random.Random(os.getpid())
    held = hold_everything(layout, memoryview(content))
    if order["flips"]:

        def read_damaged(begin: int, end: int) -> memoryview:
            taken = bytearray(content[begin:end])
            if chance.random() < FLIPPED_SHARE:
                taken[chance.randrange(len(taken))] ^= 1 << chance.randrange(8)
            return memoryview(taken)

        held.read_bytes = read_damaged
    with socket.create_server(("127.0.0.1", 0)) as sock:
        answer = {"pid": os.getpid(), "port": sock.getsockname()[1]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        asyncio.run(serve(sock, held))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if not os.fork():
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            be_holder(json.loads(line))
            os._exit(1)


if __name__ == "__main__":
    main()
