"""`make mutants`: let mutmut break modules, and show each change that no test notices.

    make mutants MODULES=core/gangs              the modules whose path has this
    make mutants MODULES="core/plan core/view"   several; each takes minutes

mutmut works on a copy of the tree, with the tests in the folders that bear the name of the module's. Its own
commands (`browse`, `show`, `apply`) work in that copy, which stays until the next run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("operator", "worker", "client", "common")
CACHE = Path(os.environ.get("ROLLOUT_CACHE", ROOT / ".cache"))
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "dist", "mutants")
NEEDED = ("hack", "examples", "charts", "docs", "requirements", "Makefile", "README.md")
"""What the tests read besides themselves and the sources."""


def tests_of(module: Path) -> list[str]:
    """Return the folders of tests of a module's folder, or of the nearest one above that has any; the quickest first."""
    for folder in module.parents:
        found = [f"tests/{tier}/{folder}" for tier in ("unit", "process")]
        if found := [each for each in found if (ROOT / each).is_dir()]:
            return found
    raise SystemExit(f"no folder of tests for {module}")


def settings_of(module: Path, tests: Sequence[str]) -> str:
    """Return mutmut's part of pyproject.toml for one module; a list is JSON in TOML, too."""
    lists = {
        "source_paths": [f"src/{path.name}" for path in sorted((ROOT / "src").iterdir())],
        "only_mutate": [f"src/rollout_{module}"],
        "also_copy": NEEDED,
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": ["-p", "no:cacheprovider"],
        "do_not_mutate_patterns": [r"\blogger\."],
    }
    lines = [f"{name} = {json.dumps(values)}\n" for name, values in lists.items()]
    return "\n[tool.mutmut]\n" + "".join(lines)


def break_module(module: Path, tests: Sequence[str]) -> None:
    """Run mutmut on one module and print each change that no test noticed."""
    tree = CACHE / "mutants"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT, tree, symlinks=True, ignore=NOT_COPIED)
    with (tree / "pyproject.toml").open("a") as file:
        file.write(settings_of(module, tests))
    env = {**os.environ, "PYTHONPATH": str(CACHE / "env-mutmut")}

    def call(*words: str) -> str:
        command = [sys.executable, "-m", "mutmut", *words]
        done = subprocess.run(command, cwd=tree, env=env, text=True, stdout=subprocess.PIPE)
        if done.returncode:
            raise SystemExit(f"mutmut {words[0]} failed for {module}:\n{done.stdout[-4000:]}")
        return done.stdout

    call("run", "--max-children", "2")
    results = [line.split(": ") for line in call("results", "--all", "true").splitlines()]
    outcomes = {name.strip(): outcome for name, outcome in results}
    counts = Counter(outcomes.values()).items()
    print(f"{module}: {', '.join(f'{n} {outcome}' for outcome, n in counts)}", flush=True)
    for name, outcome in outcomes.items():
        if outcome not in ("killed", "timeout"):
            print(call("show", name), flush=True)


def main() -> None:
    every = [file.relative_to(ROOT) for name in PACKAGES for file in (ROOT / name).rglob("*.py")]
    chosen = [file for file in every if any(word in str(file) for word in sys.argv[1:])]
    if not chosen:
        raise SystemExit("set MODULES to parts of paths of modules, such as core/gangs")
    for module in sorted(chosen):
        break_module(module, tests_of(module))


if __name__ == "__main__":
    main()
