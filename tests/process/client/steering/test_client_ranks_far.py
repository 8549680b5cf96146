"""Ranks of other nodes: what becomes of one that lies, and how boxes are cut into chunks."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.errors import PublishFailed
from rollout_client.steering.pushing.options import PushPlan, PushWork
from rollout_client.steering.pushing.ranks import rank_group
from rollout_client.steering.pushing.ranks.node_lead import NodeLead
from rollout_client.steering.pushing.ranks.rank_follower import (
    MeetingLeft,
    RankFollower,
)
from rollout_client.steering.pushing.ranks.rank_group import RankGroup
from rollout_client.steering.pushing.ranks.rank_outcome import to_json
from rollout_client.steering.pushing.ranks.rank_zero import RankZero
from rollout_client.steering.pushing.routes import ROUTES, Receiver, Route
from rollout_client.steering.pushing.shards.merged_version import MergedVersion
from rollout_client.steering.pushing.shards.node_parts import pack_layout
from rollout_client.steering.pushing.shards.shard_writing import ShardWriting
from rollout_client.steering.pushing.shards.tensor_boxes import Box, pieces_of
from rollout_client.steering.pushing.tensor_copying import Copier
from rollout_client.steering.steering_protocol import Published
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import Frame, Kind, Malformed, TransferError
from rollout_common.transfer.layout import LayoutError, PushLayout
from rollout_common.wire import Transfer, WeightsId
from rollout_common.wire.root_hash import hash_leaf
from tests.support.unit.far_ranks import LOOPBACK, nothing_left
from tests.support.unit.plain_dialing import raw_frame
from tests.support.waiting import eventually

# A rank that lies.

STATE = {
    "a": torch.arange(1.0, 5.0),
    "m": torch.arange(1.0, 25.0).reshape(4, 6),
    "rows": torch.arange(1, 10, dtype=torch.uint8),
    "z": torch.arange(5.0, 9.0),
}
SPECS = (("a", "F32", (4,)), ("m", "F32", (4, 6)), ("rows", "U8", (9,)), ("z", "F32", (4,)))
BOXES: dict[int, dict[str, Box]] = {
    1: {"m": ((0, 4), (1, 3)), "rows": ((3, 7),)},
    2: {"m": ((0, 4), (3, 6)), "rows": ((0, 3),)},
    3: {"m": ((0, 4), (0, 1)), "rows": ((7, 9),)},
}
WRONG = b"\xff"


class Far:
    """The only rank of another node, which says what a test wants. Nothing that it has is a whole leaf."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self.connection = rank, connection

    def rows(self, **boxes: object) -> list[object]:
        boxes = {**BOXES[self.rank], **boxes}
        return [
            [number, [dtype, shape, boxes.get(name), False]]
            for number, (name, dtype, shape) in enumerate(SPECS[1:3])
        ]

    def hello(self, **other: Any) -> None:
        told = {"names": [["m"], ["rows"]], "offers": {str(self.rank): self.rows()}}
        self.connection.send(Kind.HELLO, {"version": 1, **told, **other})

    def chunk(
        self, name: str, box: Box | None = None, content: bytes | None = None, **other: Any
    ) -> None:
        box = box or BOXES[self.rank][name]
        true = STATE[name][tuple(slice(*cut) for cut in box)].contiguous().numpy().tobytes()
        run = list(box[0]) if len(box) == 1 else None  # of bytes
        where = {"run": run, "box": None if run else box}
        head = {"name": name, **where, "hash": xxhash.xxh3_128_hexdigest(true), **other}
        self.connection.send(Kind.DATA, head, true if content is None else content)

    def chunks(self) -> None:
        for name in ("rows", "m"):
            self.chunk(name)
        self.end()

    def end(self, *digests: str) -> None:
        self.connection.send(Kind.END, {"digests": list(digests)})

    def run(self, *says: Callable[[Far], None], pings: bool = True) -> None:
        """Offer, say so once it is told what to send, and leave once it is told how it went."""
        with contextlib.suppress(TransferError):
            try:
                for each in says:
                    each(self)
                while (frame := self.connection.poll(0.1)) is None or frame.kind is not Kind.FAILED:
                    if pings:
                        self.connection.send(Kind.PING)
                self.connection.send(Kind.RELEASED)
            finally:
                self.connection.close()


def ordered(far: Far) -> None:
    order = far.connection.expect(Kind.LAYOUT).head
    boxes = {SPECS[numbers[0]][0]: boxes[str(far.rank)] for numbers, boxes, _ in order["shares"]}
    assert boxes == {name: [*map(list, box)] for name, box in BOXES[far.rank].items()}
    runs = {SPECS[numbers[0]][0]: runs for numbers, _, runs in order["shares"]}
    assert runs == {"m": None, "rows": [[*BOXES[far.rank]["rows"][0]]]}


