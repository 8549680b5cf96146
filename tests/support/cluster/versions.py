"""Versions of weights on the volume that the workers of a cluster test see."""

from __future__ import annotations

import os
import shutil
from itertools import count

import rollout_local


class Volume:
    """Folders of weights on the volume that the workers see, one for each version."""

    def __init__(self, prefix: str) -> None:
        self._root = rollout_local.make_models() / "weights"
        self._prefix = prefix
        self._numbers = count(1)

    def reserve(self) -> str:
        """A path that nobody used; nothing is there."""
        return f"{self._prefix}-{next(self._numbers)}"

    def publish(self, seed: str, path: str | None = None) -> str:
        """Put the bytes of `weights/<seed>` at a path; readers see the whole folder or none."""
        path = path or self.reserve()
        half = self._root / f".{path}"
        half.mkdir()
        for file in (self._root / seed).iterdir():
            os.link(file, half / file.name)
        half.rename(self._root / path)
        return path

    def cut_off(self, path: str) -> None:
        """Leave half of the file, as a publisher does that died."""
        file = self._root / path / "model.safetensors"
        half = file.read_bytes()[: file.stat().st_size // 2]
        file.unlink()  # it is a link: the others keep their bytes
        file.write_bytes(half)

    def remove(self, path: str) -> None:
        """Take a version away."""
        shutil.rmtree(self._root / path)

    def clean(self) -> None:
        """Remove all versions of this prefix, also those of a test run that was killed."""
        for folder in (
            *self._root.glob(f"{self._prefix}-*"),
            *self._root.glob(f".{self._prefix}-*"),
        ):
            shutil.rmtree(folder)
