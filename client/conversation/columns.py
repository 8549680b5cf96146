"""Growing columns of numbers, and the columns of a conversation's tokens.

Appending costs only what is appended, and reading copies nothing. A `Column` is a typed stdlib
array, so neither the operator nor the client needs numpy. A `ColumnView` is a fixed slice of a
column: it stays valid while the column grows, and raises once the column is cut.

`TokenColumns` holds, for each token of a conversation: its id, whether it is trained on (`loss`),
whether the policy sampled it (`sampled`), its rollout logprob (0.0 where not sampled), its
position, and the weights that sampled it. Positions of plain text are counted, not stored.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

from pydantic import GetCoreSchemaHandler, SerializationInfo
from pydantic_core import core_schema

from rollout_common.wire import WeightsSpan

N = TypeVar("N", int, float)

INT32, INT8, FLOAT32 = "i", "b", "f"


class Column(Generic[N]):
    """A buffer that grows at its end and can be truncated there."""

    __slots__ = ("cuts", "data")

    def __init__(self, typecode: str, values: Iterable[N] | bytes = ()) -> None:
        self.data: array[N] = array(typecode)
        self.cuts: list[int] = []
        if isinstance(values, bytes):
            self.data.frombytes(values)
            if sys.byteorder == "big":
                self.data.byteswap()
        else:
            self.data.extend(values)

    def __len__(self) -> int:
        return len(self.data)

    def extend(self, values: Iterable[N]) -> None:
        """Append numbers."""
        self.data.extend(values)

    def append_repeated(self, value: N, count: int) -> None:
        """Append one number `count` times."""
        self.data.extend(array(self.data.typecode, (value,)) * count)

    def cut_to(self, length: int) -> None:
        """Drop everything from `length` on."""
        if length < len(self.data):
            del self.data[length:]
            self.cuts.append(length)

    def view(self, start: int = 0, stop: int | None = None) -> ColumnView[N]:
        """Return `[start, stop)`, clamped, as it is now."""
        start, stop, _ = slice(start, stop).indices(len(self.data))
        return ColumnView(self, start, max(start, stop))

    def tobytes(self) -> bytes:
        """Return the numbers as little-endian bytes."""
        if sys.byteorder == "little":
            return self.data.tobytes()
        swapped = self.data[:]
        swapped.byteswap()
        return swapped.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Column) and self.data == other.data

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Column[N]:
        return Column(self.data.typecode, self.data)


class ColumnView(Sequence[N]):
    """A read-only slice of a column; equal to any sequence of the same numbers.

    Raises:
        RuntimeError: On reading, if the column has been cut below the end of the slice.
    """

    __slots__ = ("_column", "_cuts", "_start", "_stop")

    def __init__(self, column: Column[N], start: int, stop: int) -> None:
        self._column: Column[N] = column
        self._start, self._stop = start, stop
        self._cuts = len(column.cuts)

    def _checked_data(self) -> array[N]:
        cuts = self._column.cuts
        if len(cuts) > self._cuts and min(cuts[self._cuts :]) < self._stop:
            raise RuntimeError("the request has been truncated since: read this from it again")
        return self._column.data

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


class TokenColumns:
    """Columns of one conversation, all of the same length.

    Attributes:
        prompt: Number of prompt tokens; the rest is the response.
        weights: Spans of sampled tokens; `start` and `end` count from the conversation's start.
    """

    def __init__(self) -> None:
        self.prompt = 0
        self.ids: Column[int] = Column(INT32)
        self.loss: Column[int] = Column(INT8)
        self.sampled: Column[int] = Column(INT8)
        self.logprobs: Column[float] = Column(FLOAT32)
        self.weights: list[WeightsSpan] = []
        self.rope: tuple[Column[int], ...] = ()
        self.next_position = 0

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
        self.loss.append_repeated(int(loss), count)
        self.sampled.append_repeated(int(sampled), count)
        if logprobs is None:
            self.logprobs.append_repeated(0.0, count)
        else:
            self.logprobs.extend(logprobs)
        for span in weights:
            self._append_span(
                span.model_copy(update={"start": span.start + start, "end": span.end + start})
            )
        self._append_positions(count, rope)

    def _all_columns(self) -> tuple[Column[Any], ...]:
        return (self.ids, self.loss, self.sampled, self.logprobs, *self.rope)

    def _append_span(self, span: WeightsSpan) -> None:
        if self.weights:
            last = self.weights[-1]
            if last.model_copy(update={"start": span.start, "end": span.end}) == span and (
                last.end == span.start
            ):
                self.weights[-1] = last.model_copy(update={"end": span.end})
                return
        if span.end > span.start:
            self.weights.append(span)

    def _append_positions(self, count: int, rope: RopePositions | None) -> None:
        if not count:
            return
        if rope is not None and not self.rope:
            before = range(len(self) - count)
            self.rope = tuple(Column(INT32, before) for _ in range(3))
        begin = self.next_position
        if rope is None:
            for axis in self.rope:
                axis.extend(range(begin, begin + count))
            self.next_position += count
            return
        for axis, delta in zip(self.rope, rope, strict=True):
            axis.extend([begin + position for position in delta])
        self.next_position += max(map(max, rope)) + 1

    def cut_to(self, length: int) -> None:
        """Drop every token from `length` on, with all that belongs to it."""
        if length >= len(self):
            return
        for column in self._all_columns():
            column.cut_to(length)
        while self.weights and self.weights[-1].start >= length:
            self.weights.pop()
        if self.weights and self.weights[-1].end > length:
            self.weights[-1] = self.weights[-1].model_copy(update={"end": length})
        self.prompt = min(self.prompt, length)
        self._count_position()

    def _count_position(self) -> None:
        # The largest position of a vision block need not be its last one, so check them all.
        rows = [axis.data for axis in self.rope] if len(self) else []
        self.next_position = 1 + max(map(max, rows)) if rows else len(self)

    def position_rows(self, start: int = 0, stop: int | None = None) -> tuple[Sequence[int], ...]:
        """Return the positions of `[start, stop)`: one row, or the three axes t, h, w."""
        if self.rope:
            return tuple(axis.view(start, stop) for axis in self.rope)
        return (range(len(self))[start:stop],)

    def column_view(self, name: str, start: int = 0, stop: int | None = None) -> ColumnView[Any]:
        """Return a slice of a column."""
        column: Column[Any] = getattr(self, name)
        return column.view(start, stop)

    _COLUMNS = (
        ("input_ids", "ids", INT32),
        ("loss_mask", "loss", INT8),
        ("response_mask", "sampled", INT8),
        ("rollout_log_probs", "logprobs", FLOAT32),
    )

    def to_document(self, binary: bool) -> dict[str, Any]:
        """Return JSON-like data; columns become lists, or little-endian bytes if `binary`."""

        def column(data: Column[Any]) -> bytes | list[Any]:
            return data.tobytes() if binary else data.data.tolist()

        found: dict[str, Any] = {"prompt_length": self.prompt}
        found |= {name: column(getattr(self, attribute)) for name, attribute, _ in self._COLUMNS}
        found["weights"] = [span.model_dump() for span in self.weights]
        found["rope_position_ids"] = [column(axis) for axis in self.rope]
        return found

    @classmethod
    def from_document(cls, found: Any) -> TokenColumns:
        """Restore what `document` returned.

        Raises:
            ValueError: Columns have different lengths, or the prompt is longer than they are.
        """
        if isinstance(found, TokenColumns):
            return found
        streams = cls()
        for name, attribute, typecode in cls._COLUMNS:
            setattr(streams, attribute, Column(typecode, found[name]))
        streams.weights = [WeightsSpan.model_validate(span) for span in found["weights"]]
        streams.rope = tuple(Column(INT32, axis) for axis in found["rope_position_ids"])
        streams.prompt, length = int(found["prompt_length"]), len(streams)
        if (
            any(len(column) != length for column in streams._all_columns())
            or not 0 <= streams.prompt <= length
        ):
            raise ValueError("streams: column lengths differ, or the prompt is longer than them")
        streams._count_position()
        return streams

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        def dump(streams: TokenColumns, info: SerializationInfo) -> Any:
            if info.mode_is_json():
                return streams.to_document(binary=False)
            return streams.to_document(binary=True) if info.context else streams

        return core_schema.no_info_plain_validator_function(
            cls.from_document,
            serialization=core_schema.plain_serializer_function_ser_schema(dump, info_arg=True),
        )
