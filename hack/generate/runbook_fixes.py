"""The runbook's causes and fixes as data, which `rollout why` quotes: the page itself is not shipped."""

from __future__ import annotations

import json
import re
from pathlib import Path

_LINK = re.compile(r"\[([^\]]+)\]\(([^)]*)\)")
_CODE = re.compile(r"`([^`]+)`")
ROOT = Path(__file__).resolve().parents[2]
CAUSES, REASONS = "## What `rollout why` recognizes", "## Reasons"


def runbook_fixes(runbook: Path, status: Path) -> str:
    """Return the JSON of both tables: a meaning and a fix for each cause and for each reason."""
    found = _rows(runbook, CAUSES)
    causes = {_CODE.findall(name)[0]: _entry(runbook, *rest) for name, *rest in found}
    reasons: dict[str, dict[str, str]] = {}
    condition = ""
    for cell, names, *rest in _rows(status, REASONS):
        condition = cell or condition
        for name in _CODE.findall(names):
            reasons[f"{condition}/{name}"] = _entry(status, *rest)
    both = {"causes": causes, "reasons": _resolve_references(reasons)}
    return json.dumps(both, indent=1, ensure_ascii=False) + "\n"


def _resolve_references(reasons: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Replace 'as above' by what stands above."""
    above: dict[str, dict[str, str]] = {}
    for key, entry in reasons.items():
        name = key.partition("/")[2]
        if entry["meaning"] == "as above":
            reasons[key] = above[name]
        else:
            above[name] = entry
    return reasons


def _rows(page: Path, heading: str) -> list[list[str]]:
    after = page.read_text().partition(f"\n{heading}\n")[2]
    rows = re.split(r"^#+ ", after, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    found = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows if row[:1] == "|"]
    if len(found) < 3:
        raise SystemExit(f"{page} has no table below {heading!r}")
    return found[2:]


def _entry(page: Path, meaning: str, fix: str) -> dict[str, str]:
    no_fix = fix == "\N{EN DASH}"
    return {"meaning": _plain(page, meaning), "fix": "" if no_fix else _plain(page, fix)}


def _plain(page: Path, cell: str) -> str:
    """Return a cell of a page without Markdown; a link becomes the address that a person can look up."""

    def address(link: re.Match[str]) -> str:
        path, _, anchor = link[2].partition("#")
        where = (page.parent / path).resolve() if path else page.resolve()
        told = where.relative_to(ROOT).as_posix() + (f"#{anchor}" if anchor else "")
        return f"{link[1]} ({told})"

    return _LINK.sub(address, cell).replace("`", "")
