"""A fixed random sample of 100 docstrings of the product: at least 85 of them are good.

Good means what a test can judge: a whole sentence with an end, more words than the name of what it describes says
already, and none of the patterns that `hack/check_english.py` names. All docstrings are held to the patterns; the
sample is there to be read, and is printed if it fails.
"""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path

import check_english

ROOT = Path(__file__).parents[3]
PACKAGES = ("operator", "worker", "client", "common")
SEED = 20261125
SAMPLE, GOOD = 100, 85
SMALL_WORDS = frozenset(
    [
        *("a", "an", "the", "of", "to", "in", "on", "for", "by", "with", "and", "or", "is", "are"),
        *("be", "it", "its", "this", "that", "return", "returns", "as", "at", "from"),
    ]
)


def docstrings() -> list[tuple[str, str, str]]:
    """Where each docstring of the product is, the name of what it describes, and its text."""
    found = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    text = ast.get_docstring(node)
                    if text is not None:
                        found.append((f"{file.relative_to(ROOT)}:{node.lineno}", node.name, text))
    return found


def draw_sample() -> list[tuple[str, str, str]]:
    """A hundred of them, by a hash of file and name, so that other docstrings that come or go change few."""

    def order(each: tuple[str, str, str]) -> bytes:
        where, name, _ = each
        return hashlib.sha256(f"{SEED} {where.partition(':')[0]} {name}".encode()).digest()

    return sorted(docstrings(), key=order)[:SAMPLE]


def words(text: str) -> set[str]:
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text.replace("_", " "))
    return {part.lower().rstrip("s") for part in parts} - SMALL_WORDS


def faults(name: str, text: str) -> list[str]:
    """What is wrong with a docstring."""
    first = text.split("\n\n")[0]
    found = []
    if not first.rstrip().endswith((".", "?", ":")):
        found.append("the first sentence has no end")
    if len(words(first) - words(name)) < 2:
        found.append("it says what the name says")
    found += check_english.find_problems("", 0, text)
    return found


def test_at_least_85_of_100_docstrings_are_good() -> None:
    poor = [
        (where, text, found) for where, name, text in draw_sample() if (found := faults(name, text))
    ]
    listed = "\n\n".join(f"{where}: {'; '.join(found)}\n{text}" for where, text, found in poor)
    assert SAMPLE - len(poor) >= GOOD, listed


def test_the_judgement_can_fail() -> None:
    assert faults("take_lock", "Take the lock.")
    assert faults("take_lock", "Whoever waits is told of it before the file is opened.")
    assert faults("take_lock", "Wait until the file of this device is locked")
    assert not faults("take_lock", "Wait until no other process holds the file of this device.")
