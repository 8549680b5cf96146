"""What every engine refuses in the same words: ids, lengths and outputs that could never end."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_worker.engine import EngineRequest, InvalidRequest
from rollout_worker.schemas import SamplingParams


def stop_ids(sampling: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    """Return the ids that end an output of this request."""
    named = frozenset(sampling.stop_token_ids)
    return named if sampling.ignore_eos else named | eos


def check_fits(
    request: EngineRequest, *, vocab_size: int, max_length: int, eos: frozenset[int], text: bool
) -> None:
    """Refuse what no engine could serve with this model.

    Args:
        request: What was asked for.
        vocab_size: Of the model.
        max_length: Of prompt and output together, in tokens.
        eos: Ids that end an output unless it ignores them.
        text: Whether there is a tokenizer.

    Raises:
        InvalidRequest: names the field and the fix.
    """
    sampling = request.sampling
    _check_ids("token_ids", request.token_ids, vocab_size)
    _check_ids("sampling.logit_bias", sampling.logit_bias, vocab_size)
    _check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids or (), vocab_size)
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, vocab_size)
    if not request.token_ids:
        raise InvalidRequest("token_ids", "the prompt is empty: give at least one token id")
    needed = len(request.token_ids) + (sampling.max_tokens or 1)
    if needed > max_length:
        raise InvalidRequest(
            "sampling.max_tokens",
            f"prompt and max_tokens need {needed} tokens, the maximum length is "
            f"{max_length}: shorten the prompt or lower max_tokens",
            status=413,
        )
    if sampling.stop and not text:
        raise InvalidRequest(
            "sampling.stop",
            "the model has no tokenizer to find stop strings with: use stop_token_ids",
        )
    allowed = sampling.allowed_token_ids
    if sampling.min_tokens and allowed is not None and stop_ids(sampling, eos).issuperset(allowed):
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
