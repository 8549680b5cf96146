"""The helm commands that the pages give, in the order in which a user meets them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "charts" / "rollout-operator" / "README.md",
    ROOT / "README.md",
    ROOT / "docs" / "gpu.md",
    *sorted((ROOT / "examples").rglob("README.md")),
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "gpu"),
]
_FENCED = re.compile(
    r"^(?:    |\$ )?(helm (?:install|upgrade|uninstall)\b(?:[^\n\\]|\\\n)*)", re.MULTILINE
)
_INLINE = re.compile(r"`(helm (?:install|upgrade|uninstall) [^`]+)`")


def helm_lines(page: Path) -> list[list[str]]:
    """Return each command of a page that names a chart or a release, as words behind `helm`."""
    text = page.read_text()
    found = [match for pattern in (_FENCED, _INLINE) for match in pattern.finditer(text)]
    commands = [each[1] for each in sorted(found, key=lambda match: match.start())]
    return [shlex.split(each.replace("\\\n", " "))[1:] for each in commands]


def files_of(page: Path) -> dict[str, str]:
    """Return the YAML files that a page shows, by the name in their first line."""
    blocks = re.findall(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```", page.read_text(), re.M | re.S)
    return dict(blocks)
