"""What a model's checkpoint says of its weights, for every engine alike: layout, dtype, hash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rollout_worker.engine import Entry, Layout
from rollout_worker.sources.files import Report, open_source, read
from rollout_worker.weights import OUTPUT_HEAD

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
COMPUTED = ("rotary_emb.inv_freq",)
"""Old checkpoints hold them; every model computes them itself."""

COMPUTE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes that a model can run in, by their names in a checkpoint."""


def layout_of(entries: Sequence[Entry], *, tied: bool = False) -> Layout:
    """Return what a version must hold: what the checkpoint holds, a tied output head or not."""
    specs = {entry.name: entry.spec for entry in entries}
    required = {name: spec for name, spec in specs.items() if not name.endswith(COMPUTED)}
    optional = {name: spec for name, spec in specs.items() if name not in required}
    embedding = next((name for name in sorted(specs) if name.endswith(EMBEDDINGS)), None)
    if not tied or embedding is None:
        return Layout(required, optional, {})
    required.pop(OUTPUT_HEAD, None)
    optional[OUTPUT_HEAD] = specs[embedding]
    return Layout(required, optional, {OUTPUT_HEAD: embedding})


def dtype_of(entries: Sequence[Entry]) -> str | None:
    """Return the dtype of most of its bytes, None if the model could run in none of theirs.

    Bytes, not tensors: a quantised checkpoint has a small float32 scale for every weight.
    """
    found: Counter[str] = Counter()
    for entry in entries:
        if entry.spec.dtype in COMPUTE_DTYPES:
            found[COMPUTE_DTYPES[entry.spec.dtype]] += entry.spec.nbytes
    return found.most_common(1)[0][0] if found else None


def hash_of(folder: Path, report: Report, cancelled: Callable[[], bool]) -> str:
    """Return the root hash of a checkpoint; blocks while it is read, which caches its pages, too.

    Raises:
        WeightsRejected: it is not whole, or not what its manifest says.
        ReadCancelled: `cancelled` said so.
    """
    return read(open_source(folder), {}, lambda _: None, report, cancelled)
