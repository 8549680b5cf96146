"""Columns of a conversation's tokens: they grow at their end, and reading copies nothing.

A column is a typed stdlib array, so neither the operator nor the client needs numpy. A `ColumnView`
is a fixed slice of a column: it stays valid while the column grows, and raises once that is cut.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias, TypeVar, overload

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializationInfo,
    model_validator,
)
from pydantic_core import core_schema

from rollout_client.weights_spans import append_span, cut_spans, shifted_span
from rollout_common.wire import WeightsSpan

N = TypeVar("N", int, float)

INT32, INT8, FLOAT32 = "i", "b", "f"


class ColumnView(Sequence[N]):
    """A read-only slice `[start, stop)` of a column; equal to any sequence of the same numbers.

    Reading raises RuntimeError once the column was cut below the end of the slice: its owner appends
    the new length to `cuts`.
    """

    __slots__ = ("_cuts", "_cuts_seen", "_data", "_start", "_stop")

    def __init__(
        self, data: array[N], cuts: list[int], start: int = 0, stop: int | None = None
    ) -> None:
        self._data: array[N] = data
        self._cuts, self._cuts_seen = cuts, len(cuts)
        self._start, end, _ = slice(start, stop).indices(len(data))
        self._stop = max(self._start, end)

    def _checked_data(self) -> array[N]:
        if min(self._cuts[self._cuts_seen :], default=self._stop) < self._stop:
            raise RuntimeError("the request has been truncated since: read this from it again")
        return self._data

    def array(self) -> array[N]:
        """Return a copy as a stdlib array."""
        return self._checked_data()[self._start : self._stop]

    def tolist(self) -> list[N]:
        """Return a list of Python numbers."""
        return self.array().tolist()

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: int) -> N: ...
    @overload
    def __getitem__(self, index: slice) -> list[N]: ...
    def __getitem__(self, index: int | slice) -> N | list[N]:
        where = range(self._start, self._stop)[index]
        if isinstance(where, int):
            return self._checked_data()[where]
        if where.step == 1:
            return self._checked_data()[where.start : where.stop].tolist()
        return self.tolist()[index]

    def __iter__(self) -> Iterator[N]:
        return iter(self.array())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ColumnView):
            return self.array() == other.array()
        if isinstance(other, Sequence | array) and not isinstance(other, str | bytes):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        more = ", …" if len(self) > 8 else ""
        return f"<{len(self)}: {', '.join(map(str, self[:8]))}{more}>"


RopePositions = tuple["array[int]", "array[int]", "array[int]"]


@dataclass(frozen=True)
class _ColumnForm:
    """How a column is written: numbers in JSON, little-endian bytes in msgpack."""

    typecode: str

    def __get_pydantic_core_schema__(self, *_: object) -> core_schema.CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(self._dump, info_arg=True)
        return core_schema.no_info_plain_validator_function(self._load, serialization=dump)

    def _load(self, values: Iterable[Any]) -> array[Any]:
        # An array takes bytes as its memory, anything else number by number.
        column = array(self.typecode, values)
        return _little_endian(column) if isinstance(values, bytes) else column

    def _dump(self, column: array[Any], info: SerializationInfo) -> Any:
        if info.mode_is_json():
            return column.tolist()
        return _little_endian(column).tobytes() if info.context else column


def _little_endian(column: array[Any]) -> array[Any]:
    """Return a column between this machine's byte order and little-endian, in either direction."""
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column


def _column_field(typecode: str, alias: str) -> Any:
    return Field(default_factory=lambda: array(typecode), alias=alias)


if TYPE_CHECKING:
    Int32Column: TypeAlias = array[int]
    Int8Column: TypeAlias = array[int]
    Float32Column: TypeAlias = array[float]
else:  # Python 3.11 has no generic arrays
    Int32Column = Annotated[array, _ColumnForm(INT32)]
    Int8Column = Annotated[array, _ColumnForm(INT8)]
    Float32Column = Annotated[array, _ColumnForm(FLOAT32)]


