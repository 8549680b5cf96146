"""A worker's port for weights without an engine: `python hop.py RATE`, RATE in bytes a second, or `none`.

Each line of input is an order, each line of output an answer, both JSON:

    {"do": "take"}            expects one version more; writes where, then its root hash, once it is verified
    {"do": "offer"}           writes how a peer fetches the version that is here
    {"do": "join", peers}     fetches a version; writes its root hash, the seconds until it was verified, and of CPU
    {"do": "share", peers}    the same, to memory that other processes can map, as those of vLLM do
    {"do": "copy", peers}     the same from the first peer alone, hashing nothing

What is here when the next version comes is given up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from rollout_worker.engine import Entry, Layout, Mapped, Sink
from rollout_worker.ports.weights import WeightsPort
from rollout_worker.schemas import Peer, PushedBytes, WeightsId
from rollout_worker.settings import Settings, add_flags, parse
from rollout_worker.sources.fetching import RANGE_CHUNKS, Fetching
from rollout_worker.sources.giving import Kept, kept_of
from rollout_worker.sources.incoming import Incoming
from rollout_worker.sources.memory import Memory
from rollout_worker.sources.pushed import Desk, receive
from rollout_worker.transfer.dialing import dial
from rollout_worker.transfer.frames import CHUNK_BYTES, HOP_SECONDS, Kind
from rollout_worker.transfer.layout import PushLayout


class Taken:
    """A sink that serves from the memory that was given, as the hf engine's does."""

    slot, took, nbytes = "", True, 0
    memory: Literal["host", "device"] = "host"

    def __init__(self, given: Mapped) -> None:
        self._given = given

    def allocate(self, entry: Entry) -> memoryview | None:
        """Need no copy."""

    def seal(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Give the memory back."""
        self._given.release()


async def open_slot(entries: Any, *, given: Mapped) -> Taken:
    """As `Engine.open_slot`."""
    return Taken(given)


def settings(rate: str) -> Settings:
    """Return those of a worker with a port for weights, and nothing else."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    alone = ["--model", "none", "--auth", "none", "--control-host", "127.0.0.1"]
    port = ["--data-host", "127.0.0.1", "--weights-port", "0"]
    limit = [] if rate == "none" else ["--weights-egress", rate]
    return parse(parser.parse_args([*alone, *port, *limit]), {})


def room(nbytes: int, *, private: bool) -> tuple[Memory, Callable[[], None]]:
    """Give memory that nobody charges."""
    return Memory(nbytes, hollow=True, private=private), lambda: None


class Hop:
    """See the module."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._version = desk, 0
        self._kept: Kept | None = None
        self._sink: Sink | None = None

    async def obey(self, order: Mapping[str, Any]) -> None:
        """Do what is asked, and say what came of it."""
        peers = tuple(Peer.model_validate(each) for each in order.get("peers", ()))
        match order["do"]:
            case "take":
                incoming = self._expected(())
                say(self._desk.expect(incoming).model_dump(mode="json"))
                await self._receive(incoming)
                say(incoming.root_hash)
            case "offer":
                assert self._kept is not None, "it has taken a version"
                offer = self._desk.offer(self._kept)
                say({"host": "127.0.0.1", "port": offer.port, "ticket": offer.ticket})
            case "join" | "share":
                incoming = self._expected(peers, private=order["do"] == "join")
                began, cpu = time.monotonic(), time.process_time()
                Fetching(incoming, peers, self._desk.outward).start()
                await self._receive(incoming)
                took = {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu}
                say({"root_hash": incoming.root_hash, **took})
            case _:
                self._give_up()
                say({"seconds": await asyncio.to_thread(bare_copy, peers[0])})

    def _expected(self, peers: tuple[Peer, ...], *, private: bool = True) -> Incoming:
        """Give up what is here, and return what is to come."""
        self._give_up()
        self._version += 1
        identity = WeightsId(epoch=1, version=self._version)
        taken = partial(room, private=private)
        return Incoming(identity, PushedBytes(peers=peers), lambda _: None, taken)

    def _give_up(self) -> None:
        """Free what is here: pages that were just freed cost less than what the machine has not used for long."""
        if self._kept is not None and self._sink is not None:
            self._sink.close()
            self._kept.release()

    async def _receive(self, incoming: Incoming) -> None:
        """Return once it is staged; it is kept, as a committed one is."""
        layout = Layout({}, {}, {})
        self._sink = await receive(
            open_slot, layout, incoming, lambda _: None, lambda done, total: None
        )
        self._kept = kept_of(incoming)


def bare_copy(peer: Peer) -> float:
    """Return the seconds in which a version comes from one peer to fresh memory, frame by frame, unverified."""
    began = time.monotonic()
    connection = dial(peer.host, peer.port, HOP_SECONDS)
    connection.send(Kind.FETCH, {"ticket": peer.ticket})
    size = PushLayout.from_json(connection.expect(Kind.LAYOUT).head["layout"]).nbytes
    memory = Memory(size, hollow=True, private=True)
    release, step = memory.hold(), RANGE_CHUNKS * CHUNK_BYTES
    for first in range(0, size, step):
        connection.send(Kind.GET, {"ranges": [[first, min(first + step, size)]]})
        for begin in range(first, min(first + step, size), CHUNK_BYTES):
            frame = connection.expect(Kind.DATA)
            memory.take(begin, begin + frame.payload, connection.read_into)
    took = time.monotonic() - began
    connection.close()
    release()
    return took


async def serve(rate: str) -> None:
    """Obey until there is no more input."""
    desk = Desk()
    port = WeightsPort(settings(rate), desk)
    port.start()
    hop = Hop(desk)
    while line := await asyncio.to_thread(sys.stdin.readline):
        await hop.obey(json.loads(line))
    await asyncio.to_thread(port.stop)


def say(told: object) -> None:
    """Write a line."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
