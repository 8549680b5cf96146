"""Wire models of replay records: which experts each token went to, and which tokens could be sampled.

A trainer that routes as the sampler did, and renormalises over the same tokens, computes the logprobs that the sampler had.
Arrays are base64 of little-endian numbers in JSON.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from .wire_base import Wire

if TYPE_CHECKING:
    import numpy

__all__ = ["MAX_RECORD_BYTES", "RoutedExperts", "SamplingMask"]

MAX_RECORD_BYTES = 2**27
"""Most bytes of routes in one response: 128 MB, some 340,000 tokens of 48 layers with 8 experts each."""


class RoutedExperts(Wire):
    """The experts of tokens of prompt and output, in order, from position `start` on: [rows, layers, top_k].

    Row r belongs to the token at position `start` + r, where the prompt's first token has position 0; the model chose
    these experts when it read that token. The last token of an output was not read, so a whole record has one row less than
    prompt and output have tokens. Layers are those that route, in their order.
    """

    start: int = Field(ge=0)
    rows: int = Field(ge=0)
    layers: int = Field(ge=1)
    top_k: int = Field(ge=1)
    dtype: Literal["uint8", "uint16"]
    data: str = Field(description="Base64 of [rows, layers, top_k], little-endian.")

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return self.layers * self.top_k * (1 if self.dtype == "uint8" else 2)

    def to_bytes(self) -> bytes:
        """Return the numbers; raises `ValueError` if there are not as many as the shape says."""
        data = base64.b64decode(self.data, validate=True)
        if len(data) != self.rows * self.row_bytes:
            raise ValueError(f"{len(data)} bytes of routes, expected {self.rows * self.row_bytes}")
        return data

    def to_array(self) -> numpy.ndarray[Any, Any]:
        """Return the experts as an array [rows, layers, top_k]; needs numpy."""
        import numpy

        kind = numpy.dtype(self.dtype).newbyteorder("<")
        numbers = numpy.frombuffer(self.to_bytes(), dtype=kind)
        return numbers.reshape(self.rows, self.layers, self.top_k)


class SamplingMask(Wire):
    """Which tokens could have been drawn instead of each token of an output, after every parameter of `sampling`: T rows.

    `counts` [T]: how many of the `vocab_size` ids. `data`: the rows, one after the other. Of a row with all ids there is
    nothing; else it is the ids in ascending order, 4 bytes each, or, where that is shorter, a bit for each id of the
    vocabulary, the lowest bit of each byte first, filled up to whole bytes.
    """

    vocab_size: int = Field(ge=1)
    counts: tuple[int, ...]
    data: str = Field(description="Base64 of the rows.")

    def to_rows(self) -> list[bytes]:
        """Return the rows; raises `ValueError` if `data` has another length than `counts` says."""
        data, at, rows = base64.b64decode(self.data, validate=True), 0, []
        for count in self.counts:
            size = mask_row_bytes(count, self.vocab_size)
            rows.append(data[at : at + size])
            at += size
        if at != len(data):
            raise ValueError(f"{len(data)} bytes of masks, expected {at}")
        return rows

    def allowed_ids(self) -> list[numpy.ndarray[Any, Any]]:
        """Return the ids that could be drawn for each token, ascending, as arrays; needs numpy."""
        return [
            unpack_mask_row(row, count, self.vocab_size)
            for row, count in zip(self.to_rows(), self.counts, strict=True)
        ]


def mask_row_bytes(count: int, vocab_size: int) -> int:
    """Return how many bytes the row of a `SamplingMask` with `count` ids has."""
    return 0 if count == vocab_size else min(4 * count, -(-vocab_size // 8))


def unpack_mask_row(row: bytes, count: int, vocab_size: int) -> numpy.ndarray[Any, Any]:
    """Return the ids of a row of a `SamplingMask`, ascending; needs numpy."""
    import numpy

    if count == vocab_size:
        return numpy.arange(vocab_size, dtype=numpy.uint32)
    if 4 * count <= -(-vocab_size // 8):
        return numpy.frombuffer(row, dtype=numpy.dtype("<u4"))
    bits = numpy.unpackbits(numpy.frombuffer(row, dtype=numpy.uint8), bitorder="little")
    return bits[:vocab_size].nonzero()[0].astype(numpy.uint32)
