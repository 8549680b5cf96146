"""A holder that is killed, stopped, cut off or damages bytes in the middle of a transfer: nothing of it is ever wrong or late.

The memory of a version that is over is used again at once, as a worker's spare is: whatever the holder still does must not
show there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollout_common.transfer.connections.dialing import dial_stream
from rollout_common.transfer.connections.frames import Frame, TransferError
from rollout_common.transfer.held_version import HeldVersion
from rollout_common.transfer.nixl import piece_reading
from rollout_common.transfer.nixl.holder_reading import HolderReading
from rollout_common.transfer.nixl.piece_reading import PIECE_BYTES, piece_reader
from rollout_common.transfer.piece_choice import HolderLink
from rollout_common.transfer.piece_fetcher import PieceFetcher
from rollout_common.transfer.settings import HOP_SECONDS
from tests.support.unit import holder_process
from tests.support.unit.memory_versions import PlainMemory
from tests.support.unit.nixl_library import end_processes, nixl_installed

FAULTS = ("killed", "stopped", "cut", "flips")
OF_NIXL = (*FAULTS, "killed nixl", "stopped nixl")
"""The last two happen to the process from which NIXL reads, and its holder goes on."""
LAYOUT = holder_process.make_layout()
CONTENT = holder_process.make_content(LAYOUT)
LARGEST_PIECE = max(map(LAYOUT.pieces.nbytes_of, range(len(LAYOUT.pieces))))
PATTERN = b"\xa5"
LATE_SECONDS = 0.02
"""What a holder that goes on gets to do harm."""


@dataclass
class Found:
    """What many faults did."""

    noticed: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds from the fault until the link ended."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds until the version was whole."""
    read: int = 0
    """Links of which NIXL read to the end."""


class Nursery:
    """Starts holders."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, *, flips: bool = False, nixl: bool = False) -> tuple[int, int]:
        """Return a new holder's process id and port."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"flips": flips, "nixl": nixl}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["pid"], answer["port"]


@pytest.fixture(scope="module", autouse=True)
def nixl() -> Iterator[None]:
    with nixl_installed():
        yield


