"""Pages of memory on all NUMA nodes of a machine in turn.

Memory that one thread fills lies on that thread's node. The GPUs of the other nodes would all read it over the link
between the nodes. Standard library only.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path

INTERLEAVE = 3
"""MPOL_INTERLEAVE."""

MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}
"""The system call mbind, for which the C library has no function."""

WORD_BITS = 64


def interleave_pages(mapped: mmap.mmap, root: Path = Path("/")) -> bool:
    """Have the pages that a mapping gets from now on lie on all nodes in turn.

    Return whether they will: not on a machine with one node, nor where the container may not ask for it (CAP_SYS_NICE,
    under the usual seccomp profile).

    Args:
        mapped: Writable. If it is shared, the policy is that of its file, for all processes.
        root: Where sys is mounted.
    """
    nodes = _read_nodes(root)
    number = MBIND_NUMBERS.get(platform.machine())
    if len(nodes) < 2 or number is None:
        return False
    words = (ctypes.c_uint64 * (max(nodes) // WORD_BITS + 1))()
    for node in nodes:
        words[node // WORD_BITS] |= 1 << node % WORD_BITS
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    size, bits = ctypes.c_size_t(len(mapped)), ctypes.c_ulong(len(words) * WORD_BITS + 1)
    call = ctypes.CDLL(None).syscall
    failed = call(number, ctypes.c_void_p(address), size, INTERLEAVE, words, bits, 0)
    return not failed


def _read_nodes(root: Path) -> list[int]:
    """Return the numbers of the nodes that have memory; Linux writes them as in 0-1,4."""
    try:
        text = (root / "sys/devices/system/node/has_memory").read_text().strip()
        pairs = [part.partition("-")[::2] for part in text.split(",") if part]
        return [node for low, high in pairs for node in range(int(low), int(high or low) + 1)]
    except (OSError, ValueError):
        return []
