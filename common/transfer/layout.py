"""Where each tensor of a pushed version lies in its memory: planned once, the same at both ends.

Every tensor begins at a multiple of `ALIGN`, so that a view of any dtype is legal and no engine has to
copy what it could use in place. `layout_id` is the hash of the whole plan: for two ends with the same id,
an offset refers to the same bytes.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

from .pieces import PieceMap

ALIGN = 256
"""Every tensor begins at a multiple of this, in bytes."""

MAX_TENSORS = 1_000_000
MAX_NAME = 1024
MAX_DIMENSIONS = 32
MAX_BYTES = 1 << 48
"""Largest layout: 256 TiB. A larger number is an error, not a model."""

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
"""Safetensors' dtypes and the bytes of one element."""

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "C64": "complex64",
    "BOOL": "bool",
}
"""The same dtypes as torch calls them; an older torch has fewer."""

_LAYER = re.compile(r".*?\.\d+\.")

Named = tuple[str, str, Sequence[int]]
"""Name, dtype as safetensors call it, and shape."""


class LayoutError(ValueError):
    """These tensors don't make a layout; the text names the tensor and the fix."""

    def __init__(self, detail: str, *, tensor: str | None = None) -> None:
        super().__init__(detail)
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor and its place.

    Attributes:
        name: In the model's checkpoint.
        dtype: As safetensors call it, such as `BF16`.
        shape: () for a single number.
        start: Offset of its first byte, a multiple of `ALIGN`.
        nbytes: Its size; 0 if a dimension is 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def end(self) -> int:
        """Offset of the first byte after it."""
        return self.start + self.nbytes


@dataclass(frozen=True)
class PushLayout:
    """The places of all tensors of a version; make it with `plan` or `from_json`.

    Attributes:
        tensors: In the order of their names.
        nbytes: Size of the memory, gaps included.
        layout_id: Hash over the ordered (name, dtype, shape, start).
    """

    tensors: tuple[Placed, ...]
    nbytes: int
    layout_id: str

    @classmethod
    def plan(cls, entries: Iterable[Named]) -> Self:
        """Place the tensors one after the other, in the given order.

        Raises:
            LayoutError: A name came twice, or a dtype, shape or size is impossible.
        """
        specs: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for name, dtype, shape in entries:
            if name in specs:
                raise LayoutError(
                    f"the tensor {name!r} came twice: publish each name once", tensor=name
                )
            specs[name] = (dtype, tuple(shape), _tensor_nbytes(name, dtype, shape))
            if len(specs) > MAX_TENSORS:
                raise LayoutError(f"more than {MAX_TENSORS} tensors: publish one model at a time")
        placed, end = [], 0
        for name, (dtype, dimensions, nbytes) in specs.items():
            placed.append(Placed(name, dtype, dimensions, end, nbytes))
            end += align_size(nbytes)
        return cls._make_layout(tuple(sorted(placed, key=lambda each: each.name)), end)

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Return the layout that another process described.

        Raises:
            LayoutError: It is not a valid layout: overlaps, wrong sizes, unknown dtypes, an id of another plan.
        """
        body = value if isinstance(value, Mapping) else {}
        rows = body.get("tensors")
        if not isinstance(rows, list) or len(rows) > MAX_TENSORS:
            raise LayoutError(f"a layout names its tensors in a list of at most {MAX_TENSORS}")
        placed = tuple(map(_read_row, rows))
        size = _check_places(placed, body.get("bytes"))
        made = cls._make_layout(placed, size)
        if body.get("layout_id") != made.layout_id:
            raise LayoutError(
                f"the layout is {made.layout_id}, not {body.get('layout_id')!r} as it says of itself"
            )
        return made

    @cached_property
    def pieces(self) -> PieceMap:
        """How its bytes are cut for transfers."""
        return PieceMap(self.tensors)

    @classmethod
    def _make_layout(cls, tensors: tuple[Placed, ...], nbytes: int) -> Self:
        if nbytes > MAX_BYTES:
            raise LayoutError(f"{nbytes} bytes are more than any worker can hold")
        return cls(tensors, nbytes, _layout_id(tensors))

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        rows = [[each.name, each.dtype, list(each.shape), each.start] for each in self.tensors]
        return {"layout_id": self.layout_id, "bytes": self.nbytes, "tensors": rows}

    def __getitem__(self, name: str) -> Placed:
        """Return a tensor's place; KeyError if there is none of this name."""
        place = bisect_left(self.tensors, name, key=lambda each: each.name)
        if place == len(self.tensors) or self.tensors[place].name != name:
            raise KeyError(name)
        return self.tensors[place]


