"""Ranks of a trainer on several nodes: who gets in at rank 0, and what goes wrong while they meet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollout_client.errors import PublishFailed
from rollout_client.steering.pushing.options import ListenAddress, PushPlan
from rollout_client.steering.pushing.ranks import node_addresses as addresses
from rollout_client.steering.pushing.ranks import rank_listener as listener_module
from rollout_client.steering.pushing.ranks import rank_rendezvous as meeting
from rollout_client.steering.pushing.ranks.rank_listener import (
    MAX_UNVERIFIED_CALLERS,
    RankAddresses,
    RankListener,
    call_leader,
)
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import Kind, TransferError
from tests.support.unit.far_ranks import LOOPBACK, nothing_left
from tests.support.unit.plain_dialing import raw_frame
from tests.support.waiting import until_sync

# Who gets in.


def test_ranks_get_in_beside_silent_callers_and_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener_module, "CALL_SECONDS", 20.0)
    with nothing_left(), contextlib.ExitStack() as stack:
        listener = RankListener.open(range(1, 4), ListenAddress(LOOPBACK), afar=True)
        stack.callback(listener.close)
        there, places = listener.places.addresses[0], listener.places
        for _ in range(MAX_UNVERIFIED_CALLERS + 200):
            stack.enter_context(socket.create_connection(there))
        ranks = {1: stack.enter_context(contextlib.closing(call_leader(places, 1, here=False)))}
        # All before it got in, too, and of them the first had to go.
        assert len(listener._unverified) <= MAX_UNVERIFIED_CALLERS
        until_sync(lambda: len(listener._calls) <= MAX_UNVERIFIED_CALLERS)
        for told, rank, why in (
            (replace(places, token="0" * 32), 2, "not the token of this meeting"),
            (places, 1, "rank 1 is there already"),
            (places, 0, "closed"),
            (places, 4, "closed"),
        ):
            with pytest.raises(TransferError, match=why):
                call_leader(told, rank, here=False)
        for rank, here in ((2, True), (3, False)):
            ranks[rank] = stack.enter_context(
                contextlib.closing(call_leader(places, rank, here=here))
            )
        began = time.monotonic()
        taken = listener.take_connections()
        assert time.monotonic() - began < 10  # silent ones are not waited for
        assert sorted(taken) == [1, 2, 3]
        for rank, connection in taken.items():
            stack.callback(connection.close)
            ranks[rank].send(Kind.PROGRESS, {"rank": rank})
            assert connection.receive().head == {"rank": rank}


def test_who_was_just_told_that_it_is_let_in_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank may be further than the task that has told it so."""
    send = FrameStream.send

    async def late(stream: FrameStream, kind: Kind, *rest: Any, **more: Any) -> None:
        await send(stream, kind, *rest, **more)
        if kind is Kind.READY:
            await asyncio.sleep(0.2)

    monkeypatch.setattr(FrameStream, "send", late)
    with nothing_left(), contextlib.ExitStack() as stack:
        listener = RankListener.open(range(1, 2), ListenAddress(), afar=False)
        stack.callback(listener.close)
        rank = stack.enter_context(contextlib.closing(call_leader(listener.places, 1, here=True)))
        (taken,) = listener.take_connections().values()
        stack.callback(taken.close)
        rank.send(Kind.PROGRESS, {"rank": 1})
        assert taken.receive().head == {"rank": 1}


def test_who_could_not_be_told_that_it_is_let_in_may_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, failed = FrameStream.send, threading.Event()

    async def cut(stream: FrameStream, kind: Kind, *rest: Any, **more: Any) -> None:
        if kind is Kind.READY and not failed.is_set():
            failed.set()
            stream.interrupt()
        await send(stream, kind, *rest, **more)

    monkeypatch.setattr(FrameStream, "send", cut)
    monkeypatch.setattr(listener_module, "CALL_TRIES", 1)
    with nothing_left(), contextlib.ExitStack() as stack:
        listener = RankListener.open(range(1, 2), ListenAddress(), afar=False)
        stack.callback(listener.close)
        with pytest.raises(TransferError):
            call_leader(listener.places, 1, here=True)
        until_sync(lambda: not listener._unverified, what="the end of the first call")
        stack.enter_context(contextlib.closing(call_leader(listener.places, 1, here=True)))
        (taken,) = listener.take_connections().values()
        taken.close()


