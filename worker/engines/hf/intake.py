"""From a request to an output in the making: what is refused, and what is set up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from rollout_worker.engine import EngineDelta, EngineRequest, InvalidRequest

from .loading import Loaded
from .processing import SamplerState
from .sequence import Sequence
from .stopping import StopChecker, stop_ids


def check(request: EngineRequest, loaded: Loaded) -> None:
    """Refuse what cannot be served.

    Raises:
        InvalidRequest: names the field and the fix.
    """
    sampling, vocab = request.sampling, loaded.vocab_size
    _check_ids("token_ids", request.token_ids, vocab)
    _check_ids("sampling.logit_bias", sampling.logit_bias, vocab)
    _check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids or (), vocab)
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, vocab)
    if not request.token_ids:
        raise InvalidRequest("token_ids", "the prompt is empty: give at least one token id")
    needed = len(request.token_ids) + (sampling.max_tokens or 1)
    if needed > loaded.max_length:
        raise InvalidRequest(
            "sampling.max_tokens",
            f"prompt and max_tokens need {needed} tokens, the maximum length is "
            f"{loaded.max_length}: shorten the prompt or lower max_tokens",
            status=413,
        )
    if sampling.stop and loaded.tokenizer is None:
        raise InvalidRequest(
            "sampling.stop",
            "the model has no tokenizer to find stop strings with: use stop_token_ids",
        )
    if request.cache_salt is not None:
        raise InvalidRequest(
            "cache_salt", "the hf engine has no prefix cache to salt: leave cache_salt out"
        )
    if sampling.min_tokens and sampling.allowed_token_ids is not None:
        stops = stop_ids(sampling, loaded.eos_token_ids)
        if stops.issuperset(sampling.allowed_token_ids):
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


def sequence_of(
    request: EngineRequest, loaded: Loaded, arrival: int, sink: Callable[[EngineDelta], None]
) -> Sequence:
    """Set up a checked request; `sink` takes its deltas, in the asyncio loop."""
    tokenizer = loaded.tokenizer
    if request.sampling.max_tokens is None:
        room = loaded.max_length - len(request.token_ids)
        sampling = request.sampling.model_copy(update={"max_tokens": room})
        request = replace(request, sampling=sampling)
    stops = stop_ids(request.sampling, loaded.eos_token_ids)

    def text(tokens: Iterable[int]) -> str:
        return decode(tokenizer, tokens, skip_special=False)

    return Sequence(
        request=request,
        sampler=SamplerState(
            request.sampling, request.token_ids, stops, loaded.vocab_size, loaded.model.device
        ),
        stop=StopChecker(request.sampling, loaded.eos_token_ids, text if tokenizer else None),
        arrival=arrival,
        sink=sink,
    )


def decode(tokenizer: Any, tokens: Iterable[int], *, skip_special: bool) -> str:
    """Return the text of token ids, nothing tidied."""
    text: str = tokenizer.decode(
        list(tokens), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
    )
    return text
