"""What measurements are set up with measures what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from bench.rigs.limited_links import explain_missing, limited_links
from bench.rigs.phases import quantile
from bench.rigs.worker import Streams

Buckets = dict[tuple[str, ...], float]


def test_a_pause_is_the_longest_time_in_which_no_stream_got_anything() -> None:
    streams = Streams()
    for arrivals in ([1.0, 2.0, 3.0, 7.5], [1.5, 2.5, 3.5, 7.0]):
        streams.open().extend(arrivals)
    assert streams.longest(3.2, 8.0) == pytest.approx(3.5)
    assert streams.longest(3.2, 4.5) == pytest.approx(1.0), "it may last until the end"
    assert streams.usual(5.0) == pytest.approx([1.0] * 4)
    assert len(streams.seen(7.2)) == 1, "the second has got nothing since"


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
