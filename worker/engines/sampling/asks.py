"""What a request asks of the sampler, as JSON; without the options that change nothing."""

from __future__ import annotations

from typing import Any

from rollout_worker.engine import EngineRequest

MIN_REPETITION_PENALTY = 1e-30
"""Smaller penalties are 0 in float32; the logits of ids that are not allowed would become NaN."""


def sampling_asks(
    request: EngineRequest, stops: frozenset[int], never: frozenset[int] = frozenset()
) -> dict[str, Any]:
    """Return what one output asks, for `batch_rows.SampledRow`.

    `stops`: the token ids that end it; `never`: those that the model must not sample.
    """
    sampling = request.sampling
    asks: dict[str, Any] = {
        "greedy": sampling.temperature == 0,
        "raw": request.logprobs == "raw",
    }
    if request.top_logprobs:
        asks["top"] = request.top_logprobs
    if request.masks:
        asks["mask"] = True
    if sampling.seed is not None:
        asks["seed"] = sampling.seed
    truncated = sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1
    if sampling.temperature > 0 and truncated:
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
    if never:
        asks["never"] = sorted(never)
    if sampling.logit_bias:
        asks["bias_ids"] = list(sampling.logit_bias)
        asks["bias_values"] = list(sampling.logit_bias.values())
    if sampling.allowed_token_ids is not None:
        asks["allowed"] = list(sampling.allowed_token_ids)
    return asks
