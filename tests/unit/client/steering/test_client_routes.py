"""Which way the bytes take to each replica, and from which others it fetches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollout_client import PublishFailed
from rollout_client.steering.pushing.routes import (
    MAX_HOLDERS,
    Receiver,
    Route,
    count_shares,
    routes_for,
)
from rollout_client.steering.pushing.routes import _neighbours as neighbours
from rollout_common.transfer.connections.frames import fetch_ticket
from rollout_worker.schemas import Transfer

STEPS = 6
"""Most receivers that a piece passes on its way from one to another one."""


def receiver(index: int, socket: str | None = None, based: bool = False) -> Receiver:
    transfer = Transfer(ticket=f"{index:032}", port=8000 + index, socket=socket, node=socket)
    return Receiver(f"w{index}", f"10.0.0.{index}", transfer, based)


def seen(path: str) -> str | None:
    """What this machine makes of a path: sockets of other machines are not here."""
    return path if path.startswith("/here/") else "other"


def test_what_is_on_this_machine_gets_shared_memory_and_the_rest_pieces_by_tcp() -> None:
    all_of_them = [receiver(0), receiver(1, "/here/w1"), receiver(2, "/there/w2")]
    routes = routes_for(all_of_them, "auto", node=seen)
    assert [(each.kind, each.receiver.name) for each in routes] == [
        ("shm", "w1"), ("tcp", "w0"), ("tcp", "w2"),
    ]  # fmt: skip
    assert {each.kind for each in routes_for(all_of_them, "tcp", node=seen)} == {"tcp"}
    assert routes[0] == Route("shm", all_of_them[1])


def test_each_gets_a_share_and_is_told_of_all_others_of_its_group() -> None:
    based, whole = [receiver(n, based=True) for n in (0, 2, 4)], [receiver(n) for n in (1, 3)]
    routes = routes_for([*whole, *based], "tcp", node=seen)
    groups = ("w0", "w2", "w4"), ("w1", "w3")
    assert [(each.receiver.name, each.share) for each in routes] == [
        (name, (index, len(group))) for group in groups for index, name in enumerate(group)
    ]
    for each in routes:
        (group,) = [group for group in groups if each.receiver.name in group]
        assert {holder["name"] for holder in each.holders} == set(group) - {each.receiver.name}
        assert each.based == (group == groups[0])


def test_a_holder_is_named_by_its_address_and_a_ticket_that_admits_nobody_who_sends() -> None:
    other, one = receiver(7), receiver(1)
    route, _ = routes_for([one, other], "tcp", node=seen)
    (holder,) = route.holders
    ticket = fetch_ticket(other.transfer.ticket)
    assert holder == {"host": "10.0.0.7", "port": 8007, "ticket": ticket, "name": "w7"}
    assert ticket != other.transfer.ticket


@pytest.mark.parametrize(
    ("socket", "port", "transport", "message"),
    [
        (None, 8000, "shm", "it takes no shared memory: start it with --weights-socket"),
        ("/there/w0", 8000, "shm", "its socket /there/w0 is not seen from here"),
        (None, None, "auto", "it has no port for weights: start it with --weights-port"),
        ("/here/w0", None, "tcp", "it has no port for weights"),
    ],
)
def test_a_replica_out_of_reach_is_named_with_the_fix(
    socket: str | None, port: int | None, transport: str, message: str
) -> None:
    made = receiver(0, socket)
    one = replace(made, transfer=made.transfer.model_copy(update={"port": port}))
    with pytest.raises(PublishFailed, match=f"w0: .*{message}"):
        routes_for([one], transport, node=seen)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 5, MAX_HOLDERS + 1])
def test_few_fetch_from_all_others(count: int) -> None:
    for index in range(count):
        assert sorted([*neighbours(index, count), index]) == list(range(count))


def reached_in(steps: int, count: int) -> int:
    """To how many of so many receivers a piece gets from the first one; they all have neighbours as it has."""
    whole = (1 << count) - 1
    reached, distances = 1, neighbours(0, count)
    for _ in range(steps):
        for distance in distances:  # in a ring
            turned = reached << distance
            reached |= (turned | turned >> count) & whole
    return reached.bit_count()


@pytest.mark.parametrize(
    "count", [34, 35, 64, 65, 127, 128, 129, 1000, 4095, 4096, 4097, 5461, 5462, 8191, 9998, 9999]
)
def test_of_many_each_reaches_every_other_one_in_few_steps(count: int) -> None:
    first = neighbours(0, count)
    assert len(set(first)) == len(first) <= MAX_HOLDERS
    assert 0 not in first
    for index in (1, count // 3, count - 1):
        there = neighbours(index, count)
        assert sorted(there) == sorted((index + distance) % count for distance in first)
        # Who fetches from me is who I fetch from: bytes go both ways.
        assert all(index in neighbours(other, count) for other in there)
    assert reached_in(STEPS, count) == count


@pytest.mark.parametrize(
    ("replicas", "sources", "shares"),
    [(1, 1.0, 1), (8, 1.0, 8), (8, 8.0, 2), (8, 4.0, 4), (32, 8.0, 8), (2, 16.0, 1), (7, 7.0, 7)],
)
def test_shares_let_all_links_take_as_long(replicas: int, sources: float, shares: int) -> None:
    assert count_shares(replicas, sources) == shares
    receivers = [receiver(number) for number in range(replicas)]
    routes = routes_for(receivers, "tcp", sources)
    assert [route.share for route in routes] == [(i % shares, shares) for i in range(replicas)]