def wired() -> tuple[Connection, Connection]:
    with socket.create_server((LOOPBACK, 0)) as server:
        there = socket.create_connection(server.getsockname())
        return Connection(server.accept()[0]), Connection(there)


@contextlib.contextmanager
def published(
    says: Mapping[int, tuple[Callable[[Far], None], ...]], *, pings: bool = True
) -> Iterator[tuple[MergedVersion, BaseException | None]]:
    """Have rank 0 fill a version with what the others say; yields why it failed."""
    with nothing_left():
        ends = {rank: wired() for rank in says}
        near = {rank: connection for rank, (connection, _) in ends.items()}
        leader = RankZero(RankGroup(0, near, {rank: [rank] for rank in ends}))
        filling = MergedVersion(leader.group.arena, Copier())
        threads = []
        for rank, (_, far) in ends.items():
            run = Far(rank, far).run
            more = {"pings": pings or rank != 1}
            threads.append(threading.Thread(target=run, args=says[rank], kwargs=more))
            threads[-1].start()
        late = threading.Timer(10, filling.fail, [PublishFailed("the test took too long")])
        late.start()
        why: BaseException | None = None
        mine = {name: STATE[name] for name in ("a", "z")}
        try:
            leader.fill(filling, Copier(), PushWork(1, mine, PushPlan(), 10))
        except (PublishFailed, LayoutError) as error:
            why = error
        late.cancel()
        yield filling, why
        leader.tell(1, why or PublishFailed("it has been looked at"))
        filling.close()
        leader.close()
        for thread in threads:
            thread.join(10)


def bytes_of(filling: MergedVersion, name: str) -> torch.Tensor:
    with filling.slot.view_tensor(filling.layout[name]) as view:
        return torch.tensor(list(view), dtype=torch.uint8)


def test_what_far_ranks_send_makes_the_version() -> None:
    says = dict.fromkeys(BOXES, (Far.hello, ordered, Far.chunks))
    with published(says) as (filling, why):
        assert why is None
        assert filling.root_hash
        for name, tensor in STATE.items():
            assert torch.equal(bytes_of(filling, name), tensor.reshape(-1).view(torch.uint8))


def unreached(far: Far) -> None:
    """Say twice that a replica is out of reach, and wait until rank 0 asks for all that is here."""
    for _ in range(2):
        far.connection.send(Kind.ERROR, {"name": "w", "detail": "no route"})
    frame = far.connection.expect(Kind.SERVE)
    assert (frame.head["routes"], frame.head["everything"]) == ([], True)
    far.chunks()


def test_rank_0_serves_what_another_node_can_not() -> None:
    says = dict.fromkeys(BOXES, (Far.hello, ordered, unreached))
    with published(says) as (filling, why):
        assert why is None
        assert filling.root_hash


def truncated(far: Far) -> None:
    about = {"name": "rows", "run": [3, 7], "box": None, "hash": "", "payload": 4}
    head = json.dumps(about).encode()
    far.connection._sock.sendall(raw_frame(Kind.DATA, head) + WRONG * 2)
    far.connection.interrupt()


def damaged_box(far: Far) -> None:
    far.chunk("rows")
    far.chunk("m", content=WRONG * 32)


def twice(say: Callable[[Far], None]) -> Callable[[Far], None]:
    def said(far: Far) -> None:
        say(far)
        say(far)

    return said


