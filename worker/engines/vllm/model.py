"""What the checkpoint's files say that vLLM needs no part in: their dtype, layout and hash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollout_worker import weights
from rollout_worker.engine import StageProgress
from rollout_worker.sources.files import open_source

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
COMPUTED = ("rotary_emb.inv_freq",)
"""Old checkpoints hold them; every model computes them itself."""


def dtype_of(folder: Path) -> str:
    """Return the dtype of the checkpoint; vLLM's own choice would round float32 to bfloat16."""
    kinds = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    found = [kinds[e.spec.dtype] for e in open_source(folder).entries if e.spec.dtype in kinds]
    return max(found, key=found.count) if found else "auto"


def layout_of(folder: Path, *, tied: bool) -> weights.Layout:
    """Return what a version of this model must hold: what its checkpoint holds."""
    specs = {entry.name: entry.spec for entry in open_source(folder).entries}
    required = {name: spec for name, spec in specs.items() if not name.endswith(COMPUTED)}
    optional = {name: spec for name, spec in specs.items() if name not in required}
    head = weights.OUTPUT_HEAD
    embedding = next((name for name in sorted(specs) if name.endswith(EMBEDDINGS)), None)
    if not tied or embedding is None:
        return weights.Layout(required, optional, {})
    required.pop(head, None)
    return weights.Layout(required, {**optional, head: specs[embedding]}, {head: embedding})


def hash_of(folder: Path, progress: StageProgress, cancelled: Callable[[], bool]) -> str:
    """Return the root hash of the checkpoint; blocks while it is read."""
    source = open_source(folder)
    everything = weights.Layout({e.name: e.spec for e in source.entries}, {}, {})
    return weights.read(source, everything, lambda _: None, progress, cancelled)
