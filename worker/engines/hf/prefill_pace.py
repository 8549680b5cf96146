"""How many tokens of prefixes a step may take in."""

from __future__ import annotations

PREFILL_SECONDS_PER_STEP = 0.1
"""What newcomers may add to a step, however short it is without them."""
LEAST, MOST = 64, 8192
_AVERAGE_WEIGHT = 0.2


class PrefillPace:
    """Limits the prefixes of a step so that it lasts about twice as long as one without.

    Neither running outputs nor a pause must wait for long prompts. `fixed`: the limit, whatever
    was measured; else it begins at `first` and is halved or doubled by what the passes took.
    """

    def __init__(self, fixed: int, first: int) -> None:
        self._fixed = fixed
        self._budget = first
        self._decode: float | None = None
        self._warm = False

    def note_pass(self, seconds: float, fed: int) -> None:
        """Learn from a pass that fed `fed` tokens of prefixes."""
        if not self._warm:  # the first pass also sets up what later ones find
            self._warm = True
        elif not fed:
            old = self._decode
            self._decode = seconds if old is None else old + _AVERAGE_WEIGHT * (seconds - old)
        else:
            alone = self._decode or 0.0
            self._adapt_budget((seconds - alone) / max(PREFILL_SECONDS_PER_STEP, alone), fed)

    def _adapt_budget(self, share: float, fed: int) -> None:
        """Follow what newcomers took, as a share of what they may take."""
        # A pass that was not full says nothing of what a full one takes, unless it was too long.
        if share > 1:
            self._budget = max(LEAST, min(self._budget, fed) // 2)
        elif share < 0.5 and fed > self._budget // 2:
            self._budget = min(MOST, self._budget * 2)

    def prefill_budget(self) -> int:
        """Return how many tokens the next step may take in, at least one."""
        return self._fixed or self._budget
