"""What a request for scores or replay records must meet before it is queued."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rollout_common.wire import MAX_SCORED_VALUES, Capabilities
from rollout_worker.engine import EngineRequest, InvalidRequest

MAX_TOP_VALUES = 2**26
"""Most of the likeliest tokens with the outputs of one request: 512 MB. 262,144 tokens have 256 each."""


def check_scoring(
    requests: Sequence[EngineRequest], able: Capabilities, engine: str, altering: Collection[str]
) -> None:
    """Refuse scores that the engine has not, or more of them than a response may hold.

    A prompt is scored with the model's own distribution: it was not drawn with the request's parameters.
    `altering`: fields of `sampling` that make the distribution of its tokens another one.

    Raises:
        InvalidRequest: Names the field, the engine and the fix.
    """
    request = requests[0]
    if request.scored is not None and not able.prompt_logprobs:
        text = f"the {engine} engine scores no prompts: leave it out"
        raise InvalidRequest("prompt_logprobs", text)
    if request.top_logprobs > able.top_logprobs:
        text = f"the {engine} engine gives at most {able.top_logprobs}: ask for fewer"
        raise InvalidRequest("top_logprobs", text)
    if request.scored is not None and request.logprobs == "sampling" and altering:
        names = ", ".join(sorted(altering))
        raise InvalidRequest(
            "prompt_logprobs",
            f"the {engine} engine scores a prompt with the model's own distribution, and with {names} set 'sampling'"
            " logprobs are of another one: ask for logprobs 'raw', or leave those parameters at their defaults",
        )
    _check_scored_values(requests)


def _check_scored_values(requests: Sequence[EngineRequest]) -> None:
    """Bound what a response holds: it is in memory until it is sent."""
    request = requests[0]
    start, end = request.scored or (0, 0)
    scored = (end - start) * (1 + request.top_logprobs)
    if scored > MAX_SCORED_VALUES:
        raise InvalidRequest(
            "prompt_logprobs",
            f"{end - start} positions with {request.top_logprobs} top_logprobs are {scored} values, and a response"
            f" holds {MAX_SCORED_VALUES}: ask for [from, to] in several requests, or for fewer top_logprobs",
        )
    tokens = len(requests) * (request.sampling.max_tokens or 0)
    if tokens * request.top_logprobs > MAX_TOP_VALUES:
        raise InvalidRequest(
            "top_logprobs",
            f"{tokens} tokens with {request.top_logprobs} each are more than the {MAX_TOP_VALUES} that a response"
            " holds: set sampling.max_tokens, or lower it, sampling.n or top_logprobs",
        )


def check_records(request: EngineRequest, able: Capabilities, engine: str) -> None:
    """Refuse replay records that the engine, or its model, does not have.

    Raises:
        InvalidRequest: Names the field, the engine and the fix.
    """
    for field, asked, can in (
        ("return_routed_experts", request.routed_from is not None, able.return_routed_experts),
        ("return_sampling_mask", request.masks, able.return_sampling_mask),
    ):
        if asked and not can:
            what = "no experts of this model" if "experts" in field else "no masks"
            raise InvalidRequest(field, f"the {engine} engine records {what}: leave it out")
        if asked and request.sampling.max_tokens == 0:
            raise InvalidRequest(field, "max_tokens 0 samples nothing to replay: leave it out")
