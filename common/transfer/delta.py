"""What differs between two versions of the same bytes: finds it, encodes it, and applies it to memory.

`delta_words` describes the format and implements both directions with numpy, which a plain checkout uses. Wheels and
images contain `delta_native`, C code that makes the same deltas, raises the same errors and takes a half to a third of the
time. `WAY` says which one this process uses; every worker logs it at its start.
"""

from __future__ import annotations

from . import delta_native, delta_words
from .delta_words import BLOCK_BYTES, BLOCK_WORDS, DeltaError

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_WORDS",
    "WAY",
    "WORTH",
    "DeltaError",
    "apply_delta",
    "encode_delta",
]

WORTH = 0.08
"""Most bytes of a delta for each byte that it covers: 4 % of the words. With more, numpy takes longer to find and
apply them than loopback takes to send all bytes. Native code would gain up to three times as many, but neither end
knows what the other one has, and a training step changes 1 %."""

WAY = "native code" if delta_native.LIBRARY is not None else "numpy"
"""What finds and applies deltas in this process."""


def encode_delta(
    base: memoryview | bytes, new: memoryview | bytes, most: float | None = None
) -> bytes | None:
    """Return what turns one run of bytes into another one.

    Args:
        base: The bytes of the base.
        new: The new bytes, of the same size.
        most: How large the delta may be, as a share of the bytes; None: any size.

    Returns:
        The delta; None: it would be larger.

    Raises:
        ValueError: They have different sizes.
    """
    if delta_native.LIBRARY is None:
        return delta_words.encode_words(base, new, most)
    return delta_native.encode_natively(delta_native.LIBRARY, base, new, most)


def apply_delta(delta: memoryview | bytes, memory: memoryview) -> None:
    """Apply a delta to the bytes that it was made for: all of it, or nothing.

    Args:
        delta: As `encode_delta` returned it, in memory that no thread writes during the call.
        memory: [bytes] the base, writable; some runs may have the new values already.

    Raises:
        DeltaError: It is not a delta, or was made for other bytes.
    """
    if delta_native.LIBRARY is None:
        delta_words.apply_words(delta, memory)
    else:
        delta_native.apply_natively(delta_native.LIBRARY, delta, memory)
