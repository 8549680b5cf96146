"""Scores on their way to the client, in steps: the event loop gets its turn between two of them.

A frame holds at most `FRAME_VALUES` logprobs, which take a few milliseconds to write as JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rollout_common.wire import GenerateResponse, PromptLogprobs, RoutedExperts
from rollout_worker.replay_records import ExpertRoutes, TokenMasks, base64_pieces
from rollout_worker.token_scores import PromptScores, TopTokens

FRAME_VALUES = 2**13
FRAME_TOKENS = 2**11
"""In a delta: OpenAI's routes take 14 ms to write so many with their logprobs."""
FRAME_BYTES = 2**20
"""Of routes in a frame, and of masks beyond the first row."""


@dataclass(frozen=True, slots=True)
class OutputArrays:
    """What an output has for each token besides its logprob; None: not asked for."""

    top: TopTokens | None = None
    routes: ExpertRoutes | None = None
    masks: TokenMasks | None = None


def frame_positions(top_logprobs: int) -> int:
    """Return how many positions a frame holds, if each has so many of the most likely tokens."""
    return max(1, FRAME_VALUES // (1 + top_logprobs))


def route_positions(routes: ExpertRoutes) -> int:
    """Return how many positions a frame holds with their routes."""
    return max(1, FRAME_BYTES // routes.row_bytes)


def prompt_frames(scores: PromptScores) -> Iterator[PromptLogprobs]:
    """Yield a scored prompt, frame by frame."""
    step = frame_positions(0 if scores.top is None else scores.top.width)
    for begin in range(0, len(scores.logprobs), step):
        yield scores.to_wire(begin, min(begin + step, len(scores.logprobs)))


def route_frames(routes: ExpertRoutes, end: int) -> Iterator[RoutedExperts]:
    """Yield the routes of positions before `end`, frame by frame."""
    step = route_positions(routes)
    for begin in range(routes.start, end, step):
        yield routes.to_wire(begin, min(begin + step, end))


async def response_pieces(
    plain: GenerateResponse, outputs: Sequence[OutputArrays], scores: PromptScores | None
) -> AsyncIterator[bytes]:
    """Yield the JSON of a response together with the arrays of each output and the scores of the prompt."""
    yield plain.model_dump_json(exclude={"outputs"})[:-1].encode() + b',"outputs":['
    for index, (output, arrays) in enumerate(zip(plain.outputs, outputs, strict=True)):
        yield b"," * (index > 0) + output.model_dump_json()[:-1].encode()
        async for piece in _array_pieces(arrays):
            yield piece
        yield b"}"
    yield b"]"
    if scores is not None:
        async for piece in _prompt_pieces(scores):
            yield piece
    yield b"}"


async def _array_pieces(arrays: OutputArrays) -> AsyncIterator[bytes]:
    if arrays.top is not None:
        async for piece in _top_pieces(arrays.top):
            yield piece
    for name, record in (("routed_experts", arrays.routes), ("sampling_mask", arrays.masks)):
        if record is None:
            continue
        fields = record.describe_rows().model_dump_json(exclude={"data"})[:-1]
        yield f',"{name}":{fields},"data":"'.encode()
        for piece in base64_pieces(record.data):
            yield piece
            await asyncio.sleep(0)
        yield b'"}'


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
