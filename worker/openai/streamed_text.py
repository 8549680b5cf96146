"""The text of an output as its ids arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout_worker.engines.request_checks import (
    INCOMPLETE_TOKENS,
    MAX_INCOMPLETE_TOKENS,
    REPLACEMENT_CHARACTER,
)

from .answer_reading import begun_length


class StreamedText:
    """An output's text as its ids arrive; holds back partial characters and partial stop strings.

    The text ends before the first of `stops` that a token after the first `min_tokens` completes, as in the engines.
    With `special` it shows special tokens, too.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int], bool], str],
        stops: Sequence[str] = (),
        *,
        special: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decode = decode
        self._special = special
        self._stops = stops
        self._min = min_tokens
        self._ids: list[int] = []
        # The ids of this range are decoded again with each new id: what a tokenizer writes for an id depends on the
        # ids before it, and the text is known up to the range's end.
        self._from = self._upto = 0
        self._held = ""
        self._spared = 0  # held characters of the first `min_tokens`
        self._over = False

    def push_ids(self, ids: Sequence[int]) -> str:
        """Add new ids; returns the text that is now certain."""
        early = self._min - len(self._ids)
        if 0 < early < len(ids):
            return self.push_ids(ids[:early]) + self.push_ids(ids[early:])
        self._ids += ids
        known = self._decode(self._ids[self._from : self._upto], self._special)
        text = self._decode(self._ids[self._from :], self._special)
        if early > 0:
            whole = text.rstrip(REPLACEMENT_CHARACTER)
            self._spared = len(self._held) + max(0, len(whole) - len(known))
        upto = len(self._ids)
        if text.endswith(REPLACEMENT_CHARACTER):  # the rest of a character comes with the next ids
            if upto - self._upto < MAX_INCOMPLETE_TOKENS:
                return ""
            upto, text = self._settled_text(text)
        self._from, self._upto = self._upto, upto
        return self._certain_text(text[len(known) :])

    def _settled_text(self, text: str) -> tuple[int, str]:
        """Return how many ids later ones can't change, and the text up to there."""
        last = len(self._ids) - INCOMPLETE_TOKENS
        for upto in range(last, last - INCOMPLETE_TOKENS - 1, -1):
            settled = self._decode(self._ids[self._from : upto], self._special)
            if text.startswith(settled):  # else a character has ids on both sides
                return upto, settled
        return last, self._decode(self._ids[self._from : last], self._special)

    def take_rest(self) -> str:
        """Return the rest of the text."""
        known = self._decode(self._ids[self._from : self._upto], self._special)
        self._held += self._decode(self._ids[self._from :], self._special)[len(known) :]
        text, self._held = self._cut_at_stop(self._held), ""
        return text

    def _certain_text(self, text: str) -> str:
        self._held += text
        text = self._cut_at_stop(self._held)
        keep = 0 if self._over else begun_length(text, self._stops)
        self._held = text[len(text) - keep :]
        self._spared = max(0, self._spared - (len(text) - keep))
        return text[: len(text) - keep]

    def _cut_at_stop(self, text: str) -> str:
        if self._over:
            return ""
        found = [
            at
            for stop in self._stops
            if (at := text.find(stop, max(0, self._spared - len(stop) + 1))) >= 0
        ]
        self._over = bool(found)
        return text[: min(found)] if found else text
