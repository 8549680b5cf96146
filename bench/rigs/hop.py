"""A worker's receiving end without an engine: `python hop.py RATE`, RATE in bytes a second.

For each line of input it expects one version more and writes where, as JSON; then, once it has verified it, a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from rollout_worker.engine import Entry, Layout, Mapped
from rollout_worker.ports.weights import WeightsPort
from rollout_worker.schemas import PushedBytes, WeightsId
from rollout_worker.settings import Settings, add_flags, parse
from rollout_worker.sources.incoming import Incoming
from rollout_worker.sources.memory import Memory
from rollout_worker.sources.pushed import Desk, receive


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
    port = ["--data-host", "127.0.0.1", "--weights-port", "0", "--weights-egress", rate]
    return parse(parser.parse_args([*alone, *port]), {})


def room(nbytes: int) -> tuple[Memory, Callable[[], None]]:
    """Give memory that nobody charges."""
    return Memory(nbytes), lambda: None


async def serve(rate: str) -> None:
    """Take one version after another until there is no more input."""
    desk = Desk()
    port = WeightsPort(settings(rate), desk)
    port.start()
    version = 0
    while await asyncio.to_thread(sys.stdin.readline):
        version += 1
        identity = WeightsId(epoch=1, version=version)
        incoming = Incoming(identity, PushedBytes(), lambda _: None, room)
        say(desk.expect(incoming).model_dump(mode="json"))
        layout = Layout({}, {}, {})
        sink = await receive(open_slot, layout, incoming, lambda _: None, lambda done, total: None)
        say(incoming.root_hash)
        sink.close()
        incoming.close("the next one comes")
    await asyncio.to_thread(port.stop)


def say(told: object) -> None:
    """Write a line."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