@pytest.fixture(scope="module")
def nursery(nixl: None) -> Iterator[Nursery]:
    process = subprocess.Popen(
        [sys.executable, "-m", holder_process.__name__],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield Nursery(process)
    process.kill()
    process.communicate()


async def fetch_with(
    fault: str,
    sound: int,
    bad: tuple[int, int],
    slot: PlainMemory,
    found: Found,
    chance: random.Random,
) -> None:
    """Fetch a version from a sound holder and one that has this fault, then use its memory again."""
    held = HeldVersion(LAYOUT, slot.read_bytes)
    fetcher = PieceFetcher(held, slot)
    links = [
        HolderLink(name, await dial_stream("127.0.0.1", port, 5, silence=5.0))
        for name, port in (("sound", sound), ("bad", bad[1]))
    ]
    ended: list[float] = []

    async def fetch(link: HolderLink) -> None:
        link.stream.start_pinging()
        with contextlib.suppress(TransferError):
            await fetcher.fetch_from(link)
        if link is links[1]:
            ended.append(time.monotonic())

    began = time.monotonic()
    tasks = [asyncio.create_task(fetch(link)) for link in links]
    await asyncio.sleep(chance.uniform(0.0, 0.03))
    at = time.monotonic()
    match fault:
        case "killed":
            os.kill(bad[0], signal.SIGKILL)
        case "stopped":
            os.kill(bad[0], signal.SIGSTOP)
        case "cut":
            links[1].stream.interrupt()
        case "killed nixl" | "stopped nixl":
            ending = signal.SIGKILL if fault == "killed nixl" else signal.SIGSTOP
            for pid in children_of(bad[0]):
                os.kill(pid, ending)
    async with asyncio.timeout(10):
        await tasks[0]
    assert fetcher.is_whole, fault
    assert bytes(slot.memory) == expected_content(slot), fault
    found.seconds[fault].append(time.monotonic() - began)
    await asyncio.wait(tasks)
    found.noticed[fault].append(ended[0] - at)
    found.read += sum(
        link.reading.memory is not None and link.reading.memory.broken is None for link in links
    )
    for link in links:
        await link.stream.close()
    await reuse(slot, bad[0] if fault.startswith("stopped") else None)


def children_of(pid: int) -> list[int]:
    """Return the processes that this one has started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]


async def reuse(slot: PlainMemory, stopped: int | None) -> None:
    """Fill all memory that may be used again with something else, and see that it stays there whatever a stopped holder does then.

    Of each part of the ring that is what a piece of this version takes: a late transfer comes nowhere else.
    """
    ring = piece_reader()._ring
    parts = [] if ring is None else list(ring._free._queue)  # type: ignore[attr-defined]
    places = [
        slot.memory,
        *(memoryview(ring._memory)[p * PIECE_BYTES :][:LARGEST_PIECE] for p in parts if ring),
    ]
    for place in places:
        place[:] = PATTERN * len(place)
    if stopped is not None:
        for pid in (stopped, *children_of(stopped)):
            os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(LATE_SECONDS)
    for place in places:
        assert bytes(place) == PATTERN * len(place), "bytes came late"


def expected_content(slot: PlainMemory) -> bytes:
    """Return what the slot should hold: the tensors, and whatever it has in the gaps between them."""
    expected = bytearray(slot.memory)
    for placed in LAYOUT.tensors:
        expected[placed.start : placed.end] = CONTENT[placed.start : placed.end]
    return bytes(expected)


def run_faults(nursery: Nursery, count: int, seed: int, *, nixl: bool = False) -> Found:
    found, slot, chance = Found(), PlainMemory(LAYOUT.nbytes), random.Random(seed)
    _, sound = nursery.start(nixl=nixl)
    bad: dict[str, tuple[int, int]] = {}
    faults = OF_NIXL if nixl else FAULTS

    async def run_all() -> None:
        for number in range(count):
            fault = faults[number % len(faults)]
            if fault == "killed" or fault not in bad:
                bad[fault] = nursery.start(flips=fault == "flips", nixl=nixl)
            await fetch_with(fault, sound, bad[fault], slot, found, chance)
        await end_processes()

    asyncio.run(run_all())
    for pid, _ in bad.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return found


def check(found: Found, killed_seconds: float, whole_seconds: float = 5.0) -> None:
    """Print what was found.

    A killed holder must be noticed within `killed_seconds`, the median of all of them; whatever a stopped one owes must have
    come from others within `whole_seconds`.
    """
    for fault, seconds in found.seconds.items():
        noticed = found.noticed[fault]
        sys.stdout.write(
            f"{fault}: {len(seconds)} times; whole after {statistics.median(seconds):.3f} s, at most {max(seconds):.3f};"
            f" noticed after {statistics.median(noticed):.3f} s\n"
        )
    assert statistics.median(found.noticed["killed"]) < killed_seconds
    assert max(found.seconds["stopped"]) < whole_seconds, "others serve what a stopped holder owes"


def test_nothing_is_wrong_or_late_whatever_a_holder_does(nursery: Nursery) -> None:
    # The other lanes of tests have the processors meanwhile: the goal of 0.1 s is for the soak.
    check(run_faults(nursery, 24, seed=20261125), killed_seconds=1.0, whole_seconds=8.0)


@pytest.mark.soak
def test_nothing_is_wrong_or_late_a_thousand_times(nursery: Nursery) -> None:
    check(run_faults(nursery, 1000, seed=random.randrange(1 << 32)), killed_seconds=0.1)


def test_a_holder_whose_nixl_is_stopped_gives_its_bytes_over_tcp(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the process that reads is killed, whatever is written to its memory later."""
    monkeypatch.setattr(piece_reading, "HOP_SECONDS", 0.5)
    pid, port = nursery.start(nixl=True)
    take_memory, stopping = HolderReading.take_memory, [False]

    def take_and_stop(self: HolderReading, frame: Frame) -> None:
        take_memory(self, frame)
        for nixl in children_of(pid) if stopping.pop(0) else []:
            os.kill(nixl, signal.SIGSTOP)

    monkeypatch.setattr(HolderReading, "take_memory", take_and_stop)

    async def fetch(*, stops: bool) -> None:
        stopping[:], slot = [stops], PlainMemory(LAYOUT.nbytes)
        link = HolderLink("it", await dial_stream("127.0.0.1", port, 5, silence=5.0))
        process = piece_reader().process
        async with asyncio.timeout(20):
            await PieceFetcher(HeldVersion(LAYOUT, slot.read_bytes), slot).fetch_from(link)
        assert bytes(slot.memory) == expected_content(slot)
        await link.stream.close()
        if stops:
            assert link.reading.memory is not None
            assert link.reading.memory.broken == "nothing came for 0.5 s"
            assert process is not None
            assert process.ended is not None
        for nixl in children_of(pid):
            os.kill(nixl, signal.SIGCONT)

    async def fetch_three_times() -> None:
        for stops in (False, True, False):
            await fetch(stops=stops)
        await end_processes()

    asyncio.run(fetch_three_times())


def check_nixl(found: Found) -> None:
    # A read of a stopped holder's memory is given up after `HOP_SECONDS`; then others are asked.
    check(found, killed_seconds=5.0, whole_seconds=HOP_SECONDS + 3)
    assert found.read > len(found.seconds), "NIXL has read"


def test_nothing_is_wrong_or_late_whatever_happens_to_a_holder_that_nixl_reads_from(
    nursery: Nursery,
) -> None:
    check_nixl(run_faults(nursery, 18, seed=20261126, nixl=True))


@pytest.mark.soak
def test_nothing_is_wrong_or_late_a_thousand_times_with_nixl(nursery: Nursery) -> None:
    check_nixl(run_faults(nursery, 1000, seed=random.randrange(1 << 32), nixl=True))
