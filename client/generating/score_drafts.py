"""Scores while they come, frame by frame: those of a prompt, and the most likely tokens at each position."""

from __future__ import annotations

from rollout_common import wire


class BadDelta(ValueError):
    """A worker sent tokens, logprobs and spans that do not fit together."""


class PromptDraft:
    """The scores of a prompt's positions [start, end) so far, frame by frame; all by the same weights."""

    def __init__(self, scored: tuple[int, int] | None) -> None:
        self._scored = scored
        self._frames: list[wire.PromptLogprobs] = []
        self._end = scored[0] if scored else 0

    @property
    def is_whole(self) -> bool:
        """Whether everything that was asked for is there."""
        return self._scored is None or self._end == self._scored[1]

    def append_frame(self, frame: wire.PromptLogprobs) -> None:
        """Append what an attempt sent; raise BadDelta if it does not follow what is there."""
        end = frame.start + len(frame.logprobs)
        if self._scored is None or frame.start != self._end or end > self._scored[1]:
            raise BadDelta(f"scores of positions {frame.start} to {end}, expected {self._end}")
        if self._frames and frame.weights != self._frames[0].weights:
            raise BadDelta("a prompt was scored by two versions of the weights")
        check_rows(frame.top_logprobs, len(frame.logprobs))
        self._frames.append(frame)
        self._end = end

    def clear_frames(self) -> None:
        """Drop all scores: the prompt is scored again."""
        self._frames.clear()
        self._end = self._scored[0] if self._scored else 0

    def to_prompt(self) -> wire.PromptLogprobs | None:
        """Return the whole; None if it was not asked for, or is not there."""
        if not (self._frames and self.is_whole):
            return None
        first, rows = self._frames[0], TopRows()
        for frame in self._frames:
            rows.extend(frame.top_logprobs)
        return wire.PromptLogprobs(
            start=first.start,
            logprobs=tuple(value for frame in self._frames for value in frame.logprobs),
            top_logprobs=rows.to_wire() if first.top_logprobs is not None else None,
            weights=first.weights,
        )


def check_rows(top: wire.TopLogprobs | None, count: int) -> None:
    """Raise BadDelta unless there is a row for each position."""
    if top is not None and not len(top.token_ids) == len(top.logprobs) == count:
        raise BadDelta(f"{len(top.logprobs)} rows of top_logprobs for {count} tokens")


class TopRows:
    """The most likely tokens at each position: rows of ids, and rows of logprobs."""

    def __init__(self) -> None:
        self.token_ids: list[tuple[int, ...]] = []
        self.logprobs: list[tuple[float, ...]] = []

    def extend(self, top: wire.TopLogprobs | None) -> None:
        """Append the rows of a frame."""
        if top is not None:
            self.token_ids.extend(top.token_ids)
            self.logprobs.extend(top.logprobs)

    def truncate(self, length: int) -> None:
        """Drop the rows from this position on."""
        del self.token_ids[length:], self.logprobs[length:]

    def to_wire(self, start: int = 0, end: int | None = None) -> wire.TopLogprobs:
        """Return the rows [start, end)."""
        return wire.TopLogprobs(
            token_ids=tuple(self.token_ids[start:end]), logprobs=tuple(self.logprobs[start:end])
        )
