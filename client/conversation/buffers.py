"""Growing columns of numbers: appending costs only what is appended, reading copies nothing.

A `Column` is a typed stdlib array, so that neither operator nor client needs numpy. A `View` is a
fixed slice of a column: it stays valid while the column grows, and raises once the column is cut.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

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

    def fill(self, value: N, count: int) -> None:
        """Append one number `count` times."""
        self.data.extend(array(self.data.typecode, (value,)) * count)

    def cut(self, length: int) -> None:
        """Drop everything from `length` on."""
        if length < len(self.data):
            del self.data[length:]
            self.cuts.append(length)

    def view(self, start: int = 0, stop: int | None = None) -> View[N]:
        """Return `[start, stop)`, clamped, as it is now."""
        start, stop, _ = slice(start, stop).indices(len(self.data))
        return View(self, start, max(start, stop))

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


class View(Sequence[N]):
    """A read-only slice of a column; equal to any sequence of the same numbers.

    Raises:
        RuntimeError: On reading, if the column has been cut below the end of the slice.
    """

    __slots__ = ("_column", "_cuts", "_start", "_stop")

    def __init__(self, column: Column[N], start: int, stop: int) -> None:
        self._column: Column[N] = column
        self._start, self._stop = start, stop
        self._cuts = len(column.cuts)

    def _source(self) -> array[N]:
        cuts = self._column.cuts
        if len(cuts) > self._cuts and min(cuts[self._cuts :]) < self._stop:
            raise RuntimeError("the request has been truncated since: read this from it again")
        return self._column.data

    def array(self) -> array[N]:
        """Return a copy as a stdlib array."""
        return self._source()[self._start : self._stop]

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
            return self._source()[where]
        if where.step == 1:
            return self._source()[where.start : where.stop].tolist()
        return self.tolist()[index]

    def __iter__(self) -> Iterator[N]:
        return iter(self.array())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, View):
            return self.array() == other.array()
        if isinstance(other, Sequence | array) and not isinstance(other, str | bytes):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        more = ", …" if len(self) > 8 else ""
        return f"<{len(self)}: {', '.join(map(str, self[:8]))}{more}>"
