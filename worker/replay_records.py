"""Replay records as engines hand them over: which experts each token went to, and which tokens could be sampled."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rollout_common.wire import RoutedExperts, SamplingMask

PIECE_BYTES = 3 << 18
"""Bytes that are written as base64 at once, in about a millisecond; a multiple of 3, so that pieces can be joined."""


@dataclass(slots=True)
class ExpertRoutes:
    """The experts of some tokens in order, from position `start` of prompt and output on: data [rows, layers, top_k]."""

    start: int
    layers: int
    top_k: int
    dtype: Literal["uint8", "uint16"]
    data: bytearray = field(default_factory=bytearray)

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return self.layers * self.top_k * (1 if self.dtype == "uint8" else 2)

    def __len__(self) -> int:
        return len(self.data) // self.row_bytes

    @property
    def end(self) -> int:
        """Position after the last one."""
        return self.start + len(self)

    def extend(self, other: ExpertRoutes) -> None:
        """Append those of the following tokens."""
        assert other.start == self.end, "rows come in order"
        self.data.extend(other.data)

    def slice_rows(self, start: int, end: int) -> ExpertRoutes:
        """Return the rows of positions [start, end)."""
        first, last = ((at - self.start) * self.row_bytes for at in (start, end))
        return ExpertRoutes(start, self.layers, self.top_k, self.dtype, self.data[first:last])

    def to_wire(self, start: int, end: int) -> RoutedExperts:
        """Return the rows of positions [start, end) as the client gets them."""
        part = self.slice_rows(start, end)
        data = base64.b64encode(part.data).decode()
        return part.describe_rows().model_copy(update={"data": data})

    def describe_rows(self) -> RoutedExperts:
        """Return what the client gets of all rows, without their data."""
        return RoutedExperts(
            start=self.start,
            rows=len(self),
            layers=self.layers,
            top_k=self.top_k,
            dtype=self.dtype,
            data="",
        )


@dataclass(slots=True)
class TokenMasks:
    """Which tokens could have been drawn, for each token of an output: rows as of `wire.SamplingMask`."""

    vocab_size: int
    counts: list[int] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)

    def append_row(self, count: int, row: bytes) -> None:
        """Append one token's row."""
        self.counts.append(count)
        self.rows.append(row)

    def extend(self, other: TokenMasks) -> None:
        """Append those of the following tokens."""
        self.counts += other.counts
        self.rows += other.rows

    def slice_rows(self, start: int, end: int) -> TokenMasks:
        """Return the rows of tokens [start, end)."""
        return TokenMasks(self.vocab_size, self.counts[start:end], self.rows[start:end])

    def to_wire(self, start: int, end: int) -> SamplingMask:
        """Return the rows of tokens [start, end) as the client gets them."""
        part = self.slice_rows(start, end)
        data = base64.b64encode(part.data).decode()
        return part.describe_rows().model_copy(update={"data": data})

    def describe_rows(self) -> SamplingMask:
        """Return what the client gets of all rows, without their data."""
        return SamplingMask(vocab_size=self.vocab_size, counts=tuple(self.counts), data="")

    @property
    def data(self) -> bytes:
        """All rows, one after the other."""
        return b"".join(self.rows)


def base64_pieces(data: bytes | bytearray) -> Iterator[bytes]:
    """Yield base64 of data, piece by piece."""
    for at in range(0, len(data), PIECE_BYTES):
        yield base64.b64encode(data[at : at + PIECE_BYTES])
