"""The mutation run: which changes it makes, and which it leaves alone."""

from __future__ import annotations

import pytest

from mutants.__main__ import table
from mutants.edits import compiles, edits_of
from mutants.trials import ROOT


def lines(source: str) -> set[str]:
    found = {edit.apply(source).strip() for edit in edits_of(source)}
    return {mutant for mutant in found if compiles(mutant)}


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("a < b", {"a <= b", "a >= b", "pass"}),
        ("x = a and b", {"x = a or b", "x = (a)", "x = (b)"}),
        ("x = [p for p in q if p.owned]", {"x = [p for p in q if True]",
                                          "x = [p for p in q if not (p.owned)]"}),
        ("x = f(a, b=c)", {"x = f(a)"}),
        ("x = g.create_task(a, name=b)", set()),
        ("x = {'é': 1, 'b': c}", {"x = {'b': c}", "x = {'é': 1}", "x = {'é': 2, 'b': c}"}),
        ("x = a - b", {"x = a + b", "x = (a)", "x = (b)"}),
        ("x = a if b else c", {"x = (a)", "x = (c)"}),
        ("x = not a", {"x = (a)"}),
        ("a.b = c", {"pass"}),
        ("f()", {"pass"}),
        ("x = 0.0", {"x = 1.0"}),
        ("def f() -> int:\n    return a", {"def f() -> int:\n    return None"}),
        ("if a:\n    b()", {"if not (a):\n    b()", "if a:\n    pass"}),
    ],
)  # fmt: skip
def test_each_change_is_made(source: str, mutants: set[str]) -> None:
    assert lines(source) == mutants


@pytest.mark.parametrize(
    "source",
    ["logger.info('a', extra=b)", "assert a == 1", '"""Text."""', "x = f'{a or b}'", "x: A = b",
     "import a", "Both = One | Other", "x = 'text'",
     "Level = Literal[1, 2]", "if a < b:\n    logger.info('a')"],
)  # fmt: skip
def test_wording_logs_and_types_are_left_alone(source: str) -> None:
    assert lines(source) == set()


def test_the_table_names_files_that_exist() -> None:
    for module in table().values():
        assert (ROOT / module.path).is_file()
        for test in module.tests:
            assert (ROOT / test).is_file(), test


def test_what_counts_as_equivalent_can_still_be_made() -> None:
    """Else the line has changed, and the reason given for it speaks of nothing."""
    for module in table().values():
        stale = module.equivalent - {line for line, _ in module.changes()}
        assert not stale, f"{module.path}: {stale}"
