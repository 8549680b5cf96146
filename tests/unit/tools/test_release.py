"""A release has one version in all its files, and the notes of that version."""

from __future__ import annotations

import hashlib
import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import yaml

import release

LOG = "# Changelog\n\n## Unreleased\n\n### Added\n\n- New.\n\n## 0.1.0 - 2026-01-01\n\n- Old.\n"


def copy_files(root: Path) -> None:
    for name in ("pyproject.toml", "charts/rollout-operator/Chart.yaml", "CHANGELOG.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(release.ROOT / name, root / name)


def test_every_image_in_pages_has_the_version_that_is_built() -> None:
    version = release.read_version()
    named = [
        tag
        for pattern in release.PAGES
        for path in release.ROOT.glob(pattern)
        for tag in re.findall(r"rollout-(?:operator|worker-[a-z-]+):(\d[\w.]*)", path.read_text())
    ]
    assert len(named) > 20
    assert set(named) == {version}


def test_a_cut_changes_all_versions_together(tmp_path: Path) -> None:
    copy_files(tmp_path)
    (tmp_path / "README.md").write_text(
        f"rollout-operator:{release.read_version(tmp_path)} and 1{release.read_version(tmp_path)}\n"
    )
    for path, text in release.cut_version("7.8.9", tmp_path, "2026-02-03").items():
        path.write_text(text)
    assert (tmp_path / "README.md").read_text().startswith("rollout-operator:7.8.9 and 1")
    assert "7.8.9" not in (tmp_path / "README.md").read_text().partition(" and ")[2]
    assert release.read_version(tmp_path) == "7.8.9"
    log = (tmp_path / "CHANGELOG.md").read_text()
    assert "## Unreleased\n\n## 7.8.9 - 2026-02-03\n" in log
    with pytest.raises(SystemExit, match=r"none of 7\.8\.9 yet"):
        release.cut_version("7.8.9", tmp_path, "2026-02-03")
    with pytest.raises(SystemExit, match=r"give a version as 1\.2\.3"):
        release.cut_version("v7.9", tmp_path, "2026-02-03")


def test_a_chart_of_another_version_is_refused(tmp_path: Path) -> None:
    copy_files(tmp_path)
    chart = tmp_path / release.CHART / "Chart.yaml"
    chart.write_text(re.sub("appVersion: .*", 'appVersion: "0.0.1"', chart.read_text()))
    with pytest.raises(SystemExit, match=r"appVersion is 0\.0\.1"):
        release.read_version(tmp_path)


def test_a_tag_names_the_version() -> None:
    for tags in ("", "nightly\n", "v1.2.3\n", "v1.2.2\nv1.2.3\n"):
        release.check_tag("1.2.3", tags)
    with pytest.raises(SystemExit, match=r"the tag v1\.2\.4 is not of version 1\.2\.3"):
        release.check_tag("1.2.3", "v1.2.4\n")


def test_the_commit_of_a_release_is_the_one_that_is_checked_out() -> None:
    if not (release.ROOT / ".git").exists():
        pytest.skip("not a checkout")
    revision, created = release.read_commit()
    assert re.fullmatch(r"[0-9a-f]{40}", revision)
    assert datetime.fromisoformat(created).tzinfo is not None


def test_notes_are_the_section_of_the_version() -> None:
    cut = release.cut_changelog(LOG, "0.2.0", "2026-02-03")
    assert release.extract_notes(LOG, "0.2.0") == release.extract_notes(cut, "0.2.0")
    notes = release.extract_notes(cut, "0.2.0")
    assert notes.startswith("# rollout-operator 0.2.0\n")
    assert "- New." in notes
    assert "- Old." not in notes
    assert "- Old." in release.extract_notes(cut, "0.1.0")
    with pytest.raises(SystemExit, match=r"neither 0\.3\.0 nor Unreleased"):
        release.extract_notes(cut, "0.3.0")


def test_sums_are_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    release.write_sums(tmp_path)
    release.write_sums(tmp_path)
    assert (tmp_path / "SHA256SUMS").read_text() == f"{hashlib.sha256(b'a').hexdigest()}  a.txt\n"


def test_the_workflow_builds_targets_of_the_dockerfile() -> None:
    workflow = yaml.safe_load((release.ROOT / ".github/workflows/release.yaml").read_text())
    stages = re.findall(r"^FROM \S+ AS (\S+)", (release.ROOT / "Dockerfile").read_text(), re.M)
    for each in workflow["jobs"]["images"]["strategy"]["matrix"]["include"]:
        assert each["target"] in stages
        assert each["image"] == f"rollout-{each['target']}"