LIES: dict[str, tuple[Callable[[Far], None], str]] = {
    "a bit": (damaged_box, "1: a chunk of 'm' arrived damaged"),
    "a bit of a run": (
        lambda far: far.chunk("rows", content=WRONG * 4),
        "1: a chunk of 'rows' arrived damaged",
    ),
    "twice": (twice(lambda far: far.chunk("rows")), "'rows' came that was not due"),
    "all twice": (twice(Far.chunks), "'rows' came that was not due"),
    "order": (lambda far: far.chunk("m"), "'m' came that was not due"),
    "box": (
        lambda far: far.chunk("rows", BOXES[2]["rows"], WRONG * 3),
        "'rows' came that was not due",
    ),
    "tensor": (lambda far: far.chunk("a", ((0, 4),), WRONG * 16), "'a' came that was not due"),
    "no name": (
        lambda far: far.connection.send(Kind.DATA, {"name": [{}]}),
        "came that was not due",
    ),
    "more": (lambda far: far.chunk("rows", content=WRONG * 96), "came with 96 bytes, not 4"),
    "no hash": (lambda far: far.chunk("rows", hash=None), "DATA.hash must be a text"),
    "an end": (truncated, "the other end has closed the connection"),
    "leaves": (lambda far: far.connection.send(Kind.RELEASED), "left in the middle of a publish"),
    "not sent": (
        lambda far: far.connection.send(Kind.FILLED, {"name": "m", "block": 96}),
        "FILLED came",
    ),
    "a hash too many": (lambda far: far.end("00" * 16), "must have the hash of each leaf"),
    "no hex": (lambda far: far.end("x"), "END.digests must be a list of hexadecimal digits"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_rank_that_sends_something_else_fails_the_publish_and_writes_nowhere_else(
    lie: str,
) -> None:
    said, told = LIES[lie]
    honest = dict.fromkeys((2, 3), (Far.hello, ordered))
    with published({1: (Far.hello, ordered, said), **honest}) as (filling, why):
        assert isinstance(why, PublishFailed), why
        assert str(why).startswith("rank 1"), why
        assert told in str(why)
        for name, box in BOXES[1].items():
            there = bytes_of(filling, name).view(STATE[name].dtype).view(STATE[name].shape).clone()
            there[tuple(slice(*cut) for cut in box)] = 0
            assert not there.any(), name
        for name in ("a", "z"):  # rank 0 may have given up before it wrote them
            assert 0xFF not in bytes_of(filling, name)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (lambda far: far.hello(version=2), "rank 1 publishes version 2, rank 0 1"),
        (lambda far: far.chunk("m"), "rank 1 sent DATA out of its turn"),
        (lambda far: far.hello(offers=None), "rank 1 describes its tensors in a format"),
        (lambda far: far.hello(offers={"1": [["m"]]}), "rank 1 describes its tensors in a format"),
        (lambda far: far.hello(offers={"2": []}), "it offers for ranks [2], not [1]"),
        (
            lambda far: far.connection.send(Kind.HELLO, {"version": 1}),
            "rank 1 describes its tensors in a format",
        ),
        *(
            (
                lambda far, box=box: far.hello(offers={"1": far.rows(rows=box)}),
                "rank 1 says its shard is",
            )
            for box in ([[7, 11]], [[-4, 0]], [[5, 5]], [[3, 7], [0, 1]])
        ),
    ],
)
def test_a_rank_that_offers_something_else_fails_the_publish(
    said: Callable[[Far], None], told: str
) -> None:
    honest = dict.fromkeys((2, 3), (Far.hello,))
    with published({1: (said,), **honest}) as (_, why):
        assert told in str(why)


def test_a_rank_that_says_nothing_more_fails_the_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "LEASE_SECONDS", 1.5)
    says = dict.fromkeys(BOXES, (Far.hello, ordered))
    with published(says, pings=False) as (_, why):
        assert "rank 1 is gone: nothing came for 1.5 s" in str(why)


# What stays the same from one publish to the next.


def test_offers_and_orders_are_sent_again_only_once_they_change() -> None:
    near, far = wired()
    group, follower = RankGroup(0, {1: near}, {1: [1]}), RankFollower(far, 1)
    parts = {}
    for version, shape in enumerate(((4,), (4,), (8,)), 1):
        writing = ShardWriting({"a": torch.zeros(shape)})
        follower._offer_parts(version, writing)
        assert group.collect_offers(version, 5) == {1: writing.offer}
        group._stop_pings()
        layout = PushLayout.plan([("a", "F32", shape)])
        shares = [[[0], {"1": [[0, *shape]]}, [[0, layout.nbytes]]]]
        order = {"layout": pack_layout(layout), "shares": shares} if version != 2 else {}
        parts[version] = follower._read_order(Frame(Kind.LAYOUT, order))
    assert parts[1] is parts[2]
    assert parts[3].boxes_of(1) == {"a": ((0, 8),)}
    group.close()
    follower.close()


def test_an_offer_that_was_not_planned_with_is_sent_again() -> None:
    """The leader may have failed before it read it, or after."""
    near, far = wired()
    follower = RankFollower(far, 1)
    writing = ShardWriting({"a": torch.zeros(4)})
    for version in (1, 2):
        follower._offer_parts(version, writing)
        assert "offers" in near.expect(Kind.HELLO).head
    with pytest.raises(Malformed, match="without the first order"):
        follower._read_order(Frame(Kind.LAYOUT, {}))
    follower._offer_parts(3, writing)
    assert near.expect(Kind.HELLO).head == {"version": 3}
    near.close()
    follower.close()


# The lead of another node, and a rank 0 that says what a test wants.


