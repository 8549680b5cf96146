"""Routes of the control port: state, holds, abort, weights. Every one asks who calls."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, FastAPI, Header

from .auth import CONTROL, SEE, STAGE, Authorizer, Right
from .schemas import (
    AbortRequest,
    AbortResponse,
    CommitRequest,
    CommitResponse,
    DiscardRequest,
    DiscardResponse,
    PauseRequest,
    ReleaseRequest,
    RequireRequest,
    SleepRequest,
    StagedWeights,
    StageRequest,
    WakeRequest,
    WeightsState,
    WorkerState,
)
from .service import Worker
from .web import MIB, new_app

_RELEASE = ReleaseRequest()
_PAUSE = PauseRequest()
_SLEEP = SleepRequest()
_WAKE = WakeRequest()


def control_app(worker: Worker, authorizer: Authorizer) -> FastAPI:
    """The application of the control port."""
    # A body is read before its caller is known: strangers must not send much.
    app = new_app(
        "rollout-worker control", "State, sleep and weights of one worker.", max_body_bytes=MIB
    )

    def needs(right: Right) -> object:
        async def check(authorization: Annotated[str | None, Header()] = None) -> str:
            return await authorizer.check(authorization, right)

        # The caller is known before its body is looked at.
        return Depends(check)

    _add_holds(app, worker, needs(SEE), needs(CONTROL))
    _add_requests(app, worker, needs(CONTROL))
    _add_weights(app, worker, needs(STAGE), needs(CONTROL))
    return app


def _add_holds(app: FastAPI, worker: Worker, see: object, control: object) -> None:
    verbs = worker.verbs

    @app.get("/v1/state")
    async def state(caller: str = see) -> WorkerState:  # type: ignore[assignment]
        """Everything about this worker."""
        return worker.state(caller)

    @app.post("/v1/pause")
    async def pause(caller: str = control, body: PauseRequest = _PAUSE) -> WorkerState:  # type: ignore[assignment]
        """Hold the worker Paused; answers once it is."""
        await verbs.pause(caller, body)
        return worker.state(caller)

    @app.post("/v1/resume")
    async def resume(caller: str = control, body: ReleaseRequest = _RELEASE) -> WorkerState:  # type: ignore[assignment]
        """Drop the caller's pause; 409 `held` if others still hold."""
        await verbs.resume(caller, body)
        return worker.state(caller)

    @app.post("/v1/sleep")
    async def sleep(caller: str = control, body: SleepRequest = _SLEEP) -> WorkerState:  # type: ignore[assignment]
        """Hold the worker Asleep; answers once its memory is given back."""
        await verbs.sleep(caller, body)
        return worker.state(caller)

    @app.post("/v1/wake")
    async def wake(caller: str = control, body: WakeRequest = _WAKE) -> WorkerState:  # type: ignore[assignment]
        """Drop the caller's sleep for these tags; answers once the memory is back."""
        await verbs.wake(caller, body)
        return worker.state(caller)


def _add_requests(app: FastAPI, worker: Worker, control: object) -> None:
    @app.post("/v1/abort")
    async def abort(body: AbortRequest, caller: str = control) -> AbortResponse:  # type: ignore[assignment]
        """End requests with partial output; answers once they ended."""
        return await worker.verbs.abort(body)

    @app.post("/v1/cache/reset")
    async def reset_cache(caller: str = control) -> WorkerState:  # type: ignore[assignment]
        """Forget reusable prefixes; running requests are unaffected."""
        await worker.verbs.reset_cache()
        return worker.state(caller)


def _add_weights(app: FastAPI, worker: Worker, stage_right: object, control: object) -> None:
    @app.post("/v1/weights/stage", status_code=202)
    async def stage(body: StageRequest, caller: str = stage_right) -> StagedWeights:  # type: ignore[assignment]
        """Begin to stage beside the serving weights; progress on GET /v1/weights."""
        return await worker.updates.stage(body)

    @app.post("/v1/weights/commit")
    async def commit(body: CommitRequest, caller: str = control) -> CommitResponse:  # type: ignore[assignment]
        """Flip to the staged weights in one critical section."""
        return await worker.commits.commit(body)

    @app.post("/v1/weights/discard")
    async def discard(body: DiscardRequest, caller: str = stage_right) -> DiscardResponse:  # type: ignore[assignment]
        """Drop this identity from the staging slot."""
        return await worker.updates.discard(body)

    @app.post("/v1/require")
    async def require(body: RequireRequest, caller: str = control) -> WeightsState:  # type: ignore[assignment]
        """Lift the fence and set the floor of admission."""
        return worker.updates.require(body)
