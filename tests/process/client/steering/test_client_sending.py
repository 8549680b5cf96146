"""One replica's connection of a push: what breaks it, what is tried again, and whose memory stays in doubt."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rollout_client.steering.pushing import sending
from rollout_client.steering.pushing.push_progress import PushProgress
from rollout_client.steering.pushing.routes import Receiver as Waiting
from rollout_client.steering.pushing.routes import Route
from rollout_client.steering.pushing.sending import CONNECTIONS, Link, Sender
from rollout_client.steering.pushing.stream_filling import Filling
from rollout_client.steering.pushing.tensor_copying import Copier
from rollout_common.transfer.connections import blocking_connection as connection_module
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frame_sockets import LARGE_PACKETS_LOST
from rollout_common.transfer.connections.frames import Ended, Frame, Kind
from rollout_common.transfer.connections.transfer_loop import transfer_loop
from rollout_common.transfer.memory.arena import Arena
from rollout_worker.schemas import Transfer
from tests.support.unit.receiver import Receiver
from tests.support.waiting import until_sync

MEBI = 1 << 20
NAME = "w0:8000"
JOIN_SECONDS = 20.0


class Carried:
    """A version of three pieces in a trainer's memory, and the way to one replica."""

    def __init__(self, receiver: Receiver, path: Path) -> None:
        self.receiver, self.path = receiver, path
        self.arena = Arena()
        self.filling = Filling(self.arena, None, Copier())
        self.filling.plan((("a", "U8", (3 * MEBI,)), ("b", "F32", (9,))))
        self.progress = PushProgress([NAME], self.filling.layout.nbytes, lambda: None)
        self.transfer = Transfer.model_validate(receiver.transfer())

    def fill(self) -> None:
        self.filling.take("a", torch.arange(3 * MEBI, dtype=torch.uint8))
        self.filling.take("b", torch.arange(9.0))
        self.filling.end()

    def sender(self, kind: str = "tcp") -> Sender:
        to = Waiting(NAME, "127.0.0.1", self.transfer)
        return Sender(Route(kind, to), self.filling, self.progress, Link())  # type: ignore[arg-type]

    def begin(self, kind: str = "tcp") -> Sender:
        """Begin to carry it, and fill it."""
        sender = self.sender(kind)
        sender.start()
        self.fill()
        return sender

    def carry(self, kind: str = "tcp") -> Sender:
        """Fill it, carry it, and wait for the end."""
        sender = self.begin(kind)
        assert sender.join(JOIN_SECONDS)
        return sender

    @property
    def why(self) -> str:
        """Why it failed."""
        why = self.progress.of(NAME).why
        assert why is not None
        assert self.progress.settled(NAME)
        return why

    def is_there(self) -> bool:
        """Whether the replica has staged it, and the progress knows."""
        root_hash = self.filling.root_hash
        return root_hash is not None and self.progress.of(NAME).root_hash == root_hash


@pytest.fixture
def carried(tmp_path: Path) -> Iterator[Carried]:
    receiver = Receiver(NAME, tmp_path)
    made = Carried(receiver, tmp_path)
    yield made
    receiver.close()
    made.filling.close()
    made.arena.close()


def swallow(receiver: Receiver, connection: Connection, frame: Frame) -> None:
    """Do nothing about it."""


def hang_up(receiver: Receiver, connection: Connection, frame: Frame) -> None:
    """End the connection, and read no more of what has come already."""
    connection.interrupt()
    raise Ended("the test says so")


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_what_was_staged_is_noted_and_the_memory_free(carried: Carried, kind: str) -> None:
    sender = carried.carry(kind)
    assert carried.is_there()
    assert sender.sent == (3 * MEBI + 36 if kind == "tcp" else 0)
    carried.filling.close()
    assert not carried.filling.slot.is_lent
    assert len(carried.receiver.hellos) == 1


def test_bytes_count_as_sent_where_no_outcome_comes(carried: Carried) -> None:
    """A replica that freezes now keeps its connection when the publish goes on without it."""
    carried.receiver.faults[Kind.END] = swallow
    sender = carried.begin()
    until_sync(lambda: sender.sent == 3 * MEBI + 36, what="all bytes to go out")
    assert not sender.join(0)
    sender.stop()
    assert sender.join(JOIN_SECONDS)
    assert sender.sent == 3 * MEBI + 36


# The connection breaks.


def cut(times: int) -> tuple[list[str], Callable[..., None]]:
    """What cuts a connection so many times, in the midst of the bytes, and the tickets that it was made with."""
    tickets: list[str] = []

    def fault(receiver: Receiver, connection: Connection, frame: Frame) -> None:
        tickets.append(receiver.hellos[-1]["ticket"])
        if len(tickets) == times:
            del receiver.faults[frame.kind]
        hang_up(receiver, connection, frame)

    return tickets, fault


