"""What a request must meet before it is queued, as ordered checks that name the fix.

Everything here is fast and free of side effects, so a request is checked and registered in one
step of the event loop, and no commit can come in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_common.wire import (
    ActiveWeights,
    Capabilities,
    GenerateRequest,
    Lifecycle,
    LogprobsOf,
    SamplingParams,
    WeightsId,
)
from rollout_common.wire.problems import ProblemError
from rollout_worker.core.holds import WantedState
from rollout_worker.core.worker_runtime import WorkerRuntime
from rollout_worker.engine import Engine, EngineInfo, EngineRequest, Grammar, InvalidRequest
from rollout_worker.pictures.picture import Picture

from .record_checks import check_records, check_scoring

MAX_SEED = 2**63

_DEFAULTS = SamplingParams()
_TRUNCATION = frozenset({"top_p", "top_k", "min_p"})
_NEUTRAL = frozenset({"max_tokens", "n", "seed", "stop", "stop_token_ids", "ignore_eos"})
"""Fields that leave the distribution a token is sampled from unchanged."""

_NO_ENGINE = {
    Lifecycle.STARTING: ("starting", "the worker is starting", 2),
    Lifecycle.LOADING: ("starting", "the model is loading", 2),
    Lifecycle.FAILED: ("failed", "the engine failed and is being restarted", 5),
}


@dataclass(frozen=True, slots=True)
class PreparedParts:
    """What takes time to make of a request, and so is made before its admission: a checked grammar, decoded pictures."""

    grammar: Grammar | None = None
    pictures: tuple[Picture, ...] = ()


NO_PARTS = PreparedParts()


def serving_refusal(
    runtime: WorkerRuntime, active: WeightsId | None, required: WeightsId | None
) -> ProblemError | None:
    """Why no request may run now, or None. Readiness follows the same answer.

    `active`: the serving weights; `required`: the floor below which nothing is served.
    """
    if not runtime.admitting:
        return _admission_refusal(
            "shutting-down", "the worker is shutting down: use another replica", 1
        )
    state = runtime.lifecycle.current_state
    if state in _NO_ENGINE:
        return _admission_refusal(*_NO_ENGINE[state])
    if not runtime.is_alive:
        return engine_failed_problem()
    want = runtime.hold_target().want
    if want is WantedState.ASLEEP or state in (
        Lifecycle.DRAINING,
        Lifecycle.ASLEEP,
        Lifecycle.WAKING,
    ):
        return _admission_refusal(
            "asleep", "the worker is asleep: wake it, or use another replica", 5
        )
    if want is WantedState.PAUSED or state is not Lifecycle.ACTIVE:
        return _admission_refusal("paused", "the worker is paused: resume it, or try again", 1)
    return _fence_refusal(runtime, active, required)


def _fence_refusal(
    runtime: WorkerRuntime, active: WeightsId | None, required: WeightsId | None
) -> ProblemError | None:
    if required is None:
        if runtime.settings.pool is None:
            return None
        return _admission_refusal(
            "fenced", "no weights floor has been set yet (POST /v1/require)", 1
        )
    if active is None or active < required:
        return ProblemError(
            "fenced",
            f"the active weights {active} are below the required {required}: stage and commit"
            f" {required} or later, or use another replica",
            retry_after=1,
            active=_identity_fields(active),
            required=_identity_fields(required),
        )
    return None


def engine_failed_problem() -> ProblemError:
    """What requests get from the moment in which an engine dies."""
    return _admission_refusal(*_NO_ENGINE[Lifecycle.FAILED])


def _admission_refusal(slug: str, detail: str, retry_after: int) -> ProblemError:
    return ProblemError(slug, f"{detail}; nothing was generated", retry_after=retry_after)


def _identity_fields(weights: WeightsId | None) -> dict[str, int] | None:
    return None if weights is None else weights.model_dump()


def check_version(request: GenerateRequest, active: WeightsId) -> WeightsId | None:
    """Compare the request's bounds with the active weights; return the exact identity, if any.

    Raises:
        ProblemError: 409 `version-not-met`, retryable, which names the active weights.
    """
    epoch = active.epoch if request.epoch is None else request.epoch
    exact = None
    if request.exact_version is not None:
        exact = WeightsId(epoch=epoch, version=request.exact_version)
        if exact != active:
            raise _version_not_met(f"exactly {exact}", active)
    if request.min_version is not None or request.epoch is not None:
        floor = WeightsId(epoch=epoch, version=request.min_version or 0)
        if active < floor:
            raise _version_not_met(f"at least {floor}", active)
    return exact


def check_adapter(name: str | None, active: ActiveWeights, able: Capabilities) -> None:
    """Refuse a request for an adapter that the active weights don't have.

    Raises:
        ProblemError: 422 that names those they have.
    """
    served = [adapter.name for adapter in active.adapters]
    if name is None or name in served:
        return
    if not able.adapters:
        fix = "this engine serves no adapters as it was started: give it --enable-lora, or leave adapter out"
    else:
        named = f"have {', '.join(served)}" if served else "have none"
        fix = f"no adapter {name!r} serves here, weights {active.identity} {named}: publish it, or use another name"
    raise invalid_problem(InvalidRequest("adapter", fix))


def _version_not_met(wanted: str, active: WeightsId) -> ProblemError:
    return ProblemError(
        "version-not-met",
        f"the request wants weights {wanted}, but {active} are active: try again after the update,"
        " use another replica, or change the bound",
        retry_after=1,
        active=_identity_fields(active),
    )


def expand_request(
    request: GenerateRequest,
    request_id: str,
    engine: Engine,
    info: EngineInfo,
    default_logprobs: LogprobsOf,
    parts: PreparedParts = NO_PARTS,
) -> Sequence[EngineRequest]:
    """Return one engine request per output, with lengths, logprobs and seeds resolved.

    Raises:
        ProblemError: 413 or 422 that names the field.
    """
    sampling = request.sampling.model_copy(
        update={"max_tokens": _resolve_max_tokens(request, info.max_length), "n": 1}
    )
    logprobs: LogprobsOf | None = default_logprobs
    if request.logprobs is not None:
        logprobs = None if request.logprobs == "none" else request.logprobs
    seed = request.sampling.seed
    requests = [
        EngineRequest(
            request_id=f"{request_id}/{index}",
            token_ids=request.token_ids,
            sampling=sampling
            if seed is None
            else sampling.model_copy(update={"seed": (seed + index) % MAX_SEED}),
            logprobs=logprobs,
            priority=request.priority,
            cache_salt=request.cache_salt,
            session_id=request.session_id,
            streamed=request.stream,
            # The outputs share their prompt: the first one scores it.
            scored=request.scored_range if index == 0 else None,
            top_logprobs=request.top_logprobs,
            grammar=parts.grammar,
            pictures=parts.pictures,
            routed_from=_routed_from(request, index),
            masks=request.return_sampling_mask,
            adapter=request.adapter,
            outputs=request.sampling.n,
        )
        for index in range(request.sampling.n)
    ]
    try:
        check_capabilities(requests[0], engine.capabilities)
        if requests[0].scored or requests[0].top_logprobs:
            altering = altering_fields(requests[0])
            check_scoring(requests, engine.capabilities, info.engine, altering)
        if requests[0].masks or requests[0].routed_from is not None:
            check_records(requests[0], engine.capabilities, info.engine)
        engine.validate(requests[0])
    except InvalidRequest as error:
        raise invalid_problem(error) from error
    return requests


def _routed_from(request: GenerateRequest, index: int) -> int | None:
    if not request.return_routed_experts:
        return None
    # The outputs share their prompt: the first one has its experts.
    return 0 if index == 0 else len(request.token_ids) - 1


def invalid_problem(error: InvalidRequest) -> ProblemError:
    """The engine's refusal, as a problem that names the field."""
    named = f"{error.field}: {error}"
    return ProblemError(
        "unsupported", named, errors=[{"field": error.field, "message": str(error)}]
    )


