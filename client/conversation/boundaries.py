"""Fit the ids of a turn after ids that are already there. Pure.

The last ids that the policy sampled may be the beginning of the next turn.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any


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
