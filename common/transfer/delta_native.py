"""Deltas by `delta.c`, which `hack/hatch_build.py` compiles for wheels, images and editable installs.

The library doesn't use Python's C API, so one library serves every version of Python. ctypes releases the
interpreter's lock, so other threads run during a call. numpy provides the addresses and the memory.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .delta_words import BLOCK_WORDS, DeltaError, most_words, pack_delta, read_delta
from .delta_words import apply_words as apply_slowly

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger(__name__)

ABI = 1
"""Version of the interface of `delta.c`: an editable install may hold a library of older code."""
_GROUP = 64
"""Words of the buffer beyond `most`, as `delta.c` needs them."""


def load_library(path: Path, abi: int = ABI) -> ctypes.CDLL | None:
    """Load the library if it exists and this code can use it; else log why not and return None."""
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


LIBRARY = load_library(Path(__file__).with_name("libdelta.so"))
"""The library; None: numpy finds and applies deltas."""


def encode_natively(
    library: ctypes.CDLL, base: memoryview | bytes, new: memoryview | bytes, most: float | None
) -> bytes | None:
    """Return what turns one run of bytes into another one; as `delta.encode_delta`."""
    import numpy as np

    words = len(new) // 2
    left = min(most_words(base, new, most), words)
    before, after = _as_bytes(base), _as_bytes(new)  # they keep the buffers alive during the call
    counts = np.empty(-(-words // BLOCK_WORDS), dtype="<u4")
    offsets, values = np.empty((2, max(left, 0) + _GROUP), dtype="<u2")
    total = library.rollout_delta_find(
        *(before.ctypes.data, after.ctypes.data, words, left),
        *(counts.ctypes.data, offsets.ctypes.data, values.ctypes.data),
    )
    if total < 0:
        return None
    return pack_delta(counts, offsets[:total], values[:total], new)


def apply_natively(library: ctypes.CDLL, delta: memoryview | bytes, memory: memoryview) -> None:
    """Apply a delta to the bytes that it was made for; as `delta.apply_delta`."""
    source, place = _as_bytes(delta), _as_bytes(memory)
    if not place.flags.writeable:  # C code would write it all the same
        apply_slowly(delta, memory)
        return
    if library.rollout_delta_apply(source.ctypes.data, len(source), place.ctypes.data, len(place)):
        return
    del place  # the traceback would keep the memory from being freed
    read_delta(delta, *divmod(len(memory), 2))  # says why
    raise DeltaError("this is not a delta of these bytes")


def _as_bytes(of: memoryview | bytes) -> npt.NDArray[np.uint8]:
    import numpy as np

    there: npt.NDArray[Any] = np.frombuffer(of, dtype=np.uint8, count=len(of))
    return there
