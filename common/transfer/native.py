"""Deltas by `delta.c`, which `hack/hatch_build.py` compiles for wheels, images and editable installs.

It has no part in Python's own interface, so that one library serves every version of it. Calls run
beside other threads: ctypes lets go of the interpreter. numpy lends the addresses and the memory.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .vectors import BLOCK_WORDS, DeltaError, most_words, packed, read
from .vectors import apply as apply_slowly

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger(__name__)

ABI = 1
"""Of `delta.c`: an editable install may hold a library of older code."""
_GROUP = 64
"""Room beyond `most`, see `delta.c`."""


def load(path: Path, abi: int = ABI) -> ctypes.CDLL | None:
    """Open the library, if it is there and may be used by this code; if not, the log says why."""
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        library.rollout_delta_abi.restype = ctypes.c_int32
        library.rollout_delta_abi.argtypes = ()
        found = library.rollout_delta_abi()
    except (OSError, AttributeError) as error:
        logger.warning("%s can't be used, numpy does it: %s", path.name, error)
        return None
    if found != abi:
        logger.warning("%s is of other code (%s), install again; numpy does it", path.name, found)
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    library.rollout_delta_find.restype = number
    library.rollout_delta_find.argtypes = (address, address, number, number, *[address] * 3)
    library.rollout_delta_apply.restype = ctypes.c_int32
    library.rollout_delta_apply.argtypes = (address, ctypes.c_uint64, address, ctypes.c_uint64)
    return library


LIBRARY = load(Path(__file__).with_name("libdelta.so"))
"""The library; None: numpy does it."""


def encode(
    library: ctypes.CDLL, base: memoryview | bytes, new: memoryview | bytes, most: float | None
) -> bytes | None:
    """Return what turns one run of bytes into another one, see `delta.encode`."""
    import numpy as np

    words = len(new) // 2
    left = min(most_words(base, new, most), words)
    before, after = _bytes(base), _bytes(new)  # these hold the buffers as long as the call lasts
    counts = np.empty(-(-words // BLOCK_WORDS), dtype="<u4")
    offsets, values = np.empty((2, max(left, 0) + _GROUP), dtype="<u2")
    total = library.rollout_delta_find(
        *(before.ctypes.data, after.ctypes.data, words, left),
        *(counts.ctypes.data, offsets.ctypes.data, values.ctypes.data),
    )
    if total < 0:
        return None
    return packed(counts, [offsets[:total]], [values[:total]], new)


def apply(library: ctypes.CDLL, delta: memoryview | bytes, memory: memoryview) -> None:
    """Write a delta into the bytes that it was made for, see `delta.apply`."""
    source, place = _bytes(delta), _bytes(memory)
    if not place.flags.writeable:  # C would not ask
        apply_slowly(delta, memory)
        return
    if library.rollout_delta_apply(source.ctypes.data, len(source), place.ctypes.data, len(place)):
        return
    read(delta, *divmod(len(memory), 2))  # says why
    raise DeltaError("this is no delta of these bytes")


def _bytes(of: memoryview | bytes) -> npt.NDArray[np.uint8]:
    import numpy as np

    there: npt.NDArray[Any] = np.frombuffer(of, dtype=np.uint8, count=len(of))
    return there
