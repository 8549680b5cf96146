"""Manifests in the pages of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[2] / "docs"


def manifests_of(page: str) -> list[dict[str, Any]]:
    """Return the documents of all blocks of YAML of a page."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    return [document for block in blocks for document in yaml.safe_load_all(block)]