class Origin:
    """Rank 0's end of the connection to a lead, whose node has all of one tensor."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.layout = PushLayout.plan([("a", "F32", (4,))])
        self.said: list[Frame] = []

    def order(self, **other: Any) -> None:
        frame = self.connection.expect(Kind.HELLO)
        offers = {"1": [[0, ["F32", [4], [[0, 4]], False]]]}
        assert frame.head == {"version": 1, "names": [["a"]], "offers": offers}
        about = {"layout": pack_layout(self.layout), "shares": [[[0], {"1": [[0, 4]]}, [[0, 16]]]]}
        self.connection.send(Kind.LAYOUT, {**about, **other})

    def ask(self, port: int = 1, *, everything: bool = False) -> None:
        receiver = Receiver("w", LOOPBACK, Transfer(ticket="0" * 32, port=port))
        routes = ROUTES.dump_python([Route("tcp", receiver).for_part], mode="json")
        request = {"routes": routes, "base": None, "everything": everything}
        self.connection.send(Kind.SERVE, request)

    def hear(self, kind: Kind) -> Frame:
        """Read until a frame of this kind comes, which may have come before."""
        while not any(frame.kind is kind for frame in self.said):
            self.said.append(frame := self.connection.receive())
            self.connection.skip(frame)
        return next(frame for frame in self.said if frame.kind is kind)

    def end(self) -> None:
        self.connection.send(Kind.FAILED, {"error": "PublishFailed", "detail": "it was looked at"})
        self.hear(Kind.RELEASED)


@contextlib.contextmanager
def leading_node() -> Iterator[Origin]:
    with nothing_left():
        near, far = wired()
        lead = NodeLead(far, 1, RankGroup(1, {}))
        raised: list[BaseException] = []

        def run() -> None:
            try:
                lead.take_part(PushWork(1, {"a": STATE["a"]}, PushPlan(), 10))
            except PublishFailed as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Origin(near)
        finally:
            near.close()
            thread.join(10)
            lead.close()
        assert raised


def test_a_lead_says_what_its_node_hashes_to_and_whom_it_can_not_reach() -> None:
    with leading_node() as origin:
        origin.ask()  # before there is anything to serve
        origin.order()
        digest = hash_leaf(STATE["a"].numpy().tobytes()).hex()
        assert origin.hear(Kind.END).head == {"digests": [digest]}
        told = origin.hear(Kind.ERROR).head
        assert told["name"] == "w"
        assert "can't be reached" in told["detail"]
        assert all(frame.kind is not Kind.DATA for frame in origin.said)
        origin.ask(everything=True)  # rank 0 serves it instead
        assert origin.hear(Kind.DATA).head["run"] == [0, 16]
        origin.end()


def test_a_lead_sends_all_it_has_if_it_is_asked_to() -> None:
    with leading_node() as origin:
        origin.order()
        origin.hear(Kind.END)
        origin.ask(everything=True)
        chunk = origin.hear(Kind.DATA)
        assert (chunk.head["name"], chunk.head["run"], chunk.payload) == ("a", [0, 16], 16)
        origin.hear(Kind.ERROR)  # that nobody is at the replica's port comes when it comes
        origin.ask(everything=True)  # for a folder it has it, and now it serves it instead
        assert origin.connection.poll(0.5) is None
        origin.end()


def test_a_lead_whose_rank_0_is_gone_ends() -> None:
    with leading_node() as origin:
        origin.order()
        origin.hear(Kind.END)


# A rank that is late with its answer.


@contextlib.contextmanager
def leading() -> Iterator[tuple[Connection, RankZero, RankFollower]]:
    """The leader's end of the connection of two ranks, and both of them."""
    with nothing_left():
        near, far = map(Connection, socket.socketpair())
        leader, follower = RankZero(RankGroup(0, {1: near})), RankFollower(far, 1)
        yield near, leader, follower
        follower.close()
        leader.close()


class LateFollower(RankFollower):
    """A rank whose leader gives it up before it has answered."""

    leader_end: Connection

    def _end_publish(self, outcome: Frame) -> None:
        self.leader_end.close()


def test_an_outcome_stands_if_the_leader_waits_no_longer_for_the_answer() -> None:
    with nothing_left():
        near, far = map(Connection, socket.socketpair())
        follower = LateFollower(far, 1)
        follower.leader_end = near
        identity = WeightsId(epoch=1, version=1)
        done = Published(identity, "hash", 1, 1.0, 0.0, message="it serves", report=None)
        near.send(Kind.STAGED, to_json(done))
        assert follower.take_part(PushWork(1, {}, PushPlan(), 10)) == done
        assert follower.broken
        follower.close()


