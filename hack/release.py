"""Makes a release: wheel, sdist, chart, images, bill of materials, notes and SHA256SUMS, in dist/release.

    make release                                  # of the version that the files have
    python hack/release.py cut 0.2.0 --dry-run    # which files the next version changes
    python hack/release.py cut 0.2.0              # change them; then run pytest tests/chart/test_chart_render.py
                                                  # --update-goldens, commit and tag v0.2.0

On a tagged commit the tag must name the version. Images of the engines are not made here: they are built from the Dockerfile.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent / "cluster"))

from buildah import BASE, Store
from localkube import debian, preflight
from localkube.home import ClusterError, cache, exclusive

ROOT = Path(__file__).resolve().parents[1]
CHART = Path("charts/rollout-operator")
PAGES = ("pyproject.toml", "charts/rollout-operator/Chart.yaml", "README.md", "docs/*.md",
         "examples/*/*.yaml", "tests/chart/test_chart_install.py", "tests/chart/goldens/*.yaml")  # fmt: skip
"""Where the version stands; decisions and the changelog keep those of their time."""
COMMAND_SECONDS = 600
"""For one command; the slowest installs the operator's requirements from an empty cache."""
_LABEL = "org.opencontainers.image"


def read_version(root: Path = ROOT) -> str:
    """Return the version of the package.

    Raises:
        SystemExit: The chart has another one.
    """
    version = str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    chart = yaml.safe_load((root / CHART / "Chart.yaml").read_text())
    for field in ("version", "appVersion"):
        if chart[field] != version:
            raise SystemExit(f"Chart.yaml: {field} is {chart[field]}, pyproject.toml has {version}")
    return version


def check_tag(version: str, tags: str) -> None:
    """Refuse a commit whose release tags (`v1.2.3`, one a line) name another version."""
    found = [tag for tag in tags.split() if re.fullmatch(r"v\d+\.\d+\.\d+\S*", tag)]
    if found and f"v{version}" not in found:
        raise SystemExit(f"the tag {found[0]} is not of version {version}: run release.py cut")


def read_commit() -> tuple[str, str]:
    """Return the hash of the commit and its time."""
    # Not `git show` or `git log`, which print signatures, too, where a user's settings ask for that.
    shown = _run(
        "git", "rev-list", "--no-commit-header", "--max-count=1", "--format=%H %cI", "HEAD"
    )
    revision, created = shown.split()
    return revision, created


def cut_changelog(text: str, version: str, date: str) -> str:
    """Return the changelog with what is unreleased under the version."""
    heading = "## Unreleased\n"
    if heading not in text or f"## {version} " in text:
        raise SystemExit(f"CHANGELOG.md: it needs a section Unreleased, and none of {version} yet")
    return text.replace(heading, f"{heading}\n## {version} - {date}\n", 1)


def extract_notes(text: str, version: str) -> str:
    """Return the changelog's section of a version; Unreleased if it has not been cut yet."""
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    named = {section.split()[0]: section.partition("\n")[2].strip() for section in sections}
    notes = named.get(version) or named.get("Unreleased")
    if not notes:
        raise SystemExit(f"CHANGELOG.md: neither {version} nor Unreleased has an entry")
    return f"# rollout-operator {version}\n\n{notes}\n"


