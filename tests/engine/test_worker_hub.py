"""A model named by its repository: resolved by the hub's own library, here from a filled cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rollout_worker.engine import EngineError
from rollout_worker.sources.model_hub import local_model_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds `org/tiny` at one commit, as a download leaves it."""
    from huggingface_hub import constants

    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_repository_is_found(cached: Path, revision: str | None) -> None:
    assert local_model_folder("org/tiny", revision) == cached


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert local_model_folder(str(tmp_path), None) == tmp_path


def test_a_missing_repository_says_what_to_check(cached: Path) -> None:
    shutil.rmtree(cached)
    with pytest.raises(EngineError, match="check the name, the revision"):
        local_model_folder("org/other", None)
