"""Replay records and scores on their way from SGLang's schedulers to the worker.

Records are `customized_info` of a request: an element a token. Masks come from our sampler. Experts come from SGLang's own
recorder (`--enable-return-routed-experts`), which keeps those of every KV slot; a row is read as soon as its token is made, so
that a later change of weights leaves it as it was.

Scores are arrays in base64: as JSON, millions of numbers would take seconds. The child sends of a prompt what was asked for,
and of a step's tokens the rows of the most likely ones.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from rollout_common.wire import WeightsId
from rollout_worker.engine import EngineRequest
from rollout_worker.replay_records import ExpertRoutes, TokenMasks
from rollout_worker.token_scores import PromptScores, TopTokens

MASKS_KEY, ROUTES_KEY = "rollout_masks", "rollout_routes"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configurations call the number of experts of a layer."""
NUMBER_BYTES = 4
"""Of an id, and of a logprob."""


def install_records() -> None:
    """Patch SGLang in this process, before it starts."""
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor as Processor,
    )
    from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

    capture = RoutedExpertsCapturer.capture

    def capture_and_note(self: Any, layer_id: int, topk_indices: Any) -> None:
        self.rollout_layers = getattr(self, "rollout_layers", frozenset()) | {layer_id}
        capture(self, layer_id, topk_indices)

    at_end: Callable[..., None] = Processor._maybe_collect_routed_experts
    of_token: Callable[..., None] = Processor._maybe_collect_customized_info

    def collect_at_end(self: Any, req: Any) -> None:
        at_end(self, req)
        _collect_routes(self, req)  # its KV slots are freed next

    def collect_token(self: Any, i: int, req: Any, logits_output: Any) -> None:
        of_token(self, i, req, logits_output)
        if _first_routed(req) is None:
            return
        if not req.finished():
            _collect_routes(self, req)
        rows, req.rollout_rows = getattr(req, "rollout_rows", b""), b""
        req.customized_info = req.customized_info or {}
        req.customized_info.setdefault(ROUTES_KEY, []).append(base64.b64encode(rows).decode())

    RoutedExpertsCapturer.capture = capture_and_note
    Processor._maybe_collect_routed_experts = collect_at_end
    Processor._maybe_collect_customized_info = collect_token


def _first_routed(req: Any) -> int | None:
    found = (req.sampling_params.custom_params or {}).get("routes")
    return None if found is None else int(found)


def _collect_routes(processor: Any, req: Any) -> None:
    """Read the rows of all tokens that were read since the last call."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    first, capturer = _first_routed(req), get_global_experts_capturer()
    if first is None or capturer is None:
        return
    start = getattr(req, "rollout_routed", first)
    length = len(req.origin_input_ids) + len(req.output_ids)
    if start >= length - 1:
        return
    pool = processor.req_to_token_pool
    found = capturer.get_topk(req.kv.req_pool_idx, length, pool, start)
    rows = found[:, sorted(capturer.rollout_layers)].numpy()
    req.rollout_rows = getattr(req, "rollout_rows", b"") + rows.astype("<u2").tobytes()
    req.rollout_routed = length - 1


def sampled_masks(allowed: dict[int, tuple[int, bytes]], rows: int) -> dict[str, Sequence[Any]]:
    """Return the masks of a batch as SGLang passes them on; None for a row that asked for none."""
    packed = {
        row: [count, base64.b64encode(row_bytes).decode()]
        for row, (count, row_bytes) in allowed.items()
    }
    return {MASKS_KEY: [packed.get(row) for row in range(rows)]}


def pack_records(meta: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the records of a step's last `tokens` tokens, from SGLang's `meta_info`."""
    found = {}
    for name, key in (("masks", MASKS_KEY), ("routes", ROUTES_KEY)):
        values = (meta.get(key) or [])[-tokens:]
        if tokens and any(value is not None for value in values):
            found[name] = values
    return found


def unpack_masks(packed: Sequence[Any], vocab_size: int) -> TokenMasks:
    """Return the masks of a step's tokens."""
    masks = TokenMasks(vocab_size)
    for count, row in packed:
        masks.append_row(count, base64.b64decode(row))
    return masks


def unpack_routes(
    packed: Sequence[str], start: int, end: int, experts: tuple[int, int]
) -> ExpertRoutes:
    """Return the experts of the tokens at positions [start, end); `experts`: how many there are, and how many a token has."""
    count, top_k = experts
    data = b"".join(map(base64.b64decode, packed))
    layers = len(data) // (2 * top_k * (end - start))
    if count <= 256:
        return ExpertRoutes(start, layers, top_k, "uint8", bytearray(data[::2]))  # the lower bytes
    return ExpertRoutes(start, layers, top_k, "uint16", bytearray(data))


def read_experts(config: dict[str, Any]) -> tuple[int, int] | None:
    """Return how many experts a layer of a model has, and how many a token goes to; None: it has none."""
    count = next((int(config[name]) for name in EXPERT_COUNTS if config.get(name)), None)
    top_k = config.get("num_experts_per_tok")
    return None if count is None or not top_k else (count, int(top_k))


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
