"""The pictures of panels in the docs: each is of a panel that exists, small, and on the page."""

from __future__ import annotations

import re
from pathlib import Path

from dashboards.pictures import wanted_panels
from tests.support.charts import ROOT

PAGE = ROOT / "docs" / "operate" / "metrics.md"
LARGEST = 150 * 1024
ALL = 1024 * 1024


def test_pictures_in_the_docs_are_of_panels_and_small() -> None:
    panels = {Path(each["file"]).name for each in wanted_panels(Path("out"), None)}
    shown = re.findall(r"!\[(.+)\]\(dashboards/(.+\.png)\)", PAGE.read_text())
    kept = {path.name: path.stat().st_size for path in (PAGE.parent / "dashboards").iterdir()}
    assert {name for _, name in shown} == set(kept)
    assert set(kept) <= panels
    assert max(kept.values()) < LARGEST
    assert sum(kept.values()) < ALL


def test_a_part_of_a_title_chooses_panels() -> None:
    found = [Path(each["file"]).name for each in wanted_panels(Path("out"), "kv-cache")]
    assert found == ["rollout-pools-kv-cache-in-use.png"]
