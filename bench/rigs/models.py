"""The models: the tests' tiny one, and one of the shape of Qwen2 0.5B with random weights."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from engine_kinds import CACHE
from tinymodels import TinyModels, script

TINY = TinyModels(CACHE / "models")
HALF_BILLION = {
    "vocab": 151936,
    "hidden": 896,
    "intermediate": 4864,
    "layers": 24,
    "heads": 14,
    "kv_heads": 2,
    "max_length": 4096,
}


def half_billion(seed: int, dtype: str) -> Path:
    """Return a complete model folder; in float32 it takes 2 GB on disk.

    It is made once, which takes some tens of seconds.
    """
    folder: Path = CACHE / "models" / f"qwen2-0.5b-shape-{dtype}-s{seed}"
    if not folder.exists():
        maker = script()
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
        try:
            maker.make_model(partial, seed, maker.Shape(dtype=dtype, std=0.02, **HALF_BILLION))
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder
