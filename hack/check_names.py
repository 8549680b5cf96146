"""Check the names of the product: `make lint` runs it.

A name in a traceback, a profile or a `grep` should tell a stranger which file it is in and what it does. So a
function's name has a verb and its object, a class has a name of its own, a module, too, a folder can be read as a list, and
a duration stands with its reason in the settings of its package.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("operator", "worker", "client", "common")
SHARED_MODULES = {"__init__", "__main__", "errors", "settings", "metrics", "options"}
"""Names of modules that any package may have."""
MOST_MODULES = 15
"""Modules in one folder: a longer list is no longer read, and its parts are a folder of their own."""
MIN_WORDS = 1.7
"""Words a function's name has on average; those of kopf, httpx and starlette have 1.7 to 1.8."""


def python_files(*packages: str) -> list[Path]:
    return [file for name in packages for file in sorted((ROOT / name).rglob("*.py"))]


def check_words(package: str) -> Iterator[str]:
    """Report a package whose functions' names are too short on average."""
    names = [
        node.name
        for file in python_files(package)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("__")  # which the language gives
    ]
    mean = sum(len(name.strip("_").split("_")) for name in names) / len(names)
    print(f"{package}: {len(names)} functions, {mean:.2f} words a name")
    if mean < MIN_WORDS:
        yield (
            f"{package}: function names have {mean:.2f} words on average, want {MIN_WORDS}: "
            "give verbs their object (`take_lock`, not `take`)"
        )


def check_folders() -> Iterator[str]:
    """Report every folder with too many modules."""
    counts = Counter(file.parent for file in python_files(*PACKAGES) if file.stem != "__init__")
    for folder, count in sorted(counts.items()):
        if count > MOST_MODULES:
            yield (
                f"{folder.relative_to(ROOT)} has {count} modules, at most {MOST_MODULES} are read as a list: "
                "move those that belong together to a folder of their own"
            )


def check_repeats() -> Iterator[str]:
    """Report every name that several classes or modules have."""
    places = defaultdict(list)
    for file in python_files(*PACKAGES):
        where = file.relative_to(ROOT)
        if file.stem not in SHARED_MODULES:
            places["module", file.stem].append(str(where))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places["class", node.name].append(f"{where}:{node.lineno}")
    for (kind, name), found in sorted(places.items()):
        if len(found) > 1:
            yield f"{kind} {name!r} is defined {len(found)} times: {', '.join(found)}; rename all but one"


def check_durations() -> Iterator[str]:
    """Report every duration that is a constant outside the settings of its package."""
    for file in python_files(*PACKAGES):
        if file.stem == "settings":
            continue
        for node in ast.parse(file.read_text()).body:
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            for target in targets:
                if isinstance(target, ast.Name) and target.id.endswith("_SECONDS"):
                    yield (
                        f"{file.relative_to(ROOT)}:{node.lineno}: move {target.id} to the settings "
                        "module of its package, with its reason"
                    )


def main() -> int:
    """Print what is wrong; the exit status says whether anything is."""
    problems = [
        *(problem for package in PACKAGES for problem in check_words(package)),
        *check_repeats(),
        *check_folders(),
        *check_durations(),
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    return min(len(problems), 1)


if __name__ == "__main__":
    sys.exit(main())
