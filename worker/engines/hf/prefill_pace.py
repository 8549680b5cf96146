"""How many tokens of prefixes a step takes in."""

from __future__ import annotations

from .settings import PREFILL_SECONDS_PER_STEP

LEAST_PREFILL, MOST_PREFILL = 64, 8192
"""Bounds of the tokens of prefixes in a step, however slow or fast the device."""
_AVERAGE_WEIGHT = 0.2


class PrefillPace:
    """Limits the prefixes in a step so that it lasts about twice as long as one without.

    Neither running outputs nor a pause must wait for long prompts. `fixed`: the limit if it is not 0; else the limit
    begins at `first` and is halved or doubled by how long the passes take.
    """

    def __init__(self, fixed: int, first: int) -> None:
        self._fixed = fixed
        self._budget = first
        self._decode: float | None = None
        self._warm = False

    def note_pass(self, seconds: float, fed: int) -> None:
        """Learn from a pass that fed `fed` tokens of prefixes."""
        if not self._warm:  # the first pass also does work that later ones find done
            self._warm = True
        elif not fed:
            old = self._decode
            self._decode = seconds if old is None else old + _AVERAGE_WEIGHT * (seconds - old)
        else:
            alone = self._decode or 0.0
            share = (seconds - alone) / max(PREFILL_SECONDS_PER_STEP, alone)
            # A short pass with few tokens says nothing about one with many; a long one does.
            if share > 1:
                self._budget = max(LEAST_PREFILL, min(self._budget, fed) // 2)
            elif share < 0.5 and fed > self._budget // 2:
                self._budget = min(MOST_PREFILL, self._budget * 2)

    def prefill_budget(self) -> int:
        """Return how many tokens of prefixes the next step may take in, at least one."""
        return self._fixed or self._budget
