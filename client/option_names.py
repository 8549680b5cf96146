"""Checks the names of `**options`, which Python does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the name that is meant, or all of them."""
    known = tuple(known)
    close = get_close_matches(name, known, n=1)
    return f": do you mean {close[0]!r}?" if close else f": known are {', '.join(known)}"


def check_option_names(
    verb: str,
    given: Iterable[str],
    known: Iterable[str],
    fix: Callable[[str, Iterable[str]], str] = did_you_mean,
) -> None:
    """Raise TypeError, as Python does for other arguments, at a name that is not known."""
    known = tuple(known)
    for name in given:
        if name not in known:
            raise TypeError(f"{verb} has no argument {name!r}{fix(name, known)}")
