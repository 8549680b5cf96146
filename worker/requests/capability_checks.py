"""Refuse by name what an engine does not support, before it sees the request.

An adapter declares `Capabilities` and needs no such checks of its own; its `validate` only refuses
what depends on the model, such as ids beyond the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection

from rollout_common.wire import Capabilities, SamplingParams
from rollout_worker.engine import EngineRequest, InvalidRequest

_DEFAULTS = SamplingParams()
_TRUNCATION = frozenset({"top_p", "top_k", "min_p"})
_NEUTRAL = frozenset({"max_tokens", "n", "seed", "stop", "stop_token_ids", "ignore_eos"})
"""Fields that leave the distribution a token is sampled from unchanged."""


def check_capabilities(request: EngineRequest, able: Capabilities) -> None:
    """Refuse what the engine's capabilities exclude.

    Raises:
        InvalidRequest: names the field and the fix.
    """
    for field in sorted(_changed_fields(request.sampling) - {"max_tokens", "n", "seed", "stop"}):
        if field not in able.sampling:
            default = getattr(_DEFAULTS, field)
            raise _unsupported_field(f"sampling.{field}", f"leave it at its default ({default!r})")
    asked = {
        "sampling.stop": (request.sampling.stop, able.stop_strings, "use stop_token_ids"),
        "sampling.seed": (request.sampling.seed is not None, able.seed, "leave the seed out"),
        "priority": (request.priority, able.priority, "leave it at 0"),
        "cache_salt": (request.cache_salt is not None, able.cache_salt, "leave it out"),
    }
    for field, (wanted, can, fix) in asked.items():
        if wanted and not can:
            raise _unsupported_field(field, fix)
    _check_logprobs(request, able)


def _check_logprobs(request: EngineRequest, able: Capabilities) -> None:
    """Serve either kind where both have the same values; otherwise it must be declared."""
    altering = _altering_fields(request.sampling)
    if request.logprobs is None:
        return
    if not able.logprobs:
        raise _unsupported_field("logprobs", "it records no logprobs, use 'none'")
    if not altering:
        return
    if request.logprobs not in able.logprobs:
        others = " or ".join(able.logprobs)
        raise _unsupported_field(
            "logprobs",
            f"with {_join_names(altering)} set, {request.logprobs!r} logprobs differ from the ones it"
            f" records ({others}): ask for {others}, or leave those parameters at their defaults",
        )
    beyond = altering.difference(able.sampling_logprobs)
    if request.logprobs == "sampling" and beyond:
        instead = "ask for 'raw'" if "raw" in able.logprobs else "use 'none'"
        raise _unsupported_field(
            "logprobs",
            f"it can't record 'sampling' logprobs with {_join_names(beyond)} set: {instead}, or leave"
            " those parameters at their defaults",
        )


def _altering_fields(sampling: SamplingParams) -> frozenset[str]:
    """Fields that change the distribution from the model's own; T = 0 counts as T = 1."""
    changed = _changed_fields(sampling) - _NEUTRAL
    if sampling.temperature == 0:
        changed -= _TRUNCATION | {"temperature"}
    return changed


def _changed_fields(sampling: SamplingParams) -> frozenset[str]:
    fields = SamplingParams.model_fields
    return frozenset(f for f in fields if getattr(sampling, f) != getattr(_DEFAULTS, f))


def _join_names(fields: Collection[str]) -> str:
    return ", ".join(sorted(fields))


def _unsupported_field(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(field, f"this engine does not support it: {what}")