class TokenColumns(BaseModel):
    """Columns of one conversation, all of the same length.

    Attributes:
        prompt: Number of prompt tokens; the rest is the response.
        ids: Token ids.
        loss: 1 where a token is trained on.
        sampled: 1 where the policy sampled the token.
        logprobs: Rollout logprobs; 0.0 where not sampled.
        weights: Spans of sampled tokens; `start` and `end` count from the conversation's start.
        rope: Three rows of positions; empty for plain text, whose positions just count up.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    prompt: int = Field(default=0, alias="prompt_length")
    ids: Int32Column = _column_field(INT32, "input_ids")
    loss: Int8Column = _column_field(INT8, "loss_mask")
    sampled: Int8Column = _column_field(INT8, "response_mask")
    logprobs: Float32Column = _column_field(FLOAT32, "rollout_log_probs")
    weights: list[WeightsSpan] = Field(default_factory=list)
    rope: tuple[Int32Column, ...] = Field(default=(), alias="rope_position_ids")
    _next_position: int = PrivateAttr(default=0)
    _cuts: list[int] = PrivateAttr(default_factory=list)
    """Every length to which the columns were cut."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        lengths = {len(column) for column in self._all_columns()}
        if lengths != {len(self)} or not 0 <= self.prompt <= len(self):
            raise ValueError("streams: column lengths differ, or the prompt is longer than them")
        self._count_position()
        return self

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenColumns) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def append_tokens(
        self,
        ids: Sequence[int],
        *,
        loss: bool = False,
        logprobs: Iterable[float] | None = None,
        sampled: bool = False,
        weights: Iterable[WeightsSpan] = (),
        rope: RopePositions | None = None,
    ) -> None:
        """Append tokens; spans count from the first of them, `rope` from position 0."""
        start, count = len(self.ids), len(ids)
        self.ids.extend(ids)
        self.loss.extend([int(loss)] * count)
        self.sampled.extend([int(sampled)] * count)
        self.logprobs.extend([0.0] * count if logprobs is None else logprobs)
        for span in weights:
            append_span(self.weights, shifted_span(span, start))
        if count:
            self._append_positions(count, rope)

    def _append_positions(self, count: int, rope: RopePositions | None) -> None:
        begin = self._next_position
        if rope is None:
            for axis in self.rope:
                axis.extend(range(begin, begin + count))
            self._next_position += count
            return
        if not self.rope:
            self.rope = tuple(array(INT32, range(len(self) - count)) for _ in range(3))
        for axis, delta in zip(self.rope, rope, strict=True):
            axis.extend([begin + position for position in delta])
        self._next_position += max(map(max, rope)) + 1

    def cut_to(self, length: int) -> None:
        """Drop every token from `length` on, with all that belongs to it."""
        if length >= len(self):
            return
        self._cuts.append(length)
        for column in self._all_columns():
            del column[length:]
        cut_spans(self.weights, length)
        self.prompt = min(self.prompt, length)
        self._count_position()

    def _all_columns(self) -> tuple[array[Any], ...]:
        return (self.ids, self.loss, self.sampled, self.logprobs, *self.rope)

    def _count_position(self) -> None:
        # The largest position of a vision block need not be its last one, so check them all.
        self._next_position = 1 + max(map(max, self.rope)) if self.rope and self.ids else len(self)

    def position_rows(self, start: int = 0) -> tuple[Sequence[int], ...]:
        """Return the positions from `start` on: one row, or the three axes t, h, w."""
        if self.rope:
            return tuple(ColumnView(axis, self._cuts, start) for axis in self.rope)
        return (range(len(self))[start:],)

    def column_view(self, name: str, start: int = 0, stop: int | None = None) -> ColumnView[Any]:
        """Return a slice of a column."""
        return ColumnView(getattr(self, name), self._cuts, start, stop)
