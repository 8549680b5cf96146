"""What to do about each reason of a condition, from the runbook's table: `rollout why` shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path

RUNBOOK = Path(__file__).resolve().parents[2] / "docs" / "runbook.md"
NOTHING = "\N{EN DASH}"


def fixes_text() -> str:
    """Return JSON: by condition and status, by reason, what it means and what to do."""
    rows = RUNBOOK.read_text().partition("\n## Reasons\n")[2].partition("\nThe readiness gate")[0]
    found: dict[str, dict[str, dict[str, str]]] = {}
    known: dict[str, dict[str, str]] = {}
    condition = ""
    for line in rows.splitlines():
        cells = [cell.strip() for cell in line[1:-1].split(" | ")]
        if not line.startswith("| ") or cells[0] == "condition":
            continue
        condition = cells[0] or condition
        for reason in re.findall(r"`(\w+)`", cells[1]):
            entry = {"means": plain_text(cells[2]), "fix": plain_text(cells[3])}
            if cells[2] == "as above":
                entry = known[reason]
            known.setdefault(reason, entry)
            found.setdefault(condition, {})[reason] = entry
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def plain_text(cell: str) -> str:
    """Return a cell without its links: those into the runbook name the section, others their page."""
    if cell == NOTHING:
        return ""
    cell = re.sub(r"\[([^]]+)\]\(#([^)]+)\)", r"\1 (docs/runbook.md#\2)", cell)
    return re.sub(r"\[([^]]+)\]\(([^)]+)\)", r"\1 (docs/\2)", cell)