def test_a_connection_that_broke_is_made_again_with_the_same_ticket(carried: Carried) -> None:
    tickets, carried.receiver.faults[Kind.PIECE] = cut(CONNECTIONS - 1)
    carried.carry()
    assert carried.is_there()
    assert len(carried.receiver.hellos) == CONNECTIONS
    assert {each["ticket"] for each in carried.receiver.hellos} == {carried.transfer.ticket}
    assert tickets == [carried.transfer.ticket] * (CONNECTIONS - 1)


def test_one_that_breaks_again_and_again_is_given_up(carried: Carried) -> None:
    _, carried.receiver.faults[Kind.PIECE] = cut(CONNECTIONS)
    carried.carry()
    assert "closed" in carried.why
    assert len(carried.receiver.hellos) == CONNECTIONS


def test_shared_memory_goes_over_one_connection_alone(carried: Carried) -> None:
    """What its replica has mapped is gone with it, so that a second one would find nothing to go on with."""
    _, carried.receiver.faults[Kind.MEMORY] = cut(1)
    carried.carry("shm")
    assert "closed" in carried.why
    assert len(carried.receiver.hellos) == 1


# The replica does not want it.


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_refused_ticket_is_not_shown_again(carried: Carried, kind: str) -> None:
    carried.receiver.transfer()  # as a later stage of somebody else's makes it
    carried.carry(kind)
    assert carried.why == "it is void"
    assert len(carried.receiver.hellos) == 1
    carried.filling.close()
    assert not carried.filling.slot.is_lent, "it never had the memory"


def test_an_error_in_the_midst_of_it_is_the_reason(carried: Carried) -> None:
    def refuse(receiver: Receiver, connection: Connection, frame: Frame) -> None:
        connection.send(Kind.ERROR, {"slug": "no-room", "detail": "the disk is full"})

    carried.receiver.faults[Kind.PIECE] = refuse
    carried.carry()
    assert carried.why == "the disk is full"
    assert len(carried.receiver.hellos) == 1


def test_a_failure_of_the_replica_is_told_in_its_words(carried: Carried) -> None:
    def fail(receiver: Receiver, connection: Connection, frame: Frame) -> None:
        connection.send(Kind.FAILED, {"name": receiver.name, "detail": "it is another model's"})

    carried.receiver.faults[Kind.END] = fail
    carried.carry()
    assert carried.why == "it is another model's"


@pytest.mark.parametrize("kind", [Kind.DATA, Kind.HAVE, Kind.RELEASED])
def test_a_frame_out_of_its_turn_ends_it(carried: Carried, kind: Kind) -> None:
    """`RELEASED` alone is due at some time: over a Unix socket, not here."""

    def say(receiver: Receiver, connection: Connection, frame: Frame) -> None:
        connection.send(kind)

    carried.receiver.faults[Kind.END] = say
    carried.carry()
    assert kind is Kind.RELEASED or carried.why == f"{kind.name} came, which only senders send"
    assert not carried.is_there()


