"""docs/benchmarks.md: the generated sections are rewritten, everything else is left alone."""

from __future__ import annotations

from pathlib import Path

from bench import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"


def write(name: str, section: str, path: Path = PAGE) -> None:
    path.write_text(merged(path.read_text() if path.exists() else "", name, section))


def merged(page: str, name: str, section: str) -> str:
    """Return the page with the section of this name replaced, or appended if it has none.

    Only what stands between the section's two comments is replaced: notes before and after stay.

    Raises:
        ValueError: one of the two comments is missing or doubled, so it is unclear what is
            generated and what was written by hand.
    """
    begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"
    block = f"{begin}{section.strip()}\n{end}"
    counts = page.count(begin), page.count(end)
    if counts == (0, 0):
        return f"{page.rstrip()}\n\n{block}" if page.strip() else block
    head, _, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if counts != (1, 1) or not closed:
        raise ValueError(
            f"the page needs exactly one {begin.strip()!r} and one {end.strip()!r} after it: "
            "mend it by hand, else a note could be lost"
        )
    return head + block + tail
