"""What a request must meet before it is queued, and what the engine says that it can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollout_worker.engine import EngineRequest, InvalidRequest
from rollout_worker.engines.hf.stopping import stop_ids
from rollout_worker.schemas import Capabilities

from .model import Model


def check(request: EngineRequest, model: Model) -> None:
    """Refuse what cannot be served.

    Raises:
        InvalidRequest: names the field and the fix.
    """
    sampling, vocab = request.sampling, model.vocab_size
    _check_ids("token_ids", request.token_ids, vocab)
    _check_ids("sampling.logit_bias", sampling.logit_bias, vocab)
    _check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids or (), vocab)
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, vocab)
    if not request.token_ids:
        raise InvalidRequest("token_ids", "the prompt is empty: give at least one token id")
    needed = len(request.token_ids) + (sampling.max_tokens or 1)
    if needed > model.max_length:
        raise InvalidRequest(
            "sampling.max_tokens",
            f"prompt and max_tokens need {needed} tokens, the maximum length is "
            f"{model.max_length}: shorten the prompt or lower max_tokens",
            status=413,
        )
    if sampling.stop and model.tokenizer is None:
        raise InvalidRequest(
            "sampling.stop",
            "the model has no tokenizer to find stop strings with: use stop_token_ids",
        )
    if sampling.min_tokens and sampling.allowed_token_ids is not None:
        stops = stop_ids(sampling, model.eos_token_ids)
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


def capabilities(*, tokenizer: bool, facts: Mapping[str, Any]) -> Capabilities:
    """Return what the engine can do; `facts`: what the child said of itself, empty before.

    With SGLang's overlapping schedule a step's tokens are known only after the next one has begun,
    so that a pause could not say which weights made the last ones: there is no `Keep` then.
    """
    saver = bool(facts.get("enable_memory_saver", True))
    exact = bool(facts.get("disable_overlap_schedule", False))
    return Capabilities(
        logprobs=("sampling", "raw"),
        seed=True,
        priority=True,
        stop_strings=tokenizer,
        in_flight=("Drain", "Abort", "Keep", "Recompute")
        if exact
        else ("Drain", "Abort", "Recompute"),
        sleep_levels=(1, 2) if saver else (),
        memory_release=saver,
        prefix_cache=not facts.get("disable_radix_cache", False),
        cache_salt=not facts.get("disable_radix_cache", False),
    )
