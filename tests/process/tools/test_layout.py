"""Where things lie, and what no file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = {
    "rollout_operator": "operator",
    "rollout_worker": "worker",
    "rollout_client": "client",
    "rollout_common": "common",
}
FOLDERS = (
    *("operator", "worker", "client", "common", "src", "charts/rollout-operator", "hack/cluster"),
    *("bench", "examples", "docs/decisions", "requirements", ".ci"),
    *(
        f"tests/{tier}"
        for tier in ("unit", "api", "chart", "engine", "contract", "cluster", "scale")
    ),
)
# In pieces, so that this file does not hold what it looks for.
REGISTRIES = [
    ".".join(parts)
    for parts in (
        *(("pypi", "org"), ("pythonhosted", "org"), ("docker", "io"), ("ghcr", "io")),
        *(("quay", "io"), ("gcr", "io"), ("registry", "k8s", "io"), ("registry", "npmjs", "org")),
        *(("proxy", "golang", "org"), ("sum", "golang", "org"), ("crates", "io")),
        *(("conda", "anaconda", "org"), ("deb", "debian", "org"), ("artifacthub", "io")),
    )
]
MACHINE = re.compile(r"(?<![\w.$}{/-])/(?:work|root|home/\w+|Users/\w+)/")


@cache
def tracked() -> tuple[Path, ...]:
    """Every file that git knows or would take, links left out."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    paths = (ROOT / name for name in names.split("\0") if name)
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())


@cache
def texts() -> dict[Path, str]:
    """The content of all of them that hold text."""
    found = {}
    for path in tracked():
        with suppress(UnicodeDecodeError):
            found[path] = path.read_text()
    return found


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path, text in texts().items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_folder_named_operator_is_a_package() -> None:
    assert not [p for p in tracked() if p.name == "__init__.py" and p.parent.name == "operator"]
    assert not (ROOT / "operator" / "__init__.py").exists()


@pytest.mark.parametrize(("name", "folder"), PACKAGES.items())
def test_sources_are_links_to_the_real_folders(name: str, folder: str) -> None:
    link = ROOT / "src" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize(
    "program",
    ["import collections", "import operator; operator.add; assert operator.__file__ is not None"],
)
def test_the_standard_library_wins_at_the_root(program: str) -> None:
    code = f"import sys; sys.path.insert(0, ''); {program}"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True, timeout=60)


def test_no_module_of_the_operator_bears_a_standard_name() -> None:
    names = {path.stem for path in (ROOT / "operator").rglob("*.py")} - {"__main__"}
    assert not names & set(sys.stdlib_module_names)


def test_what_the_operator_imports_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["operator"]]
    declared = {re.split(r"[^\w-]", line)[0].lower().replace("-", "_") for line in lines}
    found = set()
    for path in (ROOT / "operator").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(str(node.module).partition(".")[0])
    theirs = {name for name in found - sys.stdlib_module_names if name not in PACKAGES}
    assert {"pyyaml" if name == "yaml" else name for name in theirs} <= declared


def test_nothing_imports_the_entry_point_of_kopf() -> None:
    assert not lines_with(re.compile(r"^\s*(from|import) rollout_operator(\.| import )handlers"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_folders_of_the_contract_exist(folder: str) -> None:
    # Git keeps no empty folder: what counts is what a clone has.
    assert (ROOT / folder).is_dir()
    assert any((ROOT / folder) in path.parents for path in tracked()) or folder == "src"


def test_no_file_names_a_package_registry() -> None:
    hosts = "|".join(re.escape(host) for host in REGISTRIES)
    assert not lines_with(re.compile(rf"(?<![\w.-])(?:[\w-]+\.)*(?:{hosts})(?![\w-])"))


def test_no_file_names_a_path_of_a_developers_machine() -> None:
    assert not lines_with(MACHINE)


def test_every_module_that_tests_share_has_a_line() -> None:
    folder = ROOT / "tests" / "support"
    listed = set(
        re.findall(r"^\| `(\w+\.py)` \|", (folder / "README.md").read_text(), re.MULTILINE)
    )
    ours = {path.name for path in folder.rglob("*.py") if path.parent.name != "rayable"}
    assert listed == ours


def test_nothing_is_mocked() -> None:
    modules = r"unittest\.mock|mock|pytest_mock"
    assert not lines_with(
        re.compile(rf"^\s*(from|import) ({modules})\b|^\s*from unittest import .*\bmock\b")
    )


def test_pins_carry_hashes_and_no_address() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        text = path.read_text()
        assert "://" not in text, path.name
        # Constraints and overrides go into resolving, nothing is installed by them.
        if not path.stem.endswith(("constraints", "-overrides")):
            assert "--hash=sha256:" in text, path.name