def layer_of(name: str) -> str:
    """Return a tensor's name up to its first number, else an empty text: tensors that are converted together share it."""
    found = _LAYER.match(name)
    return found[0] if found else ""


def align_size(nbytes: int) -> int:
    """Return a size rounded up to `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN


def _tensor_nbytes(name: object, dtype: object, shape: object) -> int:
    """Return the size of a tensor in bytes; refuse impossible names, dtypes and shapes."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise LayoutError(
            f"a tensor's name has 1 to {MAX_NAME} printable characters, not {str(name)[:80]!r}"
        )
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        known = ", ".join(sorted(ITEM_BYTES))
        raise LayoutError(
            f"tensor {name!r} has the dtype {dtype!r}: use one of {known}", tensor=name
        )
    if (
        not isinstance(shape, Sequence)
        or len(shape) > MAX_DIMENSIONS
        or not all(map(_is_size, shape))
    ):
        raise LayoutError(
            f"tensor {name!r}: a shape has at most {MAX_DIMENSIONS} dimensions, each 0 or more",
            tensor=name,
        )
    nbytes = ITEM_BYTES[dtype] * math.prod(shape)
    if nbytes > MAX_BYTES:
        raise LayoutError(
            f"tensor {name!r} would have {nbytes} bytes: check its shape", tensor=name
        )
    return nbytes


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_BYTES


def _read_row(row: object) -> Placed:
    if not isinstance(row, list) or len(row) != 4:
        raise LayoutError("a tensor of a layout is [name, dtype, shape, start]")
    name, dtype, shape, start = row
    nbytes = _tensor_nbytes(name, dtype, shape)
    if not _is_size(start) or start % ALIGN:
        raise LayoutError(
            f"tensor {name!r} begins at {start!r}: it must be a multiple of {ALIGN}", tensor=name
        )
    return Placed(name, dtype, tuple(shape), start, nbytes)


def _check_places(tensors: Sequence[Placed], size: object) -> int:
    """Refuse tensors that are out of order or overlap, and a wrong total size; return the total size."""
    for before, after in pairwise(tensors):
        if before.name >= after.name:
            raise LayoutError(
                f"tensor {after.name!r} comes after {before.name!r}: each name once, in order",
                tensor=after.name,
            )
    end = 0
    # An empty tensor takes no room: it may share its offset with the next one.
    for each in sorted(tensors, key=lambda placed: (placed.start, placed.nbytes)):
        if each.start < end:
            raise LayoutError(f"tensor {each.name!r} overlaps another one", tensor=each.name)
        end = each.end
    if not _is_size(size) or size != align_size(end):
        raise LayoutError(
            f"the tensors take {align_size(end)} bytes, not {size!r} as the layout says"
        )
    return align_size(end)


def _layout_id(tensors: Iterable[Placed]) -> str:
    import xxhash

    plan = xxhash.xxh3_128()
    for each in tensors:
        dimensions = ",".join(map(str, each.shape))
        plan.update(f"{each.name}\0{each.dtype}\0{dimensions}\0{each.start}\n".encode())
    return f"xxh3_128:{plan.hexdigest()}"
