"""Waiting in tests, always with a deadline and a word on what was seen last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    what: str,
    look: Callable[[], T],
    seconds: float = 30.0,
    every: float = 0.1,
    *,
    seen: Callable[[], object] | None = None,
) -> T:
    """Return the first truthy answer of `look`.

    Args:
        what: is waited for, in a few words.
        look: asks.
        seconds: until it fails.
        every: so many seconds it asks.
        seen: tells the state of what is waited for when it fails, beside the last answer.
    """
    end = time.monotonic() + seconds
    while True:
        answer = look()
        if answer:
            return answer
        if time.monotonic() > end:
            state = "" if seen is None else f"; seen: {seen()}"
            raise AssertionError(
                f"not within {seconds:g} s: {what}; last answer: {answer!r}{state}"
            )
        time.sleep(every)


def until_sync(condition: Callable[[], object], seconds: float = 10.0, *, what: str = "") -> None:
    """As `eventually`, for a condition that says nothing."""
    eventually(what or "a condition", condition, seconds, 0.05)


async def until(condition: Callable[[], object], seconds: float = 10.0, *, what: str = "") -> None:
    """As `until_sync`, and other tasks of this loop go on meanwhile."""
    end = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > end:
            what = what or "a condition"
            raise AssertionError(f"not within {seconds:g} s: {what}; last answer: {answer!r}")
        await asyncio.sleep(0.01)