def test_a_network_that_loses_large_packets_is_told_and_not_tried_again(
    carried: Carried, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = 0

    async def lose(*_: object) -> None:
        nonlocal served
        served += 1
        raise Ended(f"the other end has closed the connection{LARGE_PACKETS_LOST}")

    monkeypatch.setattr(Sender, "_serve", lose)
    carried.carry()
    assert carried.why == f"the other end has closed the connection{LARGE_PACKETS_LOST}"
    assert served == 1


# The replica says nothing.


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(sending, "HOP_SECONDS", 0.3)
    monkeypatch.setattr(connection_module, "PING_SECONDS", 0.1)


@contextlib.contextmanager
def nobody() -> Iterator[int]:
    """A port at which connections wait for ever to be taken, as those of a frozen process do."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.usefixtures("silent")
def test_a_replica_that_never_answers_counts_as_dead_after_a_lease(carried: Carried) -> None:
    with nobody() as port:
        carried.transfer = carried.transfer.model_copy(update={"port": port})
        sender = carried.carry()
    assert carried.why == "nothing came for 0.5 s"
    assert not sender.stands(NAME)
    carried.filling.close()
    assert not carried.filling.slot.is_lent


@pytest.mark.usefixtures("silent")
def test_one_that_pings_and_asks_for_nothing_is_waited_for(carried: Carried) -> None:
    """It may have it all from the others; that it takes too long is the publish's to say."""
    carried.receiver.faults[Kind.HAVE] = swallow
    sender = carried.begin()
    assert not sender.join(1.5)
    assert sender.stands(NAME)
    assert not sender.stands("w1:8000")
    assert not carried.progress.settled(NAME)
    sender.stop()
    assert sender.join(JOIN_SECONDS)
    assert carried.why == "the publish was given up"


# It is stopped.


def test_one_that_is_stopped_before_it_starts_calls_nobody(carried: Carried) -> None:
    sender = carried.sender()
    sender.stop()
    sender.start()
    assert sender.join(JOIN_SECONDS)
    assert carried.why == "the publish was given up"
    assert carried.receiver.hellos == []
    carried.filling.close()
    assert not carried.filling.slot.is_lent


def test_one_that_is_stopped_while_it_calls_leaves_no_socket_open(carried: Carried) -> None:
    def sockets() -> set[str]:
        found = set()
        for each in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the folder itself
                found.add(os.readlink(f"/proc/self/fd/{each}"))
        return {each for each in found if each.startswith("socket:")}

    path = str(carried.path / "full.sock")
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as other:
        listening.bind(path)
        listening.listen(0)
        other.connect(path)  # there is no room for a second one
        carried.transfer = carried.transfer.model_copy(update={"socket": path})
        transfer_loop()  # which has sockets of its own
        before = sockets()  # of which some may close: what other tests left to the collector
        sender = carried.sender("shm")
        sender.start()
        until_sync(lambda: sockets() - before, what="the call")
        sender.stop()
        assert sender.join(1)
        assert carried.why == "the publish was given up"
        assert sockets() <= before


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_one_that_is_stopped_midway_ends_and_says_why(carried: Carried, kind: str) -> None:
    sender = carried.sender(kind)
    sender.start()
    until_sync(lambda: carried.receiver.hellos, what="the call")
    sender.stop()
    sender.stop()
    assert sender.join(JOIN_SECONDS)
    assert carried.why == "the publish was given up"
    assert len(carried.receiver.hellos) == 1


def test_one_that_is_stopped_after_the_outcome_changes_nothing_of_it(carried: Carried) -> None:
    sender = carried.carry()
    sender.stop()
    assert carried.is_there()
    assert carried.progress.of(NAME).why is None


def test_what_is_given_up_where_it_is_filled_ends_it(carried: Carried) -> None:
    sender = carried.sender()
    sender.start()
    carried.filling.take("a", torch.zeros(3 * MEBI, dtype=torch.uint8))
    carried.filling.fail()
    assert sender.join(JOIN_SECONDS)
    assert carried.why == "the publish was given up"


def test_a_sender_whose_pool_was_closed_says_so(carried: Carried) -> None:
    """One that was not stopped in time: there is no memory any more that it could send."""
    carried.fill()
    carried.arena.close()
    sender = carried.sender()
    sender.start()
    assert sender.join(JOIN_SECONDS)
    assert carried.why == "this memory was given up"


# The memory that a replica was given.


def is_doubted(carried: Carried) -> bool:
    """Whether the replica may still read it; the kernel is not asked."""
    return NAME in carried.filling.slot.doubts


@pytest.mark.parametrize(
    ("kind", "at"),
    [("shm", Kind.MEMORY), ("shm", Kind.FILLED), ("shm", Kind.END), ("tcp", Kind.END)],
)
def test_memory_is_in_doubt_where_the_replica_went_without_a_word(
    carried: Carried, kind: str, at: Kind
) -> None:
    """What was copied by TCP is in none."""
    carried.receiver.faults[at] = hang_up
    carried.carry(kind)
    assert is_doubted(carried) == (kind == "shm")


@pytest.mark.parametrize("how", ["stopped", "gone", "given back"])
def test_memory_is_in_doubt_as_long_as_the_replica_serves_from_it(
    carried: Carried, how: str
) -> None:
    carried.receiver.release.clear()
    sender = carried.begin("shm")
    until_sync(carried.is_there, what="it to be staged")
    assert not sender.join(0.2), "it waits for the memory"
    match how:
        case "stopped":
            sender.stop()
        case "gone":
            carried.receiver.hang_up()
        case _:
            carried.receiver.release.set()
    assert sender.join(JOIN_SECONDS)
    assert carried.is_there(), "it serves all the same"
    assert is_doubted(carried) == (how != "given back")
    carried.filling.close()
    assert carried.filling.slot.is_lent == (how != "given back")
    carried.receiver.release.set()
    until_sync(
        lambda: not carried.filling.slot.is_lent, what="the kernel to say that nobody has it"
    )
