"""From a request to an output in the making: what is refused, and what is set up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from rollout_worker.engine import EngineDelta, EngineRequest, InvalidRequest
from rollout_worker.engines.fitting import check_fits, stop_ids
from rollout_worker.engines.folder import decode
from rollout_worker.engines.stopping import StopChecker

from .loading import Loaded
from .processing import SamplerState
from .sequence import Sequence


def check(request: EngineRequest, loaded: Loaded) -> None:
    """Refuse what cannot be served.

    Raises:
        InvalidRequest: names the field and the fix.
    """
    check_fits(
        request,
        vocab_size=loaded.vocab_size,
        max_length=loaded.max_length,
        eos=loaded.eos_token_ids,
        text=loaded.tokenizer is not None,
    )
    if request.cache_salt is not None:
        raise InvalidRequest(
            "cache_salt", "the hf engine has no prefix cache to salt: leave cache_salt out"
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
        return decode(tokenizer, tokens, special=True)

    return Sequence(
        request=request,
        sampler=SamplerState(
            request.sampling, request.token_ids, stops, loaded.vocab_size, loaded.model.device
        ),
        stop=StopChecker(request.sampling, loaded.eos_token_ids, text if tokenizer else None),
        arrival=arrival,
        sink=sink,
    )
