"""Scores on their way to the client, in steps: the event loop gets its turn between two of them.

A frame holds at most `FRAME_VALUES` logprobs, which take a few milliseconds to write as JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Literal

from rollout_common.wire import GenerateResponse, PromptLogprobs
from rollout_worker.token_scores import PromptScores, TopTokens

FRAME_VALUES = 2**13


def frame_positions(top_logprobs: int) -> int:
    """Return how many positions a frame holds, if each has so many of the most likely tokens."""
    return max(1, FRAME_VALUES // (1 + top_logprobs))


def prompt_frames(scores: PromptScores) -> Iterator[PromptLogprobs]:
    """Yield a scored prompt, frame by frame."""
    step = frame_positions(0 if scores.top is None else scores.top.width)
    for begin in range(0, len(scores.logprobs), step):
        yield scores.to_wire(begin, min(begin + step, len(scores.logprobs)))


async def response_pieces(
    plain: GenerateResponse, tops: Sequence[TopTokens | None], scores: PromptScores | None
) -> AsyncIterator[bytes]:
    """Yield the JSON of a response together with the most likely tokens of each output and the scores of the prompt."""
    yield plain.model_dump_json(exclude={"outputs"})[:-1].encode() + b',"outputs":['
    for index, (output, top) in enumerate(zip(plain.outputs, tops, strict=True)):
        yield b"," * (index > 0) + output.model_dump_json()[:-1].encode()
        if top is not None:
            async for piece in _top_pieces(top):
                yield piece
        yield b"}"
    yield b"]"
    if scores is not None:
        async for piece in _prompt_pieces(scores):
            yield piece
    yield b"}"


async def _prompt_pieces(scores: PromptScores) -> AsyncIterator[bytes]:
    head = (
        f',"prompt_logprobs":{{"start":{scores.start},"weights":{scores.weights.model_dump_json()}'
    )
    yield f'{head},"logprobs":['.encode()
    for begin in range(0, len(scores.logprobs), FRAME_VALUES):
        yield b"," * (begin > 0) + _plain_items(scores.logprobs[begin : begin + FRAME_VALUES])
        await asyncio.sleep(0)
    yield b"]"
    if scores.top is not None:
        async for piece in _top_pieces(scores.top):
            yield piece
    yield b"}"


async def _top_pieces(top: TopTokens) -> AsyncIterator[bytes]:
    fields: tuple[Literal["token_ids", "logprobs"], ...] = ("token_ids", "logprobs")
    step = frame_positions(top.width)
    yield b',"top_logprobs":'
    for field, before in zip(fields, "{,", strict=True):
        yield f'{before}"{field}":['.encode()
        for begin in range(0, len(top), step):
            rows = getattr(top.to_wire(begin, min(begin + step, len(top))), field)
            yield b"," * (begin > 0) + _plain_items(rows)
            await asyncio.sleep(0)
        yield b"]"
    yield b"}"


def _plain_items(items: Sequence[object]) -> bytes:
    """Return a list as JSON, without its brackets."""
    return json.dumps(items, separators=(",", ":"))[1:-1].encode()
