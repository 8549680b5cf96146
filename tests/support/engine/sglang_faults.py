"""Faults of SGLang's updates, which its own processes are given when they import what updates a model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
HOOK = f"""
import importlib.abc, importlib.machinery, sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != {UPDATER!r}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def changed(module):
            execute(module)
            change(module)

        spec.loader.exec_module = changed
        return spec


sys.meta_path.insert(0, Finder())
"""


def write_fault(folder: Path, fault: str, patch: pytest.MonkeyPatch) -> None:
    """Have processes that start from now on call `change`, which `fault` defines, with the module of SGLang."""
    (folder / "sitecustomize.py").write_text(HOOK + fault)
    patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
