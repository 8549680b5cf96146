"""Import whatever the worker and its adapter of one engine import: imports.py ENGINE."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from told import tell


def imported(file: Path, package: str) -> Iterator[tuple[str, str]]:
    """Yield module and name, "" for the module itself, of each import, those in functions, too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*above, *filter(None, [module])])
            yield from ((module, alias.name) for alias in node.names)


def of_worker(engine: str) -> set[tuple[str, str]]:
    """Return every import of the worker's modules but those of other engines."""
    import rollout_common
    import rollout_worker

    roots = [Path(str(package.__file__)).parent for package in (rollout_common, rollout_worker)]
    found: set[tuple[str, str]] = set()
    for file in (file for root in roots for file in root.rglob("*.py")):
        top = next(root.parent for root in roots if file.is_relative_to(root))
        parts = file.relative_to(top).with_suffix("").parts
        elsewhere = parts[1] == "engines" and len(parts) > 3 and parts[2] != engine
        if elsewhere:
            continue
        module = ".".join(parts)
        package = (
            module.removesuffix(".__init__") if parts[-1] == "__init__" else ".".join(parts[:-1])
        )
        if parts[-1] != "__main__":
            found.add((module.removesuffix(".__init__"), ""))
        found.update(imported(file, package))
    return found


def failure(module: str, name: str) -> str | None:
    """Import one; returns what went wrong."""
    try:
        found = importlib.import_module(module)
        if name and name != "*" and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except BaseException as error:  # noqa: BLE001 - whatever a library raises, SystemExit, too
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


def main(engine: str) -> None:
    wanted = sorted(pair for pair in of_worker(engine) if pair[0] != "__future__")
    failed = {f"{m}:{n}".rstrip(":"): why for m, n in wanted if (why := failure(m, n))}
    foreign = {m.partition(".")[0] for m, _ in wanted} - sys.stdlib_module_names
    tell({"imports": len(wanted), "packages": sorted(foreign), "failed": failed})


if __name__ == "__main__":
    main(sys.argv[1])
