"""Every file of the benchmarks says what it is, and none is long."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))

from bench import ROOT
from bench.__main__ import COMMANDS

LONGEST_FUNCTION, LONGEST_MODULE = 40, 300


def test_a_file_says_what_it_is_in_one_sentence_and_is_short() -> None:
    for path in (ROOT / "bench").rglob("*.py"):
        text = path.read_text()
        tree = ast.parse(text)
        said = (ast.get_docstring(tree) or "").partition("\n")[0]
        assert said.endswith("."), f"{path}: the first line is no sentence: {said!r}"
        assert len(text.splitlines()) <= LONGEST_MODULE, path
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < LONGEST_FUNCTION, node.name


def test_a_command_says_what_it_is_compared_with() -> None:
    for path in COMMANDS.values():
        tree = ast.parse(path.read_text())
        assert " against " in (ast.get_docstring(tree) or "").partition("\n")[0], path
        assert any(isinstance(n, ast.FunctionDef) and n.name == "run" for n in tree.body), path
