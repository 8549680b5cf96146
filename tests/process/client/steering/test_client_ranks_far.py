"""Ranks of other nodes: what becomes of one that lies, and how boxes are cut into chunks."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.errors import PublishFailed
from rollout_client.steering.pushing import leading, streaming
from rollout_client.steering.pushing.boxes import Box, nbytes_of, pieces_of, run_of, shape_of
from rollout_client.steering.pushing.copying import Copier
from rollout_client.steering.pushing.leading import Leading
from rollout_client.steering.pushing.merging import Merging
from rollout_common.transfer.connection import Connection
from rollout_common.transfer.frames import CHUNK_BYTES, Kind, TransferError
from rollout_common.transfer.layout import ITEM_BYTES, LayoutError, PushLayout
from tests.support.unit.far_ranks import LOOPBACK, first, nothing_left

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
    """A rank of another node that says what a test wants."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self.connection = rank, connection

    def hello(self, **other: Any) -> None:
        rows = [[*spec, BOXES[self.rank].get(spec[0]), False] for spec in SPECS[1:3]]
        self.connection.send(Kind.HELLO, {"version": 1, "tensors": rows, **other})

    def chunk(
        self, name: str, box: Box | None = None, content: bytes | None = None, **other: Any
    ) -> None:
        box = box or BOXES[self.rank][name]
        true = STATE[name][tuple(slice(*cut) for cut in box)].contiguous().numpy().tobytes()
        head = {"name": name, "box": box, "hash": xxhash.xxh3_128_hexdigest(true), **other}
        self.connection.send(Kind.DATA, head, true if content is None else content)

    def chunks(self) -> None:
        for name in BOXES[self.rank]:
            self.chunk(name)

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
    assert far.connection.expect(Kind.LAYOUT).head["boxes"].keys() == BOXES[far.rank].keys()


def wired() -> tuple[Connection, Connection]:
    with socket.create_server((LOOPBACK, 0)) as server:
        there = socket.create_connection(server.getsockname())
        return Connection(server.accept()[0]), Connection(there)


@contextlib.contextmanager
def published(
    says: Mapping[int, tuple[Callable[[Far], None], ...]], *, pings: bool = True
) -> Iterator[tuple[Merging, BaseException | None]]:
    """Have rank 0 fill a version with what the others say; yields why it failed."""
    with nothing_left():
        ends = {rank: wired() for rank in says}
        leader = Leading({rank: near for rank, (near, _) in ends.items()}, ends.keys())
        filling = Merging(leader.arena, Copier())
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
            leader.fill(filling, Copier(), mine, 1, 10)
        except (PublishFailed, LayoutError) as error:
            why = error
        late.cancel()
        yield filling, why
        leader.tell(why or PublishFailed("it has been looked at"))
        filling.close()
        leader.close()
        for thread in threads:
            thread.join(10)


def bytes_of(filling: Merging, name: str) -> torch.Tensor:
    with filling.slot.view(filling.layout[name]) as view:
        return torch.tensor(list(view), dtype=torch.uint8)


def test_what_far_ranks_send_makes_the_version() -> None:
    says = dict.fromkeys(BOXES, (Far.hello, ordered, Far.chunks))
    with published(says) as (filling, why):
        assert why is None
        assert filling.root_hash
        for name, tensor in STATE.items():
            assert torch.equal(bytes_of(filling, name), tensor.reshape(-1).view(torch.uint8))


def truncated(far: Far) -> None:
    head = json.dumps({"name": "m", "box": BOXES[1]["m"], "hash": "", "payload": 32}).encode()
    far.connection._sock.sendall(first(head, kind=Kind.DATA) + WRONG * 10)
    far.connection.interrupt()


def damaged_run(far: Far) -> None:
    far.chunk("m")
    far.chunk("rows", content=WRONG * 4)


def twice(say: Callable[[Far], None]) -> Callable[[Far], None]:
    def said(far: Far) -> None:
        say(far)
        say(far)

    return said


LIES: dict[str, tuple[Callable[[Far], None], str]] = {
    "a bit": (lambda far: far.chunk("m", content=WRONG * 32), "1: a chunk of 'm' arrived damaged"),
    "a bit of a run": (damaged_run, "1: a chunk of 'rows' arrived damaged"),
    "twice": (twice(lambda far: far.chunk("m")), "'m' came that was not due"),
    "all twice": (twice(Far.chunks), "'m' came that was not due"),
    "order": (lambda far: far.chunk("rows"), "'rows' came that was not due"),
    "box": (lambda far: far.chunk("m", BOXES[2]["m"], WRONG * 48), "'m' came that was not due"),
    "tensor": (lambda far: far.chunk("a", ((0, 4),), WRONG * 16), "'a' came that was not due"),
    "no name": (
        lambda far: far.connection.send(Kind.DATA, {"name": [{}]}),
        "came that was not due",
    ),
    "more": (lambda far: far.chunk("m", content=WRONG * 96), "came with 96 bytes, not 32"),
    "no hash": (lambda far: far.chunk("m", hash=None), "DATA.hash must be a text"),
    "an end": (truncated, "the other end has closed the connection"),
    "leaves": (lambda far: far.connection.send(Kind.RELEASED), "left in the middle of a publish"),
    "not sent": (
        lambda far: far.connection.send(Kind.FILLED, {"name": "m", "block": 96}),
        "FILLED came",
    ),
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
        (lambda far: far.hello(tensors=None), "rank 1 describes its tensors in a format"),
        (lambda far: far.hello(tensors=[["m"]]), "rank 1 describes its tensors in a format"),
        *(
            (
                lambda far, box=box: far.hello(tensors=[["rows", "U8", [9], box, False]]),
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
    monkeypatch.setattr(leading, "LEASE_SECONDS", 1.5)
    says = dict.fromkeys(BOXES, (Far.hello, ordered))
    with published(says, pings=False) as (_, why):
        assert "rank 1 is gone: nothing came for 1.5 s" in str(why)


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


@given(
    boxes(st.sampled_from([1, 2, 3, 1000, 4097, 300_000, 1 << 20, (1 << 22) + 1])),
    st.sampled_from(sorted(ITEM_BYTES)),
)
def test_both_ends_cut_a_box_into_the_same_chunks(
    cut: tuple[tuple[int, ...], Box], dtype: str
) -> None:
    shape, box = cut
    spec = ("x", dtype, shape)
    sent = list(streaming._chunks(spec, box))
    due = list(streaming._due(PushLayout.plan([spec]), {"x": box}))
    assert [piece for _, piece, _ in due] == sent
    at, of_box = 0, ("x", dtype, shape_of(box))
    for piece in sent:
        assert nbytes_of(spec, piece) <= CHUNK_BYTES
        within = tuple((a - o, b - o) for (a, b), (o, _) in zip(piece, box, strict=True))
        run = run_of(of_box, within)
        assert run is not None
        assert run[0] == at
        at = run[1]
    assert at == nbytes_of(spec, box)
