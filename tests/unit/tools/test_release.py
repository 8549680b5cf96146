"""A release has one version in all its files, and the notes of that version."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tarfile
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

import release
from release_images import write_chart_layout

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


def test_a_signed_commit_is_read_where_git_shows_signatures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str, given: str = "") -> str:
        command = ["git", "-C", str(tmp_path), *words]
        return subprocess.run(
            command, input=given, capture_output=True, text=True, check=True
        ).stdout

    program = tmp_path / "gpg"
    program.write_text("#!/bin/sh\necho 'gpg: Good signature' >&2\n")
    program.chmod(0o755)
    git("init", "--quiet")
    git("config", "log.showSignature", "true")
    git("config", "gpg.program", str(program))
    tree = git("hash-object", "-t", "tree", "-w", "--stdin").strip()
    who = "A <a@example.com> 1700000000 +0000"
    signature = "-----BEGIN PGP SIGNATURE-----\n \n x\n -----END PGP SIGNATURE-----"
    commit = f"tree {tree}\nauthor {who}\ncommitter {who}\ngpgsig {signature}\n\nSigned\n"
    revision = git("hash-object", "-t", "commit", "-w", "--stdin", given=commit).strip()
    git("update-ref", "HEAD", revision)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    found, created = release.read_commit()
    assert (found, datetime.fromisoformat(created).timestamp()) == (revision, 1700000000)


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


def test_the_layout_of_a_chart_holds_its_package(tmp_path: Path) -> None:
    package, archive = tmp_path / "c-1.2.3.tgz", tmp_path / "c.oci.tar"
    (tmp_path / "Chart.yaml").write_text("name: c\nversion: 1.2.3\napiVersion: v2\n")
    with tarfile.open(package, "w:gz") as tar:
        tar.add(tmp_path / "Chart.yaml", "c/charts/sub/Chart.yaml")
        tar.add(tmp_path / "Chart.yaml", "c/Chart.yaml")
    write_chart_layout(package, archive)
    first = archive.read_bytes()
    write_chart_layout(package, archive)
    assert archive.read_bytes() == first
    with tarfile.open(archive) as tar:
        files = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}

    def blob_of(described: dict[str, Any]) -> bytes:
        found = files["blobs/" + described["digest"].replace(":", "/")]
        assert described["digest"] == f"sha256:{hashlib.sha256(found).hexdigest()}"
        assert len(found) == described["size"]
        return found

    [entry] = json.loads(files["index.json"])["manifests"]
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": "1.2.3"}
    manifest = json.loads(blob_of(entry))
    assert json.loads(blob_of(manifest["config"]))["name"] == "c"
    [layer] = manifest["layers"]
    assert layer["mediaType"] == "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
    assert blob_of(layer) == package.read_bytes()
