"""Manifests and code in the pages of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[2] / "docs"


def manifests_of(page: str) -> list[dict[str, Any]]:
    """Return the documents of all blocks of YAML of a page."""
    blocks = code_blocks(page, "yaml")
    return [document for block in blocks for document in yaml.safe_load_all(block)]


def code_blocks(page: str, language: str = "python") -> list[str]:
    """Return the blocks of a page in this language."""
    found = re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert found, f"{page} has no {language}"
    return found


def run_code(page: str, names: dict[str, Any]) -> None:
    """Run the Python blocks of a page, with these variables."""
    for block in code_blocks(page):
        exec(compile(block, page, "exec"), names)
