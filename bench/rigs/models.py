"""The models: the tests' tiny one, and one of the shape of Qwen2 0.5B with random weights."""

from __future__ import annotations

from pathlib import Path

from tests.support.engine import tinymodels
from tests.support.engine.engine_kinds import CACHE
from tests.support.engine.tinymodels import TinyModels

TINY = TinyModels(CACHE / "models")


def half_billion(seed: int, dtype: str) -> Path:
    """Return a complete model folder, which takes some tens of seconds to make the first time."""
    return tinymodels.half_billion(CACHE / "models", seed, dtype)
