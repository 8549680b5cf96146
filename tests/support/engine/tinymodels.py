"""Real models of random weights, made once from seeds by `hack/tinymodel.py` and kept in `.cache`."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from rollout_common.wire.root_hash import TREE_SCHEME
from tests.support.engine.engine_kinds import CACHE, ROOT

SCRIPT = ROOT / "hack" / "tinymodel.py"
HALF_BILLION = {
    "vocab": 151936,
    "hidden": 896,
    "intermediate": 4864,
    "layers": 24,
    "heads": 14,
    "kv_heads": 2,
    "max_length": 4096,
}


def script() -> ModuleType:
    """Load the script as a module."""
    spec = importlib.util.spec_from_file_location("tinymodel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class TinyModels:
    """Folders of models by seed; a change of the script, or of how manifests hash, makes new ones."""

    def __init__(self, home: Path) -> None:
        made_by = SCRIPT.read_bytes() + TREE_SCHEME.encode()
        self.home = home / hashlib.sha256(made_by).hexdigest()[:12]

    def model(self, seed: int) -> Path:
        """Return a whole model folder: weights, tokenizer, generation_config."""
        return self._made("model", seed)

    def weights(self, seed: int) -> Path:
        """Return a version folder: the weights of that seed and their manifest."""
        return self._made("weights", seed)

    def _made(self, kind: str, seed: int) -> Path:
        folder = self.home / f"{kind}-s{seed}"
        _once(folder, lambda partial: getattr(script(), f"make_{kind}")(partial, seed))
        return folder


def half_billion(home: Path, seed: int, dtype: str) -> Path:
    """Return a whole model folder of the shape of Qwen2 0.5B; in float32 it takes 2 GB on disk.

    Making it takes some tens of seconds.
    """

    def make(partial: Path) -> None:
        maker = script()
        maker.make_model(partial, seed, maker.Shape(dtype=dtype, std=0.05, **HALF_BILLION))

    folder = home / f"qwen2-0.5b-shape-{dtype}-s{seed}"
    _once(folder, make)
    return folder


def many_experts(home: Path, seed: int, dtype: str) -> Path:
    """Return a whole model folder of a mixture of 128 experts in two layers, of 780 tensors."""

    def make(partial: Path) -> None:
        maker = script()
        shape = maker.Shape(hidden=256, intermediate=128, tied=False, experts=128, dtype=dtype)
        maker.make_model(partial, seed, shape)

    folder = home / f"qwen3-moe-128-{dtype}-s{seed}"
    _once(folder, make)
    return folder


def _once(folder: Path, make: Callable[[Path], object]) -> None:
    """Make a folder unless it is there: wholly or not at all, whoever makes it meanwhile."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    try:
        make(partial)
        partial.chmod(0o755)
        with suppress(OSError):  # another process was quicker
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_models() -> TinyModels:
    return TinyModels(CACHE / "models")
