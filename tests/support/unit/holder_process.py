"""Holders of one version, each a process of its own that a test kills, stops and corrupts.

    python -m tests.support.unit.holder_process

Takes a line of JSON from stdin for each holder, `{"flips": whether it damages pieces, "nixl": whether NIXL may read them}`, forks it, and
writes `{"pid": …, "port": …}`. Its holders go with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from typing import Any

from rollout_common.parent_death import die_with_parent
from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import TransferError
from rollout_common.transfer.connections.rate_limit import RateLimit
from rollout_common.transfer.held_version import HeldVersion
from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.memory.slot import Slot
from rollout_common.transfer.nixl.memory_serving import memory_server
from rollout_common.transfer.piece_server import PieceServer
from tests.support.unit.memory_versions import hold_everything

SIZES = (3 << 20, 700, (1 << 20) + 1, 5, 2 << 20, 300_000)
RATE = 150e6
"""Bytes a second that a holder sends: a version takes some hundredths of a second."""
FLIPPED_SHARE = 0.3


def make_layout() -> PushLayout:
    return PushLayout.plan((f"t{number}", "U8", (size,)) for number, size in enumerate(SIZES))


def make_content(layout: PushLayout) -> bytes:
    return random.Random(1).randbytes(layout.nbytes)


async def serve(sock: socket.socket, held: HeldVersion, slot: Slot | None) -> None:
    """Serve to one fetcher after the other; `slot`: the memory that NIXL reads."""
    sock.setblocking(False)
    while True:
        connected, _ = await asyncio.get_running_loop().sock_accept(sock)
        stream = FrameStream(connected)
        stream.start_pinging()
        try:
            async with contextlib.AsyncExitStack() as stack:
                registered = None
                if slot is not None:
                    serving = memory_server().serve_memory(slot.handle, slot.size)
                    registered = await stack.enter_async_context(serving)
                await PieceServer(stream, held, RateLimit(RATE), registered=registered).run()
        except TransferError:
            pass
        finally:
            await stream.close()


def damage_memory(memory: memoryview, chance: random.Random) -> None:
    """Flip a bit in some places for a moment, again and again."""
    while True:
        places = [chance.randrange(len(memory)) for _ in range(3)]
        for flip in range(2):
            for place in places:
                memory[place] ^= 1
            time.sleep(0.002 if flip else 0.004)


def be_holder(order: dict[str, bool]) -> None:
    layout, slot = make_layout(), None
    chance = random.Random(os.getpid())
    content: Any = bytearray(make_content(layout))
    held = hold_everything(layout, memoryview(bytes(content)))
    if order["nixl"]:
        slot = Slot(layout.nbytes)
        with slot.view_bytes(0, layout.nbytes) as memory:
            memory[:] = content
        if order["flips"]:
            memory = slot.view_bytes(0, layout.nbytes)
            threading.Thread(target=damage_memory, args=(memory, chance), daemon=True).start()
    elif order["flips"]:

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
        asyncio.run(serve(sock, held, slot))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if not os.fork():
            die_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            be_holder(json.loads(line))
            os._exit(1)


if __name__ == "__main__":
    main()