def _resolve_max_tokens(request: GenerateRequest, max_length: int) -> int:
    prompt = len(request.token_ids)
    wanted = request.sampling.max_tokens
    room = max_length - prompt
    needed = max(1, request.sampling.min_tokens) if wanted is None else wanted
    if room < needed:
        raise _too_long_problem(prompt, needed, max_length)
    return room if wanted is None else wanted


def check_prompt_length(tokens: int, max_length: int) -> None:
    """Refuse a prompt that leaves no room for one token, before anything is done with its ids.

    Raises:
        ProblemError: 413.
    """
    if tokens >= max_length:
        raise _too_long_problem(tokens, 1, max_length)


def _too_long_problem(prompt: int, needed: int, max_length: int) -> ProblemError:
    return ProblemError(
        "too-long",
        f"{prompt} prompt tokens plus {needed} to generate exceed the maximum length of"
        f" {max_length}: shorten the prompt, or lower sampling.max_tokens or min_tokens",
        errors=[{"field": "token_ids", "message": f"{prompt} of {max_length} tokens"}],
    )


def check_queue_room(runtime: WorkerRuntime, waiting: int, wanted: int) -> None:
    """Refuse a request that does not fit in the queue.

    Raises:
        ProblemError: 429 with Retry-After; 422 if it never will.
    """
    limit = runtime.settings.max_queue
    if wanted > limit:
        said = f"{wanted} outputs never fit into the queue (--max-queue {limit}): ask for fewer"
        raise invalid_problem(InvalidRequest("sampling.n", said))
    if waiting + wanted > limit:
        raise ProblemError(
            "queue-full",
            f"{waiting} outputs are queued and --max-queue is {limit}: try again, or use another"
            " replica",
            retry_after=1,
            queued=waiting,
        )


