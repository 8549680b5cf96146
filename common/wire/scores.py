"""Wire models of scoring: logprobs of a prompt, and the most likely tokens at each position."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from .wire_base import Float, Int, TokenId, WeightsId, Wire, _is_absent

__all__ = ["MAX_SCORED_VALUES", "MAX_TOP_LOGPROBS", "PromptLogprobs", "PromptRange", "TopLogprobs"]

MAX_TOP_LOGPROBS = 256
"""Largest `top_logprobs`."""
MAX_SCORED_VALUES = 2**21
"""Most logprobs of a prompt in one response, some 60 MB of JSON: 32,768 positions with 63 tokens each, or 8,160 with 256."""


def _check_range(value: Any) -> Any:
    """Accept a boolean, or two positions of which the first is less: one message for everything else."""
    if value is None or isinstance(value, bool):
        return value
    numbers = isinstance(value, list | tuple) and [type(each) for each in value] == [int, int]
    if not (numbers and 0 <= value[0] < value[1]):
        raise ValueError("must be true, or [from, to] with 0 <= from < to: positions of the prompt")
    return value


PromptRange = Annotated[bool | tuple[Int, Int], BeforeValidator(_check_range)]
"""Which positions of a prompt to score: all of them, or those from the first number up to the second."""


class TopLogprobs(Wire):
    """The most likely tokens at each of T positions, likeliest first: token_ids [T][k], logprobs [T][k].

    A row is shorter than k where fewer tokens can be drawn. The chosen token is in it only if it is among the k.
    """

    token_ids: tuple[tuple[TokenId, ...], ...]
    logprobs: tuple[tuple[Float, ...], ...]


class PromptLogprobs(Wire):
    """Logprobs of the prompt's tokens at positions `[start, start + T)`: logprobs [T], top_logprobs [T][k].

    The token at position 0 follows nothing, so its logprob is null and its row empty; placeholders of pictures, which no
    model draws, have null, too. One version of the weights
    computed all of them.
    """

    start: int = Field(ge=0)
    logprobs: tuple[Float | None, ...]
    top_logprobs: TopLogprobs | None = Field(default=None, exclude_if=_is_absent)
    weights: WeightsId
