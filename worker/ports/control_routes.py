"""Routes of the control port: state, holds, abort, weights. All of them require authentication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from fastapi import Depends, FastAPI, Query, Request
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.types import Scope

from rollout_common import wire
from rollout_worker.ports.callers.auth import (
    CONTROL_WORKER,
    SEE_STATE,
    STAGE_WEIGHTS,
    AccessRight,
    Authorizer,
)
from rollout_worker.requests.http_requests import CONTROL_LIMITS
from rollout_worker.service import WorkerService

from .port_app import PortGuard, new_app, note_caller, refuse_browser
from .settings import MAX_WAIT_SECONDS

LESSER_RIGHTS: Final[Mapping[str, AccessRight]] = {
    "/v1/state": SEE_STATE,
    "/v1/weights/dtypes": SEE_STATE,
    "/openapi.json": SEE_STATE,
    "/v1/weights/stage": STAGE_WEIGHTS,
    "/v1/weights/discard": STAGE_WEIGHTS,
}
"""Paths that need a lesser right than `CONTROL_WORKER`, which all others need."""

_RELEASE = wire.ReleaseRequest()
_PAUSE = wire.PauseRequest()
_SLEEP = wire.SleepRequest()
_WAKE = wire.WakeRequest()
_RESET = wire.ResetRequest()


def make_control_app(worker: WorkerService, authorizer: Authorizer) -> FastAPI:
    """The application of the control port."""
    app = new_app(
        "rollout-worker control",
        "State, sleep and weights of one worker.",
        limits=lambda: CONTROL_LIMITS,
    )

    async def check_caller(scope: Scope, headers: Headers) -> None:
        right = LESSER_RIGHTS.get(scope["path"], CONTROL_WORKER)
        await note_caller(authorizer, right, scope, headers)

    app.add_middleware(PortGuard, check=check_caller)
    if worker.settings.auth == "none":
        app.add_middleware(PortGuard, check=refuse_browser)
    # For the OpenAPI document only: the guard has already checked.
    app.router.dependencies.append(Depends(HTTPBearer(auto_error=False)))
    _add_hold_routes(app, worker)
    _add_request_routes(app, worker)
    _add_weight_routes(app, worker)
    return app


async def _caller_name(request: Request) -> str:
    # Not a plain function: FastAPI runs those in threads, where calls would overtake each other.
    return str(request.state.caller)


Caller = Annotated[str, Depends(_caller_name)]
Since = Annotated[int | None, Query(ge=0)]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS)]


def _add_hold_routes(app: FastAPI, worker: WorkerService) -> None:
    verbs = worker.verbs

    @app.get("/v1/state")
    async def state(caller: Caller, since: Since = None, wait: Wait = 0.0) -> wire.WorkerState:
        """Return the full state of this worker: at once, or when it is another than `since`, after `wait` seconds at most."""
        if since is not None and wait:
            await worker.states.wait_past(since, wait)
        return worker.worker_state(caller)

    @app.post("/v1/pause")
    async def pause(caller: Caller, body: wire.PauseRequest = _PAUSE) -> wire.WorkerState:
        """Hold the worker Paused; answers once it is paused."""
        await verbs.pause_worker(caller, body)
        return worker.worker_state(caller)

    @app.post("/v1/resume")
    async def resume(caller: Caller, body: wire.ReleaseRequest = _RELEASE) -> wire.WorkerState:
        """Release the caller's pause; 409 `held` if others still hold the worker."""
        await verbs.resume_worker(caller, body)
        return worker.worker_state(caller)

    @app.post("/v1/sleep")
    async def sleep(caller: Caller, body: wire.SleepRequest = _SLEEP) -> wire.WorkerState:
        """Hold the worker Asleep; answers once its memory is released."""
        await verbs.put_to_sleep(caller, body)
        return worker.worker_state(caller)

    @app.post("/v1/wake")
    async def wake(caller: Caller, body: wire.WakeRequest = _WAKE) -> wire.WorkerState:
        """Release the caller's sleep for these tags; answers once their memory is restored."""
        await verbs.wake_worker(caller, body)
        return worker.worker_state(caller)


def _add_request_routes(app: FastAPI, worker: WorkerService) -> None:
    @app.post("/v1/abort")
    async def abort(caller: Caller, body: wire.AbortRequest) -> wire.AbortResponse:
        """End requests with partial output; answers once they have ended."""
        return await worker.verbs.abort_requests(caller, body)

    @app.post("/v1/cache/reset")
    async def reset_cache(caller: Caller, body: wire.ResetRequest = _RESET) -> wire.WorkerState:
        """Clear the prefix cache; running requests are unaffected."""
        await worker.verbs.reset_prefix_cache(caller)
        return worker.worker_state(caller)


def _add_weight_routes(app: FastAPI, worker: WorkerService) -> None:
    @app.post("/v1/weights/stage", status_code=202)
    async def stage(caller: Caller, body: wire.StageRequest) -> wire.StagedWeights:
        """Start staging weights next to the serving ones; GET /v1/weights shows progress."""
        return await worker.updates.stage_weights(caller, body)

    @app.post("/v1/weights/commit")
    async def commit(caller: Caller, body: wire.CommitRequest) -> wire.Committed:
        """Switch to the staged weights in one critical section."""
        done = await worker.commits.commit_weights(caller, body)
        return wire.Committed(**dict(done), state=worker.worker_state(caller))

    @app.get("/v1/weights/dtypes")
    async def dtypes(caller: Caller) -> wire.WeightsDtypes:
        """Return the dtypes that every version of the weights has to have."""
        return worker.updates.checkpoint_dtypes()

    @app.post("/v1/weights/discard")
    async def discard(caller: Caller, body: wire.DiscardRequest) -> wire.DiscardResponse:
        """Discard this identity from the staging slot."""
        return await worker.updates.discard_staged(caller, body)

    @app.post("/v1/weights/offer")
    async def offer(caller: Caller, body: wire.OfferRequest) -> wire.OfferResponse:
        """Offer the pushed weights that this worker keeps to another one: a ticket to fetch them."""
        return worker.updates.offer_weights(caller, body)

    @app.post("/v1/require")
    async def require(caller: Caller, body: wire.RequireRequest) -> wire.WeightsState:
        """Lift the fence and set the admission floor."""
        return worker.updates.raise_fence(caller, body)
