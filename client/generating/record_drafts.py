"""Replay records while they come: the experts of each token, and which tokens could be drawn."""

from __future__ import annotations

import base64

from rollout_common import wire

from .score_drafts import BadDelta


class RoutesDraft:
    """The experts of the tokens of prompt and output so far; row r is of the token at position r.

    The row at `prompt` - 1 + t was read to make token t. An attempt sends all rows of its own prompt, which has the
    tokens so far: those that are there already stay as they are.
    """

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        self._shape: wire.RoutedExperts | None = None
        self._rows = bytearray()
        self._sent = 0

    @property
    def _count(self) -> int:
        return 0 if self._shape is None else len(self._rows) // self._shape.row_bytes

    def begin_attempt(self) -> None:
        """Expect the rows of an attempt, from the prompt's first token on."""
        self._sent = 0

    def append_rows(self, part: wire.RoutedExperts) -> None:
        """Append what an attempt sent; raise BadDelta if it does not follow what is there."""
        shape = self._shape = self._shape or part
        same = (part.layers, part.top_k, part.dtype) == (shape.layers, shape.top_k, shape.dtype)
        if not same or part.start != self._sent:
            raise BadDelta(f"routes of position {part.start}, expected {self._sent}")
        try:
            data = part.to_bytes()
        except ValueError as error:
            raise BadDelta(str(error)) from None
        known = max(0, self._count - self._sent)
        self._rows += data[known * shape.row_bytes :]
        self._sent += part.rows

    def check_tokens(self, tokens: int) -> None:
        """Raise BadDelta unless there is a row for each token that was read to make `tokens` of them."""
        if tokens and self._count != self._prompt - 1 + tokens:
            raise BadDelta(f"{self._count} routes for {self._prompt} + {tokens} tokens")

    def truncate(self, tokens: int) -> None:
        """Keep what was read to make this many tokens."""
        if self._shape is not None:
            kept = self._prompt - 1 + tokens if tokens else 0
            del self._rows[kept * self._shape.row_bytes :]

    def to_wire(self, start: int, end: int) -> wire.RoutedExperts | None:
        """Return the rows that belong to tokens [start, end), with those of the prompt before the first one."""
        if self._shape is None or end == start:
            return None
        first = self._prompt - 1 + start if start else 0
        last, size = self._prompt - 1 + end, self._shape.row_bytes
        data = base64.b64encode(self._rows[first * size : last * size]).decode()
        changes = {"start": first, "rows": last - first, "data": data}
        return self._shape.model_copy(update=changes)


class MasksDraft:
    """Which tokens could be drawn for each token of an output so far."""

    def __init__(self) -> None:
        self._vocab: int | None = None
        self._counts: list[int] = []
        self._rows: list[bytes] = []

    def append_rows(self, part: wire.SamplingMask | None, tokens: int) -> None:
        """Append what an attempt sent for this many tokens; raise BadDelta if there is not a row for each."""
        if tokens and (part is None or len(part.counts) != tokens):
            raise BadDelta(f"{0 if part is None else len(part.counts)} masks for {tokens} tokens")
        if part is None:
            return
        if self._vocab not in (None, part.vocab_size):
            raise BadDelta("the vocabulary changed in the middle of an output")
        try:
            self._rows += part.to_rows()
        except ValueError as error:
            raise BadDelta(str(error)) from None
        self._vocab = part.vocab_size
        self._counts += part.counts

    def truncate(self, tokens: int) -> None:
        """Keep the rows of this many tokens."""
        del self._counts[tokens:], self._rows[tokens:]

    def to_wire(self, start: int, end: int) -> wire.SamplingMask | None:
        """Return the rows of tokens [start, end); None without a token."""
        if self._vocab is None:
            return None
        data = base64.b64encode(b"".join(self._rows[start:end])).decode()
        counts = tuple(self._counts[start:end])
        return wire.SamplingMask(vocab_size=self._vocab, counts=counts, data=data)
