"""How many tokens of prefixes a step may take in."""

from __future__ import annotations

STEP_SECONDS = 0.1
"""What newcomers may take of a step when nothing else is known of its length."""
LEAST, MOST = 16, 8192
_WEIGHT = 0.2


class Pace:
    """Limits the prefixes of a step so that it lasts about twice as long as one without.

    Neither running outputs nor a pause must wait for long prompts. `fixed`: the limit, whatever
    was measured; else `first` until something was.
    """

    def __init__(self, fixed: int, first: int) -> None:
        self._fixed = fixed
        self._first = first
        self._decode: float | None = None
        self._per_token: float | None = None

    def note(self, seconds: float, singles: int, fed: int) -> None:
        """Learn from a pass that took `singles` rows a token on and fed `fed` tokens of prefixes."""
        if not fed:
            self._decode = _mixed(self._decode, seconds)
        else:
            self._per_token = _mixed(self._per_token, seconds / (singles + fed))

    def budget(self) -> int:
        """Return how many tokens the next step may take in, at least one."""
        if self._fixed:
            return self._fixed
        if self._per_token is None:
            return self._first
        seconds = max(STEP_SECONDS, self._decode or 0.0)
        return max(LEAST, min(MOST, int(seconds / self._per_token)))


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
