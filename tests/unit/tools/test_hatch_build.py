"""The hook that compiles for a build: what it can't do, numpy does.

hatchling is installed where something is built, not here: its interface is as little as the hook needs.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LIBRARY = b"a library"


class Interface:
    """As much of hatchling's as is asked for; it is the hook's `app`, too."""

    def __init__(self, root: Path) -> None:
        self.root, self.app = str(root), self
        self.warned: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warned.append(text)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    plugin = ModuleType("interface")
    plugin.BuildHookInterface = Interface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", plugin)
    monkeypatch.delitem(sys.modules, "hatch_build", raising=False)
    module = importlib.import_module("hatch_build")
    monkeypatch.delitem(sys.modules, "hatch_build")

    def compiled(source: Path, library: Path) -> str:
        library.write_bytes(LIBRARY)
        return "linux"

    monkeypatch.setattr(module, "compiled", compiled)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return module.NativeHook(tmp_path)


def build(hook: Any, version: str) -> dict[str, Any]:
    """Do what hatchling does; returns what goes into the wheel."""
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize(version, data)
    hook.finalize(version, data, "")
    assert not list(Path(tempfile.gettempdir()).iterdir())
    return data


def test_an_editable_install_has_the_library_beside_its_source(hook: Any) -> None:
    folder = Path(hook.root, "common", "transfer")
    folder.mkdir(parents=True)
    assert build(hook, "editable") == {"force_include": {}}
    assert [(each.name, each.read_bytes()) for each in folder.iterdir()] == [
        ("libdelta.so", LIBRARY)
    ]
    assert not hook.warned


def test_an_editable_install_of_what_nobody_can_write_goes_without(hook: Any) -> None:
    Path(hook.root, "common").write_text("a file, since root may write in any folder")
    assert build(hook, "editable") == {"force_include": {}}
    (warned,) = hook.warned
    assert warned.startswith("common/transfer/delta.c is left out, and numpy does its work: ")


def test_a_wheel_has_the_library_and_is_of_this_platform(hook: Any) -> None:
    data = build(hook, "standard")
    assert data["tag"] == "py3-none-linux"
    assert list(data["force_include"].values()) == ["rollout_common/transfer/libdelta.so"]
