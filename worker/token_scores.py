"""Scores as engines hand them over: the most likely tokens at each position, and a scored prompt.

Compact, since a request has up to millions: a token and its logprob take 8 bytes, and rows become Python's
objects only when they are sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

from rollout_common.wire import PromptLogprobs, TopLogprobs, WeightsId


@dataclass(slots=True)
class TopTokens:
    """The `width` most likely tokens at each of some positions, likeliest first.

    `token_ids`, `logprobs`: flat, `width` for each position. Where fewer can be drawn the rest have logprobs that
    are not finite.
    """

    width: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))

    def __len__(self) -> int:
        return len(self.token_ids) // self.width

    def append_row(self, token_ids: Sequence[int] = (), logprobs: Sequence[float] = ()) -> None:
        """Append one position's tokens; what is missing up to `width` counts as impossible."""
        missing = self.width - len(token_ids)
        self.token_ids.extend([*token_ids, *[0] * missing])
        self.logprobs.extend([*logprobs, *[-float("inf")] * missing])

    def extend(self, other: TopTokens) -> None:
        """Append the positions of another one, of the same width."""
        assert other.width == self.width, "all rows of a request are of one width"
        self.token_ids.extend(other.token_ids)
        self.logprobs.extend(other.logprobs)

    def slice_rows(self, start: int, end: int) -> TopTokens:
        """Return positions [start, end)."""
        first, last = start * self.width, end * self.width
        return TopTokens(self.width, self.token_ids[first:last], self.logprobs[first:last])

    def to_wire(self, start: int, end: int) -> TopLogprobs:
        """Return positions [start, end) as the client gets them; impossible tokens are left out."""
        ids, values = [], []
        for row in range(start * self.width, end * self.width, self.width):
            found = self.logprobs[row : row + self.width].tolist()
            while found and not isfinite(found[-1]):
                found.pop()
            values.append(tuple(found))
            ids.append(tuple(self.token_ids[row : row + len(found)]))
        return TopLogprobs(token_ids=tuple(ids), logprobs=tuple(values))


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logprobs of a prompt's tokens from position `start` on, by one version of the weights.

    None for position 0, and for placeholders of pictures: no model draws these.
    """

    start: int
    logprobs: Sequence[float | None]
    top: TopTokens | None
    weights: WeightsId

    @classmethod
    def from_computed(
        cls,
        start: int,
        logprobs: Sequence[float],
        top: TopTokens | None,
        weights: WeightsId,
        width: int,
    ) -> PromptScores:
        """Return the scores from what an engine computes: of no token that is the first, since that follows nothing.

        `width`: of the rows of `top`; 0: none were asked for.
        """
        if start:
            return cls(start, logprobs, top, weights)
        rows = None
        if width:
            rows = TopTokens(width)
            rows.append_row()
            if top is not None:
                rows.extend(top)
        return cls(start, [None, *logprobs], rows, weights)

    def without_tokens(self, prompt: Sequence[int], hidden: Collection[int]) -> PromptScores:
        """Return these scores with None for the tokens of a prompt that have one of these ids."""
        if not hidden:
            return self
        tokens = prompt[self.start : self.start + len(self.logprobs)]
        pairs = zip(tokens, self.logprobs, strict=True)
        return replace(
            self, logprobs=[None if token in hidden else value for token, value in pairs]
        )

    @property
    def are_finite(self) -> bool:
        """Whether all logprobs are numbers; weights that are not finite give others."""
        return all(value is None or isfinite(value) for value in self.logprobs)

    def to_wire(self, begin: int, end: int) -> PromptLogprobs:
        """Return [begin, end) of its positions, counted from `start`."""
        return PromptLogprobs(
            start=self.start + begin,
            logprobs=tuple(self.logprobs[begin:end]),
            top_logprobs=None if self.top is None else self.top.to_wire(begin, end),
            weights=self.weights,
        )
