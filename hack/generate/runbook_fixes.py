"""The runbook's causes and fixes as data, which `rollout why` quotes: the page itself is not shipped."""

from __future__ import annotations

import json
import re
from pathlib import Path

_LINK = re.compile(r"\[([^\]]+)\]\(([^)]*)\)")
_CODE = re.compile(r"`([^`]+)`")
CAUSES, REASONS = "## What `rollout why` recognizes", "## Reasons"


def runbook_fixes(page: Path) -> str:
    """Return the JSON of both tables: a meaning and a fix for each cause and for each reason."""
    text = page.read_text()
    causes = {_CODE.findall(name)[0]: _entry(*rest) for name, *rest in _rows(text, CAUSES)}
    reasons: dict[str, dict[str, str]] = {}
    condition = ""
    for cell, names, *rest in _rows(text, REASONS):
        condition = cell or condition
        for name in _CODE.findall(names):
            reasons[f"{condition}/{name}"] = _entry(*rest)
    found = {"causes": causes, "reasons": _resolve_references(reasons)}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


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


def _rows(text: str, heading: str) -> list[list[str]]:
    after = text.partition(f"\n{heading}\n")[2]
    rows = re.split(r"^#+ ", after, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    found = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows if row[:1] == "|"]
    if len(found) < 3:
        raise SystemExit(f"docs/runbook.md has no table below {heading!r}")
    return found[2:]


def _entry(meaning: str, fix: str) -> dict[str, str]:
    return {"meaning": _plain(meaning), "fix": "" if fix == "\N{EN DASH}" else _plain(fix)}


def _plain(cell: str) -> str:
    """Return a cell without Markdown; a link becomes the address that a person can look up."""

    def address(link: re.Match[str]) -> str:
        where = link[2]
        return f"{link[1]} (docs/{'runbook.md' if where[:1] == '#' else ''}{where})"

    return _LINK.sub(address, cell).replace("`", "")
