"""The house of the benchmarks: every file says what it is, and none is long."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from bench import ROOT
from bench.__main__ import COMMANDS

FILES = sorted((ROOT / "bench").rglob("*.py"))
LONGEST_FUNCTION, LONGEST_MODULE = 40, 300


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_what_it_is_in_one_sentence_and_is_short(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    said = (ast.get_docstring(tree) or "").partition("\n")[0]
    assert said.endswith("."), f"the first line is no sentence: {said!r}"
    assert len(text.splitlines()) <= LONGEST_MODULE
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    long = [n.name for n in functions if (n.end_lineno or 0) - n.lineno >= LONGEST_FUNCTION]
    assert not long


def test_there_are_at_most_ten_commands() -> None:
    assert len(COMMANDS) <= 10, "give a command a parameter, or drop one"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_is_compared_with(name: str) -> None:
    tree = ast.parse(COMMANDS[name].read_text())
    said = (ast.get_docstring(tree) or "").partition("\n")[0]
    assert " against " in said
    assert any(isinstance(n, ast.FunctionDef) and n.name == "run" for n in tree.body)
