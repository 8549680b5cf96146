"""What a request asks of the sampler: only what changes something, as JSON."""

from __future__ import annotations

from typing import Any

from rollout_common.wire import SamplingParams
from rollout_worker.engine import EngineRequest

MIN_REPETITION_PENALTY = 1e-30
"""Smaller penalties are 0 in float32 and would make NaN of the logits of ids that are not allowed."""


def sampling_asks(request: EngineRequest, stops: frozenset[int]) -> dict[str, Any]:
    """Return the asks of one output that the sampler knows (`batch_rows.SampledRow`); `stops`: what ends it."""
    sampling = request.sampling
    asks: dict[str, Any] = {
        "greedy": sampling.temperature == 0,
        "raw": request.logprobs == "raw",
    }
    if sampling.seed is not None:
        asks["seed"] = sampling.seed
    if sampling.temperature > 0 and _is_truncated(sampling):
        asks["cut"] = [sampling.min_p, sampling.top_k, sampling.top_p]
    penalties = (
        max(MIN_REPETITION_PENALTY, sampling.repetition_penalty),
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
    if penalties != (1, 0, 0):
        asks["penalties"] = list(penalties)
    if sampling.min_tokens and stops:
        asks |= {"min_tokens": sampling.min_tokens, "stops": sorted(stops)}
    if sampling.logit_bias:
        asks["bias_ids"] = list(sampling.logit_bias)
        asks["bias_values"] = list(sampling.logit_bias.values())
    if sampling.allowed_token_ids is not None:
        asks["allowed"] = list(sampling.allowed_token_ids)
    return asks


def _is_truncated(sampling: SamplingParams) -> bool:
    return sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1