@pytest.mark.parametrize(
    "said",
    [
        raw_frame(Kind.HELLO, b"x", 1 << 31),
        raw_frame(Kind.HELLO, b"[" * 1000),
        raw_frame(Kind.HELLO, b'{"token":' * 110),
        raw_frame(Kind.HELLO, b"[]"),
        raw_frame(200, b"{}"),
        raw_frame(Kind.HELLO, b'{"rank":1}'),
        raw_frame(Kind.HELLO, json.dumps({"rank": 1, "token": "\ud800"}).encode()),
        raw_frame(Kind.HELLO, json.dumps({"rank": 1, "token": "x", "payload": 9}).encode()),
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
)
def test_who_says_something_else_is_turned_away_at_once(said: bytes) -> None:
    with nothing_left():
        listener = RankListener.open(range(1, 2), ListenAddress(LOOPBACK), afar=True)
        with socket.create_connection(listener.places.addresses[0], 2) as stranger:
            with contextlib.suppress(OSError):  # it may be turned away already
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert not stranger.recv(1) or stranger.recv(4096).find(b"refused") > 0
        with pytest.raises(TransferError, match=r"ranks \[1\] did not call"):
            listener.take_connections()


def test_who_is_called_shows_that_it_is_rank_0() -> None:
    with nothing_left():
        listener = RankListener.open(range(1, 2), ListenAddress(LOOPBACK), afar=True)
        with pytest.raises(TransferError, match="another program answers there"):
            call_leader(replace(listener.places, answer="0" * 32), 1, here=False)
        listener.close()


# What goes wrong while they meet.


def test_the_lowest_rank_of_a_node_leads_it_and_rank_0_leads_these() -> None:
    facts = [meeting._Fact(node, node) for node in "abacbb"]
    teams = [meeting._Team.of(rank, facts) for rank in range(6)]
    assert [team.leader for team in teams] == [0, 0, 0, 0, 1, 1]
    assert [list(team.below) for team in teams] == [[2, 1, 3], [4, 5], [], [], [], []]


class Seat:
    """One of two ranks' places in a group of threads; a word that does not come fails its test."""

    def __init__(self, rank: int, words: list[Any], all_here: threading.Barrier) -> None:
        self.rank, self.words, self.all_here = rank, words, all_here

    def gathered(self, mine: Any) -> list[Any]:
        self.words[self.rank] = mine
        self.all_here.wait(10)
        found = list(self.words)
        self.all_here.wait(10)
        return found


def met(
    monkeypatch: pytest.MonkeyPatch, reach: ListenAddress | None = None
) -> list[BaseException | None]:
    """Let two ranks of different nodes meet; returns what each of them raised."""
    monkeypatch.setattr(meeting, "_all_gather", Seat.gathered)
    words, all_here = [None, None], threading.Barrier(2)
    seats: list[Any] = [Seat(rank, words, all_here) for rank in range(2)]
    facts = [meeting._Fact("a", "node-a"), meeting._Fact("b", "node-b")]
    raised: list[BaseException | None] = [None, None]

    def run(rank: int) -> None:
        try:
            team = meeting._Team.of(rank, facts)
            meeting._join_team(seats[rank], team, facts, reach or ListenAddress()).close()
        except BaseException as error:  # noqa: BLE001 (what it was is looked at)
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return raised


def fails(error: Exception) -> Callable[..., Any]:
    def failing(*_: object, **__: object) -> None:
        raise error

    return failing


def test_ranks_of_two_nodes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left():
        assert met(monkeypatch, ListenAddress(LOOPBACK)) == [None, None]


@pytest.mark.parametrize("error", [OSError("no such device"), ValueError("five columns")])
def test_rank_0_that_does_not_know_its_addresses_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(addresses, "_ipv4_addresses", fails(error))
    with nothing_left():
        raised = met(monkeypatch)
    for each in raised:
        assert isinstance(each, PublishFailed), each
        assert "rank 0 on node-a can't be reached by the other ranks" in str(each)
        assert str(error) in str(each)
        assert "see ranks_host" in str(each)


@pytest.mark.parametrize("host", ["n" * 70, "a..b", "no-such-host.invalid", None])
def test_a_rank_that_cannot_call_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, host: str | None
) -> None:
    if host is None:
        monkeypatch.setattr(meeting, "call_leader", fails(RuntimeError("can't start new thread")))
    with nothing_left():
        raised = met(monkeypatch, ListenAddress(host or LOOPBACK))
    for each in raised:
        assert isinstance(each, PublishFailed), each
        assert "rank 1 on node-b can't reach rank 0 on node-a" in str(each)
        assert (host or "RuntimeError: can't start new thread") in str(each)


def test_what_can_be_no_host_and_no_ports_is_refused() -> None:
    wrong: list[Any] = ["", " ", "node:29500", "[::1]", "http://node", "n" * 70, 5]
    for host in wrong:
        with pytest.raises(ValueError, match="ranks_host must be a name or an address alone"):
            PushPlan.of(..., {"ranks": object(), "ranks_host": host})
    wrong = [80, "29500", (1,), (1, 2, 3), (2, 1), (0, 9), (9, 65536), (8.5, 9), ("1", "2")]
    for ports in wrong:
        with pytest.raises(ValueError, match="ranks_ports must be a first and a last port of 1 to"):
            PushPlan.of(..., {"ranks": object(), "ranks_ports": ports})


def test_how_rank_0_is_reached_is_kept_and_needs_ranks() -> None:
    for host in (None, "trainer-0.trainer", "10.0.0.7", "2001:db8::7"):
        plan = PushPlan.of(..., {"ranks": object(), "ranks_host": host, "ranks_ports": [7, 7]})
        assert plan.reach == ListenAddress(host, (7, 7))
    for given_alone in ({"ranks_host": "node"}, {"ranks_ports": (1, 2)}):
        with pytest.raises(TypeError, match="give ranks, too"):
            PushPlan.of(..., given_alone)


async def test_a_caller_that_was_displaced_before_it_was_heard_calls_again() -> None:
    with socket.create_server((LOOPBACK, 0)) as listening:
        places = RankAddresses("", (listening.getsockname(),), "token", "answer")

        def answer_second_call() -> None:
            listening.accept()[0].close()
            with contextlib.closing(Connection(listening.accept()[0])) as connection:
                assert connection.expect(Kind.HELLO).integer("rank") == 1
                connection.send(Kind.READY, {"answer": "answer"})

        answering = asyncio.create_task(asyncio.to_thread(answer_second_call))
        called = await asyncio.to_thread(call_leader, places, 1, here=False)
        called.close()
        await answering
