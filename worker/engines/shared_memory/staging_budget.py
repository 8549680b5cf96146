"""How much memory this process may still take: the kernel kills a process that takes more, without a message.

This module does not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from rollout_common.transfer.memory.memory_limits import LIMIT, MACHINE, MARGIN_BYTES, memory_left
from rollout_common.transfer.memory.spare_memory import SpareMemory
from rollout_worker.engine import EngineError
from rollout_worker.engines.settings import FREEING_WAIT_SECONDS
from rollout_worker.threads import BackgroundFreeing

_BOUND_FIXES = {
    LIMIT: "raise spec.resources.limits.memory (or the limit of its cgroup)",
    MACHINE: "use a machine with more, or run less on it",
}


class StagingLimitReached(EngineError):
    """`spec.weights.stagingMemory` allows no more; memory that is not charged to it need not be freed."""


class StagingBudget:
    """The memory that staged weights may take in this process: `spec.weights.stagingMemory`.

    Args:
        limit: Most bytes at once; None: what `check_memory_left` allows, which always applies.
        root: Where proc and sys are mounted.
    """

    def __init__(self, limit: int | None = None, root: Path = Path("/")) -> None:
        self._limit = limit
        self._root = root
        self._taken = 0
        self.spare = SpareMemory()
        """Counts as taken, and is dropped when its memory is needed."""
        self._lock = threading.Lock()
        self.freeing = BackgroundFreeing()
        """Frees memory of former weights; `claim_memory` waits for it."""

    def wait_until_freed(self) -> None:
        """Wait until what is given back is free, for `FREEING_WAIT_SECONDS` at most."""
        self.freeing.wait_until_freed(FREEING_WAIT_SECONDS)

    def claim_memory(self, nbytes: int, there: int = 0) -> Callable[[], None]:
        """Charge memory before it is taken; returns what gives it back, once however often it is called.

        Args:
            nbytes: How much.
            there: How much of it is in memory already, as the former spare.

        Raises:
            StagingLimitReached: names what is left of the limit, and the fix.
            EngineError: names another bound, what is left of it, and the fix.
        """
        self.wait_until_freed()
        try:
            return self._claim_once(nbytes, there, self.spare.nbytes)
        except EngineError:
            if not self.spare.nbytes:
                raise
            self.spare.drop_memory()
            return self._claim_once(nbytes, there, 0)

    def _claim_once(self, nbytes: int, there: int, spare: int) -> Callable[[], None]:
        with self._lock:
            left = nbytes if self._limit is None else self._limit - self._taken - spare
            if nbytes > left:
                raise StagingLimitReached(
                    f"no room for {nbytes} bytes of staged weights: {left} bytes are left "
                    f"of the {self._limit} that spec.weights.stagingMemory (--staging-memory) "
                    f"allows; raise it to {self._taken + nbytes} or more"
                )
            try:
                check_memory_left(max(0, nbytes - there), self._root)
            except EngineError as error:
                raise EngineError(f"{error}: spec.weights.stagingMemory gives no more") from error
            self._taken += nbytes
        charged = [nbytes]

        def give_back() -> None:
            with self._lock:
                while charged:
                    self._taken -= charged.pop()

        return give_back


def check_memory_left(nbytes: int, root: Path = Path("/")) -> None:
    """Refuse to take so many more bytes for weights if the kernel might kill the process for it.

    `root` is where proc and sys are mounted.

    Raises:
        EngineError: names the bound, what is left of it, and the fix.
    """
    left, what = memory_left(root) or (nbytes + MARGIN_BYTES, MACHINE)
    if nbytes + MARGIN_BYTES > left:
        raise EngineError(
            f"no room for {nbytes} bytes of weights in memory: {max(left, 0)} bytes are "
            f"left of {what}, and {MARGIN_BYTES} stay free; {_BOUND_FIXES[what]}"
        )
