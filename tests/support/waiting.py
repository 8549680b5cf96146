"""Waiting in tests, always with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], seconds: float = 10.0, *, what: str = "") -> None:
    """Return once the condition holds, or fail after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:g} s for {what or 'a condition'} in vain")
        await asyncio.sleep(0.01)


def until_sync(condition: Callable[[], object], seconds: float = 10.0, *, what: str = "") -> None:
    """As `until`, for tests without a loop."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:g} s for {what or 'a condition'} in vain")
        time.sleep(0.05)
