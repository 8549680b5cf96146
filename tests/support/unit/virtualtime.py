"""An event loop whose time jumps to whatever comes next: hours of waiting in milliseconds.

For code that asks the loop, or a clock it is given, for the time, and waits for nothing outside.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumps(selectors.SelectSelector):
    """Does not wait: the time that it was to wait has passed."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("nothing will ever happen in this loop")
        self.passed += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Seconds since the start."""
        return self._jumps.passed


def run(scene: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function, which is given the clock, in such a loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        return runner.run(scene(loop.time))


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine function in such a loop."""

    @functools.wraps(test)
    def runs(*args: Any, **kwargs: Any) -> None:
        run(lambda clock: test(*args, **kwargs))

    return runs


def loop_time() -> float:
    """Seconds by the running loop: a clock for objects that are made before it runs."""
    return asyncio.get_running_loop().time()
