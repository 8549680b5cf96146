"""When an output ends: EOS, stop ids, stop strings, length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout_worker.engines.fitting import stop_ids
from rollout_worker.schemas import SamplingParams, StopMatch, StopReason

Verdict = tuple[StopReason, StopMatch | None]
Decode = Callable[[Sequence[int]], str]

OPEN = 3
"""A character that lacks bytes has at most 3 of its 4, hence lies in the last 3 tokens."""
MAX_OPEN = 16
"""Tokens after which text that never becomes whole is taken as it is."""
BROKEN = "\ufffd"
"""What bytes decode to that are no character, or none yet."""


class TextTail:
    """Decodes an output token by token, keeping just as much text as a stop string needs."""

    def __init__(self, decode: Decode, keep: int) -> None:
        self._decode = decode
        self._keep = keep
        self._context: list[int] = []  # its text is out already; spacing depends on it
        self._fresh: list[int] = []
        self._text = ""
        self._seen = 0  # characters from the start of the text that were returned before

    def push(self, token: int) -> tuple[str, int]:
        """Add a token; return the kept text with what it completed, and where that begins."""
        self._fresh.append(token)
        before = len(self._decode(self._context))
        after = self._decode(self._context + self._fresh)
        whole = not after.endswith(BROKEN)
        # A half character at the end may become a whole one: it is not shown before.
        text = self._text + after[before:].rstrip(BROKEN if not whole else "")
        begin, self._seen = self._seen, max(self._seen, len(text))
        cut = len(self._fresh) if whole else self._settled(after)
        if cut:
            self._forget(cut, self._decode(self._context + self._fresh[:cut])[before:])
        return text, begin

    def _settled(self, after: str) -> int:
        """Return how many fresh tokens no later one can add to, given the text with all of them."""
        last = len(self._fresh) - OPEN
        for cut in range(last, 0, -1):
            # Elsewhere a cut would go through a character.
            if after.startswith(self._decode(self._context + self._fresh[:cut])):
                return cut
        return last if len(self._fresh) >= MAX_OPEN else 0

    def _forget(self, cut: int, shown: str) -> None:
        self._context, self._fresh = self._fresh[:cut], self._fresh[cut:]
        text = self._text + shown
        self._text = text[-self._keep :] if self._keep else ""
        self._seen = max(0, self._seen - (len(text) - len(self._text)))


class StopChecker:
    """Looks at each token of one output; nothing of the first `min_tokens` ends it."""

    def __init__(
        self, sampling: SamplingParams, eos: frozenset[int], decode: Decode | None
    ) -> None:
        self._ids = stop_ids(sampling, eos)
        self._strings = sampling.stop
        self._min, self._max = sampling.min_tokens, sampling.max_tokens
        longest = max((len(text) for text in self._strings), default=0)
        # All but the newest character of the longest string may stand in the text kept.
        self._tail = TextTail(decode, longest - 1) if decode and self._strings else None

    def check(self, token: int, produced: int) -> Verdict | None:
        """Return why the output ends with `token`, its `produced`-th, or None if it goes on."""
        text = self._completed(token)
        if produced > self._min:
            if token in self._ids:
                return StopReason.STOP, StopMatch(token_id=token)
            if text is not None:
                return StopReason.STOP, StopMatch(text=text)
        if self._max is not None and produced >= self._max:
            return StopReason.LENGTH, None
        return None

    def _completed(self, token: int) -> str | None:
        """Return the stop string that this token completes, the one that begins first."""
        if self._tail is None:
            return None
        text, fresh = self._tail.push(token)
        hits = [
            (at, stop)
            for stop in self._strings
            # What ends before the fresh text was completed by an earlier token.
            if (at := text.find(stop, max(0, fresh - len(stop) + 1))) >= 0
        ]
        return min(hits, key=lambda hit: hit[0])[1] if hits else None