def cut_version(new: str, root: Path, date: str) -> dict[Path, str]:
    """Return the files that a new version changes, with their new content."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", new):
        raise SystemExit(f"{new}: give a version as 1.2.3")
    old = re.compile(rf"(?<![\d.]){re.escape(read_version(root))}(?![\d.])")
    paths = sorted({path for pattern in PAGES for path in root.glob(pattern)})
    changed = {
        path: old.sub(new, path.read_text()) for path in paths if old.search(path.read_text())
    }
    log = root / "CHANGELOG.md"
    return changed | {log: cut_changelog(log.read_text(), new, date)}


def write_sums(folder: Path) -> None:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.name != "SHA256SUMS"
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


def build_release(uv: str, helm: str, out: Path, images: Sequence[str] = ()) -> None:
    version = read_version()
    check_tag(version, _run("git", "tag", "--points-at", "HEAD"))
    notes = extract_notes((ROOT / "CHANGELOG.md").read_text(), version)
    shutil.rmtree(out, ignore_errors=True)
    _run(uv, "build", "--quiet", "--python", sys.executable, "--out-dir", str(out))
    (out / ".gitignore").unlink(missing_ok=True)
    _run(helm, "package", str(CHART), "--destination", str(out))
    (out / "notes.md").write_text(notes)
    _write_materials(uv, out, version)
    revision, created = read_commit()
    for target in images:
        build_image(target, version, revision, created, out)
    write_sums(out)
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path.relative_to(ROOT)}")
    print("not made here: images of other targets; build them as the Dockerfile's first lines say")


def _write_materials(uv: str, out: Path, version: str) -> None:
    """Write what the operator's image installs, as CycloneDX JSON."""
    with tempfile.TemporaryDirectory() as folder:
        # Two environments: the tool must not be in its own list.
        for name in ("operator", "sbom"):
            python = f"{folder}/{name}/bin/python"
            _run(uv, "venv", "--quiet", "--python", sys.executable, f"{folder}/{name}")
            install = (uv, "pip", "install", "--quiet", "--no-deps", "--python", python)
            _run(*install, "--require-hashes", "-r", f"requirements/{name}.txt")
            if name == "operator":
                # By name: a path of this machine would stand in the list.
                _run(
                    *install, "--no-index", "--find-links", str(out), f"rollout-operator=={version}"
                )
        _run(f"{folder}/sbom/bin/cyclonedx-py", "environment", "--output-reproducible",
             "-o", str(out / f"rollout-operator-{version}.cdx.json"), f"{folder}/operator/bin/python")  # fmt: skip


def build_image(target: str, version: str, revision: str, created: str, out: Path) -> Path:
    """Build a target of the Dockerfile and write its OCI archive (root).

    `revision`: the commit; `created`: its time, which the image has, too.
    Its base is the Debian of the local cluster's images; the workflow of releases has the Dockerfile's own.
    """
    preflight.root("building images")
    debian.ensure(debian.IMAGE_PACKAGES)
    name = f"rollout-{target}"
    archive, reference = out / f"{name}-{version}-image.oci.tar", f"{name}:{version}"
    labels = {
        f"{_LABEL}.title": name,
        f"{_LABEL}.version": version,
        f"{_LABEL}.revision": revision,
        f"{_LABEL}.created": created,
        f"{_LABEL}.licenses": "Apache-2.0",
        f"{_LABEL}.base.name": BASE,
    }
    seconds = int(datetime.fromisoformat(created).timestamp())
    words = [f"--label={label}={value}" for label, value in labels.items()]
    with exclusive("images"):
        store = Store(cache() / "buildah")
        store.build(target, f"localhost/{reference}", {})
        # Of cached layers, a build would keep the labels and the time of the build before.
        container = store.ask("from", f"localhost/{reference}").strip()
        try:
            store.do("config", *words, container)
            stamped = ("commit", "--quiet", "--timestamp", str(seconds), container)
            store.do(*stamped, f"localhost/{reference}")
        finally:
            store.do("rm", container)
        store.do("push", "--quiet", f"localhost/{reference}", f"oci-archive:{archive}:{reference}")
    return archive


def _run(*command: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    if done.returncode:
        raise SystemExit(f"{Path(command[0]).name} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build", help="make everything")
    build.add_argument("--uv", required=True, help="path of uv")
    build.add_argument("--helm", required=True, help="path of helm")
    build.add_argument(
        "--images", nargs="*", default=[], metavar="TARGET",
        help="targets of the Dockerfile whose images are made, too (root)",
    )  # fmt: skip
    cut = verbs.add_parser("cut", help="give the files a new version")
    cut.add_argument("version")
    cut.add_argument("--dry-run", action="store_true", help="only list the files")
    arguments = parser.parse_args()
    if arguments.verb == "build":
        try:
            build_release(arguments.uv, arguments.helm, ROOT / "dist" / "release", arguments.images)
        except ClusterError as error:
            raise SystemExit(f"images: {error}") from None
        return None
    today = datetime.now(UTC).date().isoformat()
    for path, text in cut_version(arguments.version, ROOT, today).items():
        print(path.relative_to(ROOT))
        if not arguments.dry_run:
            path.write_text(text)
    return None


if __name__ == "__main__":
    main()
