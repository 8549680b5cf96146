"""Scores on their way from SGLang's child to the worker.

They are arrays in base64: as JSON, millions of numbers would take seconds. The child sends of a prompt what was asked for, and of a step's tokens the rows of the most likely ones.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Any

from rollout_common.wire import WeightsId
from rollout_worker.engine import EngineRequest
from rollout_worker.token_scores import PromptScores, TopTokens

NUMBER_BYTES = 4
"""Of an id, and of a logprob."""


def score_fields(request: EngineRequest) -> dict[str, Any]:
    """Return the fields of SGLang's request that ask for scores, and `scored`, which is for the child itself."""
    scored, top = request.scored, request.top_logprobs
    return {
        # The first position that SGLang counts has no logprob.
        "logprob_start_len": -1 if scored is None else first_counted(scored[0]),
        "top_logprobs_num": top,
        "return_flat_raw_top_logprobs": bool(scored and top),
        "return_flat_raw_top_logprobs_b64": bool(scored and top),
        "scored": scored,
    }


def first_counted(start: int) -> int:
    """Return from where SGLang has to count positions, to give the logprob of position `start`."""
    return max(0, start - 1)


def pack_prompt(meta: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """Return the scores of positions [start, end) of a prompt, from SGLang's `meta_info`."""
    first = first_counted(start)
    values = [entry[0] for entry in meta["input_token_logprobs"][start - first : end - first]]
    found = array("f", [math.nan if value is None else value for value in values])
    packed: dict[str, Any] = {"logprobs": _encode(found.tobytes())}
    shape = meta.get("input_top_logprobs_shape")
    if shape is not None:
        before = first + meta["input_top_logprobs_null_prefix"]
        rows = slice(*((at - before) * shape[1] * NUMBER_BYTES for at in (max(start, before), end)))
        for name, key in (("token_ids", "idx"), ("top_logprobs", "val")):
            flat = base64.b64decode(meta[f"input_top_logprobs_{key}_flat_b64"])
            packed[name] = _encode(flat[rows])
        packed["width"] = shape[1]
    return packed


def unpack_prompt(packed: dict[str, Any], start: int, weights: WeightsId) -> PromptScores:
    """Return what `pack_prompt` made; position 0 has no logprob and an empty row."""
    values = array("f", base64.b64decode(packed["logprobs"]))
    logprobs: list[float | None] = [*values]
    if start == 0:
        logprobs[0] = None
    top = None
    if "width" in packed:
        top = TopTokens(packed["width"])
        if start == 0:
            top.append_row()
        top.token_ids.frombytes(base64.b64decode(packed["token_ids"]))
        top.logprobs.frombytes(base64.b64decode(packed["top_logprobs"]))
    return PromptScores(start, logprobs, top, weights)


def pack_top(rows: Sequence[Sequence[tuple[float, int, None]]]) -> dict[str, Any]:
    """Return the most likely tokens of a step, one row for each of its tokens."""
    ids = array("i", [entry[1] for row in rows for entry in row])
    values = array("f", [entry[0] for row in rows for entry in row])
    return {
        "width": len(rows[0]),
        "token_ids": _encode(ids.tobytes()),
        "logprobs": _encode(values.tobytes()),
    }


def unpack_top(packed: dict[str, Any]) -> TopTokens:
    """Return what `pack_top` made."""
    top = TopTokens(packed["width"])
    top.token_ids.frombytes(base64.b64decode(packed["token_ids"]))
    top.logprobs.frombytes(base64.b64decode(packed["logprobs"]))
    return top


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()
