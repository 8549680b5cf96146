"""What measurements are set up with measures what it says."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from bench.commands import turn
from bench.options import Options
from bench.rigs.instant_workers import in_turns
from bench.rigs.limited_links import explain_missing, limited_links
from bench.rigs.phases import quantile
from bench.rigs.streams import Streams

Buckets = dict[tuple[str, ...], float]


def test_a_pause_is_the_longest_time_in_which_no_stream_got_anything() -> None:
    streams = Streams()
    for arrivals in ([1.0, 2.0, 3.0, 7.5], [1.5, 2.5, 3.5, 7.0]):
        streams.open().extend(arrivals)
    assert streams.longest(3.2, 8.0) == pytest.approx(3.5)
    assert streams.longest(3.2, 4.5) == pytest.approx(1.0), "it may last until the end"
    assert streams.usual(5.0) == pytest.approx([1.0] * 4)
    assert len(streams.seen(7.2)) == 1, "the second has got nothing since"


async def test_two_calls_take_turns() -> None:
    order: list[str] = []

    async def one() -> None:
        order.append("one")

    async def other() -> None:
        order.append("other")

    found = await in_turns(one, other, 3)
    assert order == ["one", "other"] * 3
    assert [len(side) for side in found] == [3, 3]


def test_both_locks_are_handed_over_turn_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Seen:
        def __init__(self, _: Path, kind: str) -> None:
            self.kind = kind

        def send_order(self, order: str) -> None:
            if order == "give":
                seen.append(self.kind)

        def read_time(self) -> float:
            return time.monotonic()

        def kill(self) -> float:
            seen.append(f"kill {self.kind}")
            return time.monotonic()

        def take(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(turn, "TurnProcess", Seen)
    turn.run(Options(runs=2))
    assert seen == ["ours", "bare"] * 2 + ["kill ours", "kill bare"] * 2


def test_a_quantile_of_a_histogram_counts_only_what_it_gained() -> None:
    before: Buckets = {("1",): 100.0, ("2",): 100.0, ("+Inf",): 100.0}
    after: Buckets = {("1",): 100.0, ("2",): 110.0, ("+Inf",): 110.0}
    assert quantile(before, after, 0.5) == pytest.approx(1.5)
    assert quantile({}, after, 0.5) == pytest.approx(0.55)


@pytest.mark.skipif(bool(explain_missing()), reason=explain_missing())
def test_a_link_carries_its_rate_in_each_direction_and_nothing_is_left_of_it() -> None:
    nbytes, rate = 4 << 20, 10e6
    receive = (
        "import socket, time; [server, begin, count] = [socket.create_server(('', 9)), 0, 0]; print('up', flush=True)\n"
        "link = server.accept()[0]; begin = time.time()\n"
        "while got := link.recv(1 << 20): count += len(got)\n"
        "print(count, time.time() - begin)"
    )
    with limited_links(3, rate) as (first, second, third):
        server = subprocess.Popen(
            first.command_inside(sys.executable, "-c", receive), stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        send = f"import socket; socket.create_connection(({first.address!r}, 9)).sendall(bytes({nbytes}))"
        subprocess.run(second.command_inside(sys.executable, "-c", send), check=True, timeout=60)
        count, seconds = map(float, server.communicate(timeout=60)[0].split())
        assert third.namespace in _namespaces()
    assert count == nbytes
    assert 0.8 * nbytes / rate < seconds
    assert third.namespace not in _namespaces()


def _namespaces() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], check=True, capture_output=True, text=True, timeout=30
    ).stdout
