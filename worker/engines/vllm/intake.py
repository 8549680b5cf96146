"""From a request to what vLLM takes: what is refused, and what is translated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout_worker.engine import EngineRequest, InvalidRequest
from rollout_worker.engines.request_checks import check_model_limits, check_temperature, stop_ids

MIN_TEMPERATURE = 0.01
"""Below, vLLM silently takes this one; 0 is greedy."""
MAX_TEMPERATURE = 2.0
"""Above, vLLM refuses."""

MAX_LOGIT_BIAS = 1e18
"""Biases beyond and repetition penalties below 1 / it are taken as it: no other logit counts beside
them either way, and a bias over a penalty over a temperature stays in the range of float32."""

MAX_LISTED_TOKENS = 1024
"""How many tokens a request may allow, or bias, where the sampler is bounded (vLLM 0.32)."""
MAX_STOP_TOKENS = 128
"""How many tokens may end an output that has `min_tokens`, where the sampler is bounded."""

UNREAD_STREAM_INTERVAL = 32
"""How many tokens of an output come at a time that nobody reads along: a wake-up for each one
would cost more than making it on a quick model."""


@dataclass(frozen=True, slots=True)
class VllmModel:
    """What must be known of a model to check and translate requests.

    `bounded`: its sampler has arrays of fixed length for what a request asks of single tokens.
    """

    max_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Any | None
    bounded: bool = False


def check_request(request: EngineRequest, model: VllmModel) -> None:
    """Refuse what can't be served.

    Raises:
        InvalidRequest: names the field and the fix.
    """
    check_model_limits(request, model)
    check_temperature(request, "vLLM", MIN_TEMPERATURE, MAX_TEMPERATURE)
    if model.bounded:
        _check_sampler_bounds(request, model)


def _check_sampler_bounds(request: EngineRequest, model: VllmModel) -> None:
    """Refuse more than the sampler's arrays hold: beyond, vLLM's core raises, and ends."""
    sampling = request.sampling
    allowed = len(sampling.allowed_token_ids or ())
    stops = len(stop_ids(sampling, model.eos_token_ids)) if sampling.min_tokens else 0
    for field, found, most, why in (
        ("sampling.allowed_token_ids", allowed, MAX_LISTED_TOKENS, ""),
        ("sampling.logit_bias", len(sampling.logit_bias), MAX_LISTED_TOKENS, ""),
        ("sampling.stop_token_ids", stops, MAX_STOP_TOKENS, " with min_tokens, EOS included"),
    ):
        if found > most:
            raise InvalidRequest(
                field, f"vLLM takes at most {most} tokens here{why}, not {found}: send fewer"
            )


def to_sampling_params(request: EngineRequest, model: VllmModel) -> Any:
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
        repetition_penalty=max(1 / MAX_LOGIT_BIAS, sampling.repetition_penalty),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias={
            token: max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias))
            for token, bias in sampling.logit_bias.items()
        }
        or None,
        allowed_token_ids=None if allowed is None else list(allowed),
        stop_token_ids=sorted(stop_ids(sampling, model.eos_token_ids)),
        ignore_eos=True,
        seed=sampling.seed,
        logprobs=None if request.logprobs is None else 0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=1 if request.streamed or sampling.stop else UNREAD_STREAM_INTERVAL,
        skip_clone=True,
    )
