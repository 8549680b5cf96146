"""Fit the ids of a turn after ids that are already there.

The text that a template adds is tokenized alone, and the boundary is checked: a tokenizer may merge
over it. The last ids that the policy sampled may be the beginning of the next turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .codec import Codec

CONTEXT_CHARACTERS = 64
"""Characters before a boundary that can change how a tokenizer splits what follows."""


@dataclass(slots=True)
class TurnTokens:
    """What a turn adds to the ids.

    Attributes:
        close: Ends the assistant's turn before it; needed only if the policy did not write it.
        body: The turn itself.
        inputs: Tensors of its media.
        full: The whole conversation had to be rendered.
        rewritten: The template prints earlier turns differently from before.
        merged: The tokenizer would merge over the boundary: the text is right, the ids are not those
            of a whole render.
        header: First tokens of `body` that stand for an open generation prompt.
    """

    close: list[int] = field(default_factory=list)
    body: list[int] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)
    full: bool = False
    rewritten: bool = False
    merged: bool = False
    header: int = 0


class BoundaryTokenizer:
    """Tokenizes texts that follow other texts, and finds special tokens in them."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def encode_following(self, before: str, text: str) -> tuple[list[int], bool]:
        """Return the ids of a text that follows another, and whether the boundary is clean."""
        context = self.last_special(before) or before[-CONTEXT_CHARACTERS:]
        return self._codec.encode_after(context, text)

    def last_special(self, text: str) -> str:
        """Return the end of a text from its last special token on; empty: the end has none."""
        tail = text[-CONTEXT_CHARACTERS:]
        found = [match.start() for match in self._special_pattern.finditer(tail)]
        return tail[found[-1] :] if found else ""

    def shared_end(self, own: str, text: str) -> str:
        """Return how much of `own`, whole or from a special token on, a text ends with."""
        starts = [0, *(match.start() for match in self._special_pattern.finditer(own))]
        return next((own[start:] for start in starts if text.endswith(own[start:])), "")

    def first_special(self, text: str) -> str:
        """Return the special token that a text begins with; empty: with none."""
        found = self._special_pattern.match(text)
        return found[0] if found else ""

    def without_specials(self, text: str) -> str:
        """Return a text without its special tokens."""
        return self._special_pattern.sub("", text)

    def shared_beginning(self, a: str, b: str) -> str:
        """Return the common beginning of two texts, up to a special token that only one has."""
        length = common_length(a, b)
        near = max(0, length - CONTEXT_CHARACTERS)
        for text in (a, b):
            for match in self._special_pattern.finditer(text, near, length + CONTEXT_CHARACTERS):
                if match.start() < length < match.end():
                    length = match.start()
        return a[:length]

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        texts = sorted(self._codec.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) if texts else "(?!)")


def fit_turn(
    tail: Sequence[int], turn: TurnTokens, special: Set[int], ends: Set[int], stopped: int | None
) -> int:
    """Fit a turn after sampled ids, in place; return how many of those must be removed.

    A policy ends its answer with the template's closing token, or (GLM) with the first token of the
    next turn: what it wrote of the turn is not written twice. Another end (Llama's `<|eom_id|>`)
    stands for the template's. If a turn has no closing token, an end with which the next turn does
    not begin (GLM expected another role) is removed.

    `tail` are the last sampled ids, `ends` the ids with which a policy ends its turn, and `stopped`
    the id that the engine reported as the end, if any.
    """
    whole = [*turn.close, *turn.body]
    for count in range(min(len(tail), len(turn.close) + 1, len(whole)), 0, -1):
        same = list(tail[-count:]) == whole[:count]
        if same and (whole[count - 1] == stopped or not special.isdisjoint(whole[:count])):
            turn.body = turn.body[max(0, count - len(turn.close)) :]
            turn.close = turn.close[count:]
            return 0
    if not tail or (tail[-1] not in ends and tail[-1] != stopped):
        return 0
    if turn.close:
        first = next((i for i, token in enumerate(turn.close) if token in special), -1)
        turn.close = turn.close[first + 1 :] if first >= 0 else turn.close
        return 0
    return int(bool(turn.body) and turn.body[0] in special)


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the longest common beginning."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
