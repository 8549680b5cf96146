"""What the verbs print: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

Report = Callable[[str], None]


class CommandFailed(Exception):
    """The command can't do what it is asked; the message is one sentence with the fix."""


def print_text(text: str) -> None:
    """Print a result; characters that would steer the terminal are replaced."""
    sys.stdout.write(make_printable(text).rstrip("\n") + "\n")
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """Print a result for programs."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
    sys.stdout.flush()


def progress_report(wanted: bool | None) -> Report:
    """Return what prints progress; None: only a terminal sees it."""
    shown = sys.stderr.isatty() if wanted is None else wanted

    def report(line: str) -> None:
        if shown:
            sys.stderr.write(make_printable(line) + "\n")
            sys.stderr.flush()

    return report


def make_printable(text: str) -> str:
    """Replace what could steer the terminal or reorder a line: messages of workers and logs may hold anything.

    Line breaks, tabs, spaces and what joins letters (Hindi, emojis) stay: an answer may be code, or in any language.
    """
    return "".join(c if _is_harmless(c) else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_harmless(character: str) -> bool:
    joiners = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
    is_kept = character in f"\n\t{joiners}" or unicodedata.category(character) == "Zs"
    return is_kept or character.isprintable()
