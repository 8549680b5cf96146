"""What images that are built here are made of, and what they get of this machine's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

import buildah
import images


def test_settings_of_pip_reach_a_build_with_all_their_values() -> None:
    listed = (
        ":env:.retries='7'\n"
        "global.extra-index-url='\\nhttps://a.example/simple\\nhttps://b.example/simple?x=1'\n"
        "global.retries='3'\n"
    )
    assert buildah.read_settings(listed) == {
        "extra-index-url": "https://a.example/simple https://b.example/simple?x=1",
        "retries": "7",
    }


def test_what_a_build_does_not_see_makes_no_image_outdated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "REPOSITORY", tmp_path)
    folder = tmp_path / "common" / "transfer"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "delta.c").write_text("int one;")
    before = images._inputs(images.IMAGES[0])
    (folder / "libdelta.so").touch()
    (folder / "__pycache__" / "delta.pyc").touch()
    assert images._inputs(images.IMAGES[0]) == before
    (folder / "delta.c").write_text("int two;")
    assert images._inputs(images.IMAGES[0]) != before
