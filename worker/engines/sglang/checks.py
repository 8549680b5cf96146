"""What a request must meet before it is queued, and what the engine says that it can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_worker.engine import EngineRequest, InvalidRequest
from rollout_worker.engines.fitting import check_fits
from rollout_worker.schemas import Capabilities

from .model import Model

LEAST_TEMPERATURE = 1e-6
"""Below, SGLang takes a request for greedy and its temperature for 1."""


def check(request: EngineRequest, model: Model) -> None:
    """Refuse what cannot be served.

    Raises:
        InvalidRequest: names the field and the fix.
    """
    check_fits(
        request,
        vocab_size=model.vocab_size,
        max_length=model.max_length,
        eos=model.eos_token_ids,
        text=model.tokenizer is not None,
    )
    if 0 < request.sampling.temperature < LEAST_TEMPERATURE:
        raise InvalidRequest(
            "sampling.temperature",
            f"SGLang can't draw at {request.sampling.temperature:g}: use 0 (greedy) or at least "
            f"{LEAST_TEMPERATURE:g}",
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
