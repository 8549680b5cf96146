"""From a request to what vLLM takes: what is refused, and what is translated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rollout_worker.engine import EngineRequest, InvalidRequest
from rollout_worker.schemas import SamplingParams

LEAST_TEMPERATURE = 0.01
"""Below, vLLM silently takes this one; 0 is greedy."""

UNREAD_TOKENS = 32
"""How many tokens of an output come at a time that nobody reads along: a wake-up for each one
would cost more than making it on a quick model."""


@dataclass(frozen=True, slots=True)
class Model:
    """What must be known of a model to check and translate requests."""

    max_length: int
    vocab_size: int
    eos: frozenset[int]
    tokenizer: Any | None


def check(request: EngineRequest, model: Model) -> None:
    """Refuse what can't be served.

    Raises:
        InvalidRequest: names the field and the fix.
    """
    sampling = request.sampling
    if not request.token_ids:
        raise InvalidRequest("token_ids", "the prompt is empty: give at least one token id")
    _check_ids("token_ids", request.token_ids, model.vocab_size)
    _check_ids("sampling.logit_bias", sampling.logit_bias, model.vocab_size)
    _check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids or (), model.vocab_size)
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, model.vocab_size)
    needed = len(request.token_ids) + (sampling.max_tokens or 1)
    if needed > model.max_length:
        raise InvalidRequest(
            "sampling.max_tokens",
            f"prompt and max_tokens need {needed} tokens, the maximum length is "
            f"{model.max_length}: shorten the prompt or lower max_tokens",
            status=413,
        )
    _check_sampling(sampling, stop_ids(sampling, model.eos))


def _check_sampling(sampling: SamplingParams, stops: frozenset[int]) -> None:
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise InvalidRequest(
            "sampling.temperature",
            f"vLLM draws nothing between 0 and {LEAST_TEMPERATURE}: use 0 (greedy) or at least "
            f"{LEAST_TEMPERATURE}",
        )
    allowed = sampling.allowed_token_ids
    if sampling.min_tokens and allowed is not None and stops.issuperset(allowed):
        raise InvalidRequest(
            "sampling.allowed_token_ids",
            "min_tokens forbids every allowed id, as all of them end the output: allow "
            "another id or set min_tokens to 0",
        )


def _check_ids(field: str, ids: Iterable[int], vocab: int) -> None:
    for token in ids:
        if not 0 <= token < vocab:
            raise InvalidRequest(
                field, f"token id {token} is not in the vocabulary: use 0 to {vocab - 1}"
            )


def stop_ids(sampling: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    """Return the ids that end an output of this request."""
    named = frozenset(sampling.stop_token_ids)
    return named if sampling.ignore_eos else named | eos


def translate(request: EngineRequest, model: Model) -> Any:
    """Return vLLM's sampling parameters for a checked request.

    EOS ids are given as stop ids, so that vLLM itself knows of none: it would withhold them within
    `min_tokens` even from a request that ignores them. Stop strings are found on our side.
    """
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as Params

    sampling = request.sampling
    allowed = sampling.allowed_token_ids
    return Params(
        max_tokens=sampling.max_tokens or model.max_length - len(request.token_ids),
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=None if allowed is None else list(allowed),
        stop_token_ids=sorted(stop_ids(sampling, model.eos)),
        ignore_eos=True,
        seed=sampling.seed,
        logprobs=None if request.logprobs is None else 0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=1 if request.streamed or sampling.stop else UNREAD_TOKENS,
        skip_clone=True,
    )
