"""What differs between two versions of the same bytes: found, written down, and written into memory.

`vectors` tells the format. It is also how numpy does both, which is what there is on a plain checkout; wheels and
images bring `native`, code of our own that makes the same deltas, gives the same verdicts and takes a half
to a third of the time. Which one it is: `WAY`, in the log of every worker that starts.
"""

from __future__ import annotations

from . import native, vectors
from .vectors import BLOCK_BYTES, BLOCK_WORDS, DeltaError

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_WORDS",
    "SPAN_BYTES",
    "WAY",
    "WORTH",
    "DeltaError",
    "apply",
    "encode",
]

SPAN_BYTES = 8 << 20
"""What one delta of a transfer covers: enough for numpy to be fast, little enough to stay in a cache."""
WORTH = 0.08
"""Most bytes of a delta for a byte that it covers: 4 % of the words. With more, numpy takes longer to find and apply
them than loopback to send all bytes. Native code would gain up to three times as many; but neither end knows
what the other one has, and a step of training changes 1 %."""

WAY = "native code" if native.LIBRARY is not None else "numpy"
"""Who finds and applies deltas in this process."""


def encode(
    base: memoryview | bytes, new: memoryview | bytes, most: float | None = None
) -> bytes | None:
    """Return what turns one run of bytes into another one.

    Args:
        base: The bytes as they are there.
        new: The bytes as they shall be, as many.
        most: How large it may be, as a share of the bytes; None: however large.

    Returns:
        The delta; None: it would be larger.

    Raises:
        ValueError: They have different sizes.
    """
    if native.LIBRARY is None:
        return vectors.encode(base, new, most)
    return native.encode(native.LIBRARY, base, new, most)


def apply(delta: memoryview | bytes, memory: memoryview) -> None:
    """Write a delta into the bytes that it was made for; all of it, or nothing.

    Args:
        delta: As `encode` returned it, in memory that nobody writes meanwhile.
        memory: [bytes] the base, writable, or what has the new values in part.

    Raises:
        DeltaError: It is none, or of other bytes.
    """
    if native.LIBRARY is None:
        vectors.apply(delta, memory)
    else:
        native.apply(native.LIBRARY, delta, memory)