@pytest.mark.parametrize(("meets", "kind"), [(True, MeetingLeft), (False, PublishFailed)])
def test_a_rank_meets_again_only_if_its_leader_does(*, meets: bool, kind: type) -> None:
    with leading() as (_, leader, follower):
        leader.close(meets=meets)
        with pytest.raises(PublishFailed) as raised:
            follower.take_part(PushWork(1, {}, PushPlan(), 10))
        assert type(raised.value) is kind


LATE = PublishFailed("rank 1 did not publish within 3 s")


@pytest.mark.parametrize("gone", [False, True], ids=["waits for it", "waits no longer"])
def test_a_rank_that_is_too_late_has_the_outcome_of_the_others(
    monkeypatch: pytest.MonkeyPatch, *, gone: bool
) -> None:
    """It must not meet them for a version that they have ended: it would be one behind from then on."""
    monkeypatch.setattr(rank_group, "ACK_SECONDS", 0.05 if gone else 10)
    with leading() as (near, leader, follower):
        near.send(Kind.PING)
        telling = threading.Thread(target=leader.tell, args=(7, LATE))
        telling.start()
        if gone:
            telling.join()
        eventually("the outcome", lambda: follower.broken is gone and follower.has_missed(7), 5)
        with pytest.raises(PublishFailed, match=rf"^rank 0 of the group: {LATE}"):
            follower.take_part(PushWork(7, {}, PushPlan(), 10))
        telling.join()
        assert follower.broken is leader.broken is gone
        assert not follower.has_missed(7)


def test_a_rank_that_has_left_out_a_version_takes_part_in_the_next_one() -> None:
    with leading() as (_, leader, follower):
        telling = threading.Thread(target=leader.tell, args=(7, LATE))
        telling.start()
        eventually("the outcome", lambda: not follower.broken and follower.has_missed(7), 5)
        assert not follower.has_missed(8)
        with ThreadPoolExecutor() as threads:
            taking = threads.submit(follower.take_part, PushWork(8, {}, PushPlan(), 10))
            telling.join()
            assert list(leader.group.collect_offers(8, 10)) == [1]
            leader.tell(8, PublishFailed("the next"))
            with pytest.raises(PublishFailed, match="the next"):
                taking.result(10)
        assert not follower.broken


def test_the_rank_that_is_late_is_named_and_not_the_lead_of_its_node() -> None:
    (near, up), (below, idle) = wired(), map(Connection, socket.socketpair())
    leader = RankZero(RankGroup(0, {2: near}, {2: (2, 3)}))
    lead = NodeLead(up, 2, RankGroup(2, {3: below}))
    with ThreadPoolExecutor() as threads:
        taking = threads.submit(lead.take_part, PushWork(1, {}, PushPlan(), 0.3))
        with pytest.raises(PublishFailed, match=r"^rank 3 did not publish") as raised:
            leader.group.collect_offers(1, 0.2)
        idle.close()
        leader.tell(1, raised.value)
        with pytest.raises(PublishFailed, match="rank 3 did not publish"):
            taking.result(30)
    for each in leader, lead:
        each.close()


def test_ranks_of_a_lead_that_has_lost_rank_0_do_not_meet() -> None:
    """Nobody may wait for the dead in a collective operation."""
    with nothing_left():
        (origin, up), (near, far) = wired(), map(Connection, socket.socketpair())
        origin.close()
        for rank in NodeLead(up, 1, RankGroup(1, {2: near})), RankFollower(far, 2, 1):
            with pytest.raises(PublishFailed) as raised:
                rank.take_part(PushWork(1, {}, PushPlan(), 10))
            assert type(raised.value) is PublishFailed


# How boxes are cut.


@st.composite
def boxes(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> tuple[tuple[int, ...], Box]:
    """A shape, and a box of it."""
    shape = tuple(
        draw(st.lists(sizes, min_size=1, max_size=4).filter(lambda s: math.prod(s) < 1 << 25))
    )
    begins = [draw(st.integers(0, size - 1)) for size in shape]
    ends = [draw(st.integers(at + 1, size)) for at, size in zip(begins, shape, strict=True)]
    return shape, tuple(zip(begins, ends, strict=True))


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(*cut) for cut in box)))


@given(boxes(st.integers(1, 5)), st.integers(1, 40))
def test_pieces_have_each_element_of_a_box_once_and_in_order(
    cut: tuple[tuple[int, ...], Box], most: int
) -> None:
    pieces = [elements(piece) for piece in pieces_of(cut[1], most)]
    assert list(itertools.chain(*pieces)) == elements(cut[1])
    assert all(1 <= len(piece) <= most for piece in pieces)
