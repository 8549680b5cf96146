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
    """Return the scores of positions [start, end) of a prompt, without position 0, from SGLang's `meta_info`."""
    first = first_counted(start)
    values = [entry[0] for entry in meta["input_token_logprobs"][1 : end - first]]
    found = array("f", [math.nan if value is None else value for value in values])
    packed: dict[str, Any] = {"logprobs": _encode(found.tobytes())}
    shape = meta.get("input_top_logprobs_shape")
    if shape is not None:
        before = first + meta["input_top_logprobs_null_prefix"]
        rows = slice(*((at - before) * shape[1] * NUMBER_BYTES for at in (max(start, before), end)))
        ids, logprobs = (
            base64.b64decode(meta[f"input_top_logprobs_{key}_flat_b64"])[rows]
            for key in ("idx", "val")
        )
        packed["top"] = _pack_rows(shape[1], ids, logprobs)
    return packed


def unpack_prompt(packed: dict[str, Any], start: int, weights: WeightsId) -> PromptScores:
    """Return what `pack_prompt` made."""
    values = array("f", base64.b64decode(packed["logprobs"]))
    top = unpack_top(packed["top"]) if "top" in packed else None
    width = 0 if top is None else top.width
    return PromptScores.from_computed(start, values.tolist(), top, weights, width)


def pack_top(rows: Sequence[Sequence[tuple[float, int, None]]]) -> dict[str, Any]:
    """Return the most likely tokens of a step, one row for each of its tokens."""
    ids = array("i", [entry[1] for row in rows for entry in row])
    values = array("f", [entry[0] for row in rows for entry in row])
    return _pack_rows(len(rows[0]), ids.tobytes(), values.tobytes())


def unpack_top(packed: dict[str, Any]) -> TopTokens:
    """Return what `_pack_rows` made."""
    top = TopTokens(packed["width"])
    top.token_ids.frombytes(base64.b64decode(packed["token_ids"]))
    top.logprobs.frombytes(base64.b64decode(packed["logprobs"]))
    return top


def _pack_rows(width: int, token_ids: bytes, logprobs: bytes) -> dict[str, Any]:
    return {"width": width, "token_ids": _encode(token_ids), "logprobs": _encode(logprobs)}


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()
