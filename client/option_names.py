"""Names of options that somebody misspelt: Python checks none of those that a function takes as `**options`."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def check_option_names(verb: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a name that is not known.

    Raises:
        TypeError: As Python's own for a keyword argument that does not exist; says which one is meant.
    """
    known = tuple(known)
    for name in given:
        if name not in known:
            raise TypeError(f"{verb} has no argument {name!r}{did_you_mean(name, known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return what to say behind a name that is not known: the one that is meant, or all of them."""
    known = tuple(known)
    close = get_close_matches(name, known, n=1)
    return f": do you mean {close[0]!r}?" if close else f": known are {', '.join(known)}"
