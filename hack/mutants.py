"""`make mutants`: let mutmut break modules, and show each change that no test notices.

    make mutants MODULES=core/gangs              the modules of mutants.toml whose path has this
    make mutants MODULES="core/plan core/view"   several; each takes minutes

mutmut works on a copy of the tree, with the tests that mutants.toml names for the module. Its own
commands (`browse`, `show`, `apply`) work in that copy, which stays until the next run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("mutants.toml")
CACHE = Path(os.environ.get("ROLLOUT_CACHE", ROOT / ".cache"))
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "dist", "mutants")
NEEDED = ("hack", "examples", "charts", "docs", "requirements", "Makefile", "README.md")
"""What the tests read besides themselves and the sources."""


def read_table() -> dict[str, list[str]]:
    table: dict[str, list[str]] = tomllib.loads(TABLE.read_text())["modules"]
    return table


def settings_of(module: str, tests: Sequence[str]) -> str:
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


def break_module(module: str, tests: Sequence[str]) -> None:
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
    table, words = read_table(), sys.argv[1:]
    chosen = [module for module in table if any(word in module for word in words)]
    if not chosen:
        raise SystemExit(f"set MODULES to parts of paths in {TABLE.name}, such as core/gangs")
    for module in chosen:
        break_module(module, table[module])


if __name__ == "__main__":
    main()
