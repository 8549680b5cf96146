"""Tiny real models for tests, made once from seeds by `hack/tinymodel.py` and kept in `.cache`."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "hack" / "tinymodel.py"


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
    """Folders of models by seed; a change of the script makes new ones."""

    def __init__(self, home: Path) -> None:
        self.home = home / hashlib.sha256(SCRIPT.read_bytes()).hexdigest()[:12]

    def model(self, seed: int) -> Path:
        """Return a whole model folder: weights, tokenizer, generation_config."""
        return self._made("model", seed)

    def weights(self, seed: int) -> Path:
        """Return a version folder: the weights of that seed and their manifest."""
        return self._made("weights", seed)

    def _made(self, kind: str, seed: int) -> Path:
        folder = self.home / f"{kind}-s{seed}"
        if not folder.exists():
            self.home.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=self.home, prefix=".making-"))
            getattr(script(), f"make_{kind}")(partial, seed)
            partial.chmod(0o755)
            try:
                partial.rename(folder)
            except OSError:  # another test process was quicker
                shutil.rmtree(partial)
        return folder


@pytest.fixture(scope="session")
def tiny_models() -> TinyModels:
    return TinyModels(ROOT / ".cache" / "models")
