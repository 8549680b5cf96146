"""Which tensors of a version the ranks of a node read: each rank tells what it has seen, its worker asks.

A rank's word counts for exactly the tensors that it was loaded from: with one more, or another order, its loader
might read others. So long as not all ranks of the node have told of just these, all are needed.
`torch` is not needed here; `read_watch` is how a rank sees what it reads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import xxhash

from rollout_worker.engine import TensorEntry

logger = logging.getLogger(__name__)

TensorDescription = tuple[str, str, Sequence[int]]
"""Name, dtype as safetensors call it, and shape."""


def hash_tensors(tensors: Iterable[TensorDescription]) -> str:
    """Return what stands for these tensors, in this order."""
    rows = [[name, dtype, list(shape)] for name, dtype, shape in tensors]
    return xxhash.xxh3_128_hexdigest(json.dumps(rows).encode())


def note_unread(
    folder: Path, tensors: Sequence[TensorDescription], unread: Collection[str]
) -> None:
    """Let the worker of this node know which of these tensors this rank, which is this process, left alone.

    What was loaded is sound whether or not that can be written: else the next version comes whole, too.

    Args:
        folder: The gang's, of slots.
        tensors: All that it was loaded from.
        unread: The names of those on whose values nothing of the rank depends.
    """
    told = {"mark": hash_tensors(tensors), "unread": sorted(unread)}
    file = _note_path(folder, os.getpid())
    partial = file.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(told))
        partial.replace(file)
    except OSError as error:
        logger.warning("which tensors this rank reads can't be noted: %s", error)
        with contextlib.suppress(OSError):
            partial.unlink()


def unread_by_all(
    folder: Path, ranks: Collection[int], entries: Iterable[TensorEntry]
) -> frozenset[str]:
    """Return the names of those tensors that none of these ranks reads, as far as they have told.

    Args:
        folder: The gang's, of slots.
        ranks: Process ids of all ranks of this node.
        entries: What is to be loaded, in its order.
    """
    mark = hash_tensors((entry.name, entry.spec.dtype, entry.spec.shape) for entry in entries)
    found: frozenset[str] | None = None
    for rank in ranks:
        try:
            told = json.loads(_note_path(folder, rank).read_text())
            names, same = frozenset(told["unread"]), told["mark"] == mark
        except (OSError, ValueError, KeyError):  # it has not told, or nothing that can be relied on
            return frozenset()
        if not same:
            return frozenset()
        found = names if found is None else found & names
    return found or frozenset()


def _note_path(folder: Path, rank: int) -> Path:
    """Return where a rank tells; no slot has this name."""
    return folder / f"rank-{rank}.json"
