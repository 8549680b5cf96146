"""`--write` rewrites the generated sections of docs/benchmarks.md and nothing else; what is in them."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from bench.__main__ import COMMANDS
from bench.tables import PAGE, write_section
from tests.support.engine.engine_kinds import KINDS

PAGE_BY_HAND = """# Page

Written by hand, above.

<!-- begin: hf -->
## hf, old
<!-- end: hf -->

A note below hf.

<!-- begin: vllm -->
## vllm
<!-- end: vllm -->

The last word.
"""


def test_notes_by_hand_survive_and_a_new_section_comes_last(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE_BY_HAND)
    for _ in range(2):
        write_section("hf", "## hf, new\n", path)
        assert path.read_text() == PAGE_BY_HAND.replace("## hf, old", "## hf, new")
    path.write_text(PAGE_BY_HAND)
    write_section("client", "## client", path)
    section = "<!-- begin: client -->\n## client\n<!-- end: client -->\n"
    assert path.read_text() == f"{PAGE_BY_HAND}\n{section}"


@pytest.mark.parametrize(
    "broken",
    [
        "<!-- begin: hf -->\n## hf\n\nA note.\n",
        "## hf\n<!-- end: hf -->\n",
        "<!-- end: hf -->\n## hf\n<!-- begin: hf -->\n",
        "<!-- begin: hf -->\n<!-- begin: hf -->\n<!-- end: hf -->\n",
    ],
    ids=["no end", "no begin", "wrong order", "two begins"],
)
def test_broken_comments_are_refused_rather_than_losing_a_note(broken: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(broken)
    with pytest.raises(ValueError, match=r"page\.md needs one"):
        write_section("hf", "## new", path)
    assert path.read_text() == broken


def test_every_generated_section_of_the_page_belongs_to_a_command() -> None:
    lines = PAGE.read_text().splitlines()
    names = [line[len("<!-- begin: ") : -len(" -->")] for line in lines if "<!-- begin:" in line]
    assert names
    assert {name.split()[0] for name in names} <= set(COMMANDS)
    assert [line for line in lines if "<!-- end:" in line] == [f"<!-- end: {n} -->" for n in names]


def test_a_section_of_the_page_names_its_command() -> None:
    sections = re.findall(r"<!-- begin: ([^\n]+) -->\n(.*?)<!-- end", PAGE.read_text(), re.DOTALL)
    for name, text in sections:
        words = name.split()
        environ = f"ROLLOUT_ENGINES={words[1]} " if words[-1] in KINDS else ""
        assert f"\n`{environ}python -m bench {words[0]}" in text, name


def test_a_command_says_what_it_is_compared_with() -> None:
    for path in COMMANDS.values():
        tree = ast.parse(path.read_text())
        assert " against " in (ast.get_docstring(tree) or "").partition("\n")[0], path
        assert any(isinstance(n, ast.FunctionDef) and n.name == "run" for n in tree.body), path
