"""What to ask of the next attempt, so that an output continues as if it had never stopped. Pure."""

from __future__ import annotations

from rollout_client.routing.member_records import WeightsBounds
from rollout_common.wire import GenerateRequest, SamplingParams

from .output_draft import OutputDraft

SEED_STEP = 0x9E3779B97F4A7C15
"""An odd number far from any seed that callers use, so that continuations share no seed with them."""


def remaining_request(
    request: GenerateRequest,
    draft: OutputDraft,
    bounds: WeightsBounds,
    *,
    request_id: str,
    session_id: str,
    seconds: float,
) -> GenerateRequest:
    """Return the request for the rest of an output, `seconds` before its deadline.

    The tokens of the draft become part of the prompt.
    """
    tokens = draft.token_ids
    changes: dict[str, object] = {
        "request_id": request_id,
        "session_id": session_id,
        "token_ids": (*request.token_ids, *tokens) if tokens else request.token_ids,
        # The scores of the prompt came before the first token.
        "prompt_logprobs": None if tokens else request.prompt_logprobs,
        "sampling": remaining_sampling(request.sampling, len(tokens)),
        "deadline_seconds": max(0.001, seconds),
        "stream": True,
        "epoch": bounds.epoch,
        "min_version": bounds.min_version,
        "exact_version": bounds.exact_version,
    }
    return request.model_copy(update=changes)


def remaining_bounds(
    asked: WeightsBounds, draft: OutputDraft, *, one_version: bool
) -> WeightsBounds:
    """Return which weights may make the rest: those that the caller asked for, until there are tokens.

    If one version or exact weights are wanted, the rest must come from the same weights. Otherwise
    it must not come from older ones: while replicas commit one after the other, the next one may
    still be behind.
    """
    first, last = draft.first_weights, draft.last_weights
    if first is None or last is None:
        return asked
    if one_version or asked.exact_version is not None:
        return WeightsBounds(first.epoch, asked.min_version, first.version)
    return WeightsBounds.at_least(last)


def remaining_sampling(sampling: SamplingParams, tokens: int) -> SamplingParams:
    """Return the parameters after this many tokens: all attempts share one budget.

    The seed changes: the same one would draw the same random numbers again.
    """
    if not tokens:
        return sampling
    changes: dict[str, object] = {"min_tokens": max(0, sampling.min_tokens - tokens)}
    if sampling.max_tokens is not None:
        changes["max_tokens"] = sampling.max_tokens - tokens
    if sampling.seed is not None:
        changes["seed"] = (sampling.seed + SEED_STEP * tokens) % 2**63
    return sampling.model_copy(update=changes)


def rewind_length(request: GenerateRequest, tokens: int, *, end_known: bool) -> int:
    """Return how many of the last tokens the next attempt must sample again.

    - All of them with presence or frequency penalties. These count sampled tokens only: the next
      worker takes the tokens so far as prompt, and would not count them. So would a structured output: the
      next worker's grammar begins with what it samples.
    - Those that may be the beginning of a stop string: a worker looks for stop strings only in what
      it samples. Every token has at least one byte, so that many tokens hold any beginning, or a whole
      stop string: its last token may have come without the message that the output has ended.
    - The last one, unless the worker has said which ids end outputs (`end_known`): an output that was
      cut off right after its end must not continue.
    """
    sampling = request.sampling
    if request.structured is not None:
        return tokens
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        return tokens
    unsure = not sampling.ignore_eos and not end_known
    beginnings = max((len(text.encode()) for text in sampling.stop), default=0)
    return min(tokens, max(beginnings, int(unsure)))
