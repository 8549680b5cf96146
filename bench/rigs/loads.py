"""The loads that two servers are put under: how many requests, how many at once, of what shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

PROMPT, ANSWER = 64, 64
GROUP = 8
VOCAB = (3, 4000)

Shape = Callable[[random.Random, int], tuple[list[int], int]]


@dataclass(frozen=True, slots=True)
class Load:
    """`total` requests, `in_flight` at once; `shape(draw, index)` is a prompt and a length.

    Rounds of it go on until there are enough of them and `seconds` are over.
    """

    label: str
    total: int
    in_flight: int
    shape: Shape
    seconds: float


def short(draw: random.Random, _: int) -> tuple[list[int], int]:
    return _ids(draw, 8), 8


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(*VOCAB) for _ in range(count)]


def _alike(draw: random.Random, _: int) -> tuple[list[int], int]:
    return _ids(draw, PROMPT), ANSWER


def _long_tailed(draw: random.Random, _: int) -> tuple[list[int], int]:
    return _ids(draw, PROMPT), min(256, max(16, int(draw.lognormvariate(4, 0.8))))


def _grouped(draw: random.Random, index: int) -> tuple[list[int], int]:
    if index % GROUP == 0:
        draw.group = _ids(draw, 4 * PROMPT)  # type: ignore[attr-defined]
    return draw.group, ANSWER  # type: ignore[attr-defined]


TINY = (
    Load("tiny, one by one", 30, 1, _alike, 20),
    Load("tiny, 8 at once", 64, 8, _alike, 20),
    Load("tiny, 32 at once", 128, 32, _alike, 20),
    Load("tiny, 32 at once, long-tailed", 96, 32, _long_tailed, 20),
    Load("tiny, 32 at once, groups of 8", 96, 32, _grouped, 20),
    Load("tiny, 1,000 short, 64 at once", 1000, 64, short, 40),
)
BIG = (
    Load("0.5B, one by one", 1, 1, _alike, 20),
    Load("0.5B, 8 at once", 8, 8, _alike, 40),
    Load("0.5B, 32 at once", 32, 32, _alike, 90),
)