NO_PICTURES = (
    "its model or the engine takes no pictures; serve one whose capabilities have `multimodal`"
)


def check_pictures_taken(able: Capabilities) -> None:
    """Refuse pictures before they are decoded, if the engine can't use them.

    Raises:
        ProblemError: 422.
    """
    if not able.multimodal:
        raise invalid_problem(_unsupported_field("multimodal", NO_PICTURES))


def check_capabilities(request: EngineRequest, able: Capabilities) -> None:
    """Refuse what the engine's capabilities exclude, before the engine sees the request.

    So an adapter needs no such checks of its own: its `validate` only refuses what depends on the model,
    such as ids beyond the vocabulary.

    Raises:
        InvalidRequest: Names the field and the fix.
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
        "multimodal": (request.pictures, able.multimodal, NO_PICTURES),
    }
    for field, (wanted, can, fix) in asked.items():
        if wanted and not can:
            raise _unsupported_field(field, fix)
    _check_logprobs(request, able)


def _check_logprobs(request: EngineRequest, able: Capabilities) -> None:
    """Serve either kind where both have the same values; otherwise it must be declared."""
    altering = altering_fields(request)
    if request.logprobs is None or request.sampling.max_tokens == 0:
        return
    if not able.logprobs:
        raise _unsupported_field("logprobs", "it records no logprobs, use 'none'")
    if not altering:
        return
    if request.logprobs not in able.logprobs:
        others, names = " or ".join(able.logprobs), ", ".join(sorted(altering))
        raise _unsupported_field(
            "logprobs",
            f"with {names} set, {request.logprobs!r} logprobs differ from the ones it"
            f" records ({others}): ask for {others}, or leave those parameters at their defaults",
        )
    beyond = altering.difference(able.sampling_logprobs, {"structured"})
    if request.logprobs == "sampling" and beyond:
        instead = "ask for 'raw'" if "raw" in able.logprobs else "use 'none'"
        names = ", ".join(sorted(beyond))
        raise _unsupported_field(
            "logprobs",
            f"it can't record 'sampling' logprobs with {names} set: {instead}, or leave"
            " those parameters at their defaults",
        )


def altering_fields(request: EngineRequest) -> frozenset[str]:
    """Fields that change the distribution from the model's own; T = 0 counts as T = 1."""
    changed = _changed_fields(request.sampling) - _NEUTRAL
    if request.sampling.temperature == 0:
        changed -= _TRUNCATION | {"temperature"}
    return changed if request.grammar is None else changed | {"structured"}


def _changed_fields(sampling: SamplingParams) -> frozenset[str]:
    fields = SamplingParams.model_fields
    return frozenset(f for f in fields if getattr(sampling, f) != getattr(_DEFAULTS, f))


def _unsupported_field(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(field, f"this engine does not support it: {what}")
