"""A member's only port: probes for everybody, and the gang's routes for its head."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Annotated

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_common.wire.body_decoding import CONTROL_LIMITS
from rollout_common.wire.gang_models import SLOT_PATTERN, GangSlot, GangState, GangTurn, SlotRequest
from rollout_common.wire.problems import ProblemError
from rollout_worker.device_turn import DeviceTurn
from rollout_worker.engine import EngineMember, GangMembership
from rollout_worker.gang.gang_addresses import EXIT_GANG_BROKEN, GangBroken
from rollout_worker.gang.member_slots import Claim
from rollout_worker.gang.member_worker import MemberWorker
from rollout_worker.settings import WorkerSettings

from . import port_connections, serving_certificate
from .access_rights import CONTROL_WORKER, Authorizer
from .auth import make_authorizer
from .browser_guard import BrowserGuard
from .port_app import new_app, problem_response
from .port_connections import ConnectionPool, raise_descriptor_limit
from .server import UvicornServer, bind_port, uvicorn_config
from .settings import ANSWER_FLUSH_SECONDS

logger = logging.getLogger(__name__)

PROBE_PATHS = ("/health", "/ready")

Leader = Annotated[str, Query(min_length=1, max_length=64)]
SlotPath = Annotated[str, Path(pattern=SLOT_PATTERN)]
Attempt = Annotated[int, Path(ge=1)]


class HeadAuthentication:
    """Lets the head in, and everybody to the probes."""

    def __init__(self, app: ASGIApp, authorizer: Authorizer) -> None:
        self._app = app
        self._authorizer = authorizer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401, 403 or 503."""
        if scope["type"] == "http" and scope["path"] not in PROBE_PATHS:
            address = (scope.get("client") or ("",))[0]
            try:
                header = Headers(scope=scope).get("authorization")
                await self._authorizer.check_caller(header, CONTROL_WORKER, address)
            except ProblemError as error:
                await problem_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_member_app(worker: MemberWorker, authorizer: Authorizer) -> FastAPI:
    """The application of a member's control port."""
    app = new_app(
        "rollout-worker member",
        "One node of a replica that spans several.",
        limits=lambda: CONTROL_LIMITS,
    )
    app.add_middleware(HeadAuthentication, authorizer=authorizer)
    if worker.settings.auth == "none":
        app.add_middleware(BrowserGuard)
    _add_probe_routes(app, worker)
    _add_gang_routes(app, worker)
    _add_turn(app, worker)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def elsewhere(path: str, request: Request) -> Response:
        """Nothing else is answered here."""
        settings = worker.settings
        raise ProblemError(
            "not-found",
            f"no route /{path}: this is rank {settings.rank} of a gang of {settings.nodes}; ask its"
            f" head at {settings.leader_address}",
        )

    return app


def _add_probe_routes(app: FastAPI, worker: MemberWorker) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Answer while the process makes progress."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Answer 200 once this node's ranks run."""
        if not worker.is_ready:
            raise ProblemError("starting", "the ranks of this node do not run yet", retry_after=2)
        return {"status": "ready"}


def _add_gang_routes(app: FastAPI, worker: MemberWorker) -> None:
    @app.get("/v1/gang/state")
    async def state(leader: Leader, started: bool = False) -> GangState:
        """How this node is."""
        worker.note_head(leader, started=started)
        return worker.gang_state()

    @app.put("/v1/gang/slots/{slot}", status_code=202)
    async def open_slot(slot: SlotPath, leader: Leader, body: SlotRequest) -> GangSlot:
        """Begin to fill a slot."""
        worker.note_head(leader)
        return worker.open_slot(slot, body)

    @app.get("/v1/gang/slots/{slot}")
    async def look(slot: SlotPath, leader: Leader) -> GangSlot:
        """How far a slot is; Filled is this node's vote."""
        worker.note_head(leader)
        return worker.slots.slot_view(slot)

    @app.delete("/v1/gang/slots/{slot}")
    async def close_slot(slot: SlotPath, leader: Leader) -> GangState:
        """Give a slot back, if there is one."""
        worker.note_head(leader)
        await worker.slots.close(slot)
        return worker.gang_state()


def _add_turn(app: FastAPI, worker: MemberWorker) -> None:
    @app.put("/v1/gang/turn/{attempt}")
    async def take(attempt: Attempt, leader: Leader) -> GangTurn:
        """Take this node's turn for its devices; answers after a moment, however far it is."""
        worker.note_head(leader)
        return await worker.member_turn.take(attempt)

    @app.post("/v1/gang/turn/{attempt}/use")
    async def use(attempt: Attempt, leader: Leader) -> GangTurn:
        """Keep the turn: all nodes have theirs."""
        worker.note_head(leader)
        return await worker.member_turn.use(attempt)

    @app.delete("/v1/gang/turn/{attempt}")
    async def give(attempt: Attempt, leader: Leader, started: bool) -> GangTurn:
        """Give it back."""
        worker.note_head(leader, started=started)
        return worker.give_turn(attempt)


def make_head_authorizer(settings: WorkerSettings) -> Authorizer:
    """The authorizer of a member for `--auth`.

    Raises:
        BadSettings: a token file can't be used.
    """
    if settings.auth != "kubernetes":
        return make_authorizer(settings)
    from .head_token_review import HeadTokenReview

    return HeadTokenReview(settings)


async def serve_member(
    settings: WorkerSettings, gang: GangMembership, create: Callable[[], EngineMember], claim: Claim
) -> int:
    """Serve until SIGTERM or SIGINT, or until the gang is broken; returns the exit status.

    Raises:
        BadSettings: the port or the credentials can't be used.
    """
    raise_descriptor_limit()
    locks = DeviceTurn(settings, None) if settings.turn_devices else None
    worker = MemberWorker(settings, gang, create, claim, locks)
    authorizer, held = (
        make_head_authorizer(settings),
        serving_certificate.serving_certificate(settings),
    )
    sock = bind_port(settings.control_host, settings.control_port, "--control-port")
    server = UvicornServer(
        uvicorn_config(make_member_app(worker, authorizer)),
        ConnectionPool(port_connections.connection_quota().control),
        None if held is None else lambda: held.context,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    logger.info("serving a member", extra={"control_port": sock.getsockname()[1]})
    tasks = [
        asyncio.create_task(server.serve([sock])),
        asyncio.create_task(worker.run_until_broken()),
    ]
    asked = asyncio.create_task(stop.wait())
    if held is not None:
        tasks.append(asyncio.create_task(held.keep_reloading()))
    try:
        await asyncio.wait([*tasks, asked], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            await worker.wait_released()
            return 0
        return _exit_status(tasks)
    finally:
        asked.cancel()
        server.should_exit = True
        for task in tasks[1:]:
            task.cancel()
        await worker.stop_worker()
        await asyncio.wait(tasks, timeout=ANSWER_FLUSH_SECONDS + 5)
        await authorizer.close()
        logger.info("stopped")


def _exit_status(tasks: list[asyncio.Task[None]]) -> int:
    """Say why it ended by itself."""
    for task in tasks:
        error = task.exception() if task.done() and not task.cancelled() else None
        if isinstance(error, GangBroken):
            logger.critical("the gang is broken: %s", error)
            return EXIT_GANG_BROKEN
        if error is not None:
            logger.critical("a part of the member broke", exc_info=error)
    return 1
