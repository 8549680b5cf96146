"""What an engine declares that it can't do, refused by name before it sees the request.

An adapter declares `Capabilities` and is spared these checks; its own `validate` refuses what
depends on the model, such as ids beyond the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection

from rollout_worker.engine import EngineRequest, InvalidRequest
from rollout_worker.schemas import Capabilities, SamplingParams

_DEFAULTS = SamplingParams()
_TRUNCATION = frozenset({"top_p", "top_k", "min_p"})
_NEUTRAL = frozenset({"max_tokens", "n", "seed", "stop", "stop_token_ids", "ignore_eos"})
"""Fields that do not alter the distribution which a token is drawn from."""


def check_abilities(request: EngineRequest, able: Capabilities) -> None:
    """Refuse what the engine declares that it can't do.

    Raises:
        InvalidRequest: names the field and the fix.
    """
    for field in sorted(_changed(request.sampling) - {"max_tokens", "n", "seed", "stop"}):
        if field not in able.sampling:
            default = getattr(_DEFAULTS, field)
            raise _unable(f"sampling.{field}", f"leave it at its default ({default!r})")
    asked = {
        "sampling.stop": (request.sampling.stop, able.stop_strings, "use stop_token_ids"),
        "sampling.seed": (request.sampling.seed is not None, able.seed, "leave the seed out"),
        "priority": (request.priority, able.priority, "leave it at 0"),
        "cache_salt": (request.cache_salt is not None, able.cache_salt, "leave it out"),
    }
    for field, (wanted, can, fix) in asked.items():
        if wanted and not can:
            raise _unable(field, fix)
    _check_logprobs(request, able)


def _check_logprobs(request: EngineRequest, able: Capabilities) -> None:
    """Either kind goes where both are the same numbers; else it must have been declared."""
    altering = _altering(request.sampling)
    if request.logprobs is None:
        return
    if not able.logprobs:
        raise _unable("logprobs", "it records none, ask for 'none'")
    if not altering:
        return
    if request.logprobs not in able.logprobs:
        others = " or ".join(able.logprobs)
        raise _unable(
            "logprobs",
            f"{request.logprobs!r} differ from those it records ({others}) once {_names(altering)}"
            f" is set: ask for {others}, or leave the sampling parameters at their defaults",
        )
    beyond = altering.difference(able.sampling_logprobs)
    if request.logprobs == "sampling" and beyond:
        instead = "ask for 'raw'" if "raw" in able.logprobs else "leave logprobs out ('none')"
        raise _unable(
            "logprobs",
            f"it has no logprobs of the distribution that {_names(beyond)} makes: {instead}, or"
            " leave that parameter at its default",
        )


def _altering(sampling: SamplingParams) -> frozenset[str]:
    """Fields that make the distribution differ from the model's; T = 0 counts as T = 1."""
    changed = _changed(sampling) - _NEUTRAL
    if sampling.temperature == 0:
        changed -= _TRUNCATION | {"temperature"}
    return changed


def _changed(sampling: SamplingParams) -> frozenset[str]:
    fields = SamplingParams.model_fields
    return frozenset(f for f in fields if getattr(sampling, f) != getattr(_DEFAULTS, f))


def _names(fields: Collection[str]) -> str:
    return ", ".join(sorted(fields))


def _unable(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(field, f"this engine can't do that: {what}")
