"""What the verbs print: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
EXIT_UNREAD = 128 + signal.SIGPIPE
"""As of a program that ends by this signal: what reads its output has ended, as `head` does."""

Report = Callable[[str], None]


class CommandFailed(Exception):
    """The command can't do what it is asked; the message is one sentence with the fix."""


def prepare_output() -> None:
    """Let stdout and stderr take any text, also where the caller has closed them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            # A terminal without Unicode has no branches of trees.
            stream.reconfigure(errors="replace")


def drop_output() -> None:
    """Send what was not written yet, and all that follows, nowhere: nobody reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())


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
