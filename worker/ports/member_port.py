"""A member's only port: probes for any caller, and the gang's routes for its head."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.types import Scope

from rollout_common.wire.gang_models import SLOT_PATTERN, GangSlot, GangState, GangTurn, SlotRequest
from rollout_common.wire.problems import ProblemError
from rollout_worker.device_turn import DeviceTurn
from rollout_worker.engine import GangMembership
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.gang.member_worker import MemberWorker
from rollout_worker.ports.callers.auth import CONTROL_WORKER, Authorizer
from rollout_worker.requests.http_requests import CONTROL_LIMITS
from rollout_worker.service import make_member_factory
from rollout_worker.settings import WorkerSettings

from .port_app import PortGuard, new_app, note_caller, refuse_browser
from .port_connections import ConnectionPool, bind_port, connection_quota, raise_descriptor_limit
from .server import UvicornServer, failure_cause, make_authorizer, report_failure, stop_on_signals
from .serving_certificate import serving_certificate
from .settings import ANSWER_FLUSH_SECONDS

logger = logging.getLogger(__name__)

PROBE_PATHS = ("/health", "/ready")

Leader = Annotated[str, Query(min_length=1, max_length=64)]
SlotPath = Annotated[str, Path(pattern=SLOT_PATTERN)]
Attempt = Annotated[int, Path(ge=1)]


def make_member_app(worker: MemberWorker, authorizer: Authorizer) -> FastAPI:
    """The application of a member's control port."""
    app = new_app(
        "rollout-worker member",
        "One node of a replica that spans several.",
        limits=lambda: CONTROL_LIMITS,
    )

    async def check_head(scope: Scope, headers: Headers) -> None:
        if scope["path"] not in PROBE_PATHS:
            await note_caller(authorizer, CONTROL_WORKER, scope, headers)

    app.add_middleware(PortGuard, check=check_head)
    if worker.settings.auth == "none":
        app.add_middleware(PortGuard, check=refuse_browser)
    _add_probe_routes(app, worker)
    _add_gang_routes(app, worker)
    _add_turn(app, worker)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def elsewhere(path: str, request: Request) -> Response:
        """Refuse every other route, with the head's address."""
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
        """The state of this node."""
        worker.note_head(leader, started=started)
        return worker.gang_state()

    @app.put("/v1/gang/slots/{slot}", status_code=202)
    async def open_slot(slot: SlotPath, leader: Leader, body: SlotRequest) -> GangSlot:
        """Begin to fill a slot."""
        worker.note_head(leader)
        return worker.open_slot(slot, body)

    @app.get("/v1/gang/slots/{slot}")
    async def look(slot: SlotPath, leader: Leader) -> GangSlot:
        """The progress of a slot; Filled is this node's vote."""
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
        """Take this node's turn for its devices; answers after a moment, with or without it."""
        worker.note_head(leader)
        return await worker.member_turn.take(attempt)

    @app.post("/v1/gang/turn/{attempt}/use")
    async def use(attempt: Attempt, leader: Leader) -> GangTurn:
        """Keep the turn: all nodes have theirs."""
        worker.note_head(leader)
        return await worker.member_turn.use(attempt)

    @app.delete("/v1/gang/turn/{attempt}")
    async def give(attempt: Attempt, leader: Leader, started: bool) -> GangTurn:
        """Give the turn back."""
        worker.note_head(leader, started=started)
        return worker.give_turn(attempt)


async def serve_member(settings: WorkerSettings, gang: GangMembership) -> int:
    """Serve until SIGTERM or SIGINT, or until the gang is broken; returns the exit status.

    Raises:
        InvalidSettings: The port or the credentials can't be used.
    """
    raise_descriptor_limit()
    staging = StagingBudget(settings.staging_memory)
    create = make_member_factory(settings, gang, staging)
    locks = DeviceTurn(settings, None) if settings.turn_devices else None
    worker = MemberWorker(settings, gang, create, staging, locks)
    authorizer, certificate = make_authorizer(settings), serving_certificate(settings)
    sock = bind_port(settings.control_host, settings.control_port, "--control-port")
    app, quota = make_member_app(worker, authorizer), connection_quota()
    server = UvicornServer(app, ConnectionPool(quota.control), certificate)
    stop = stop_on_signals()
    logger.info("serving a member", extra={"control_port": sock.getsockname()[1]})
    tasks = [
        asyncio.create_task(server.serve([sock])),
        asyncio.create_task(worker.run_until_broken()),
    ]
    asked = asyncio.create_task(stop.wait())
    if certificate is not None:
        tasks.append(asyncio.create_task(certificate.keep_reloading()))
    try:
        await asyncio.wait([*tasks, asked], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            await worker.wait_released()
            return 0
        return report_failure(failure_cause(*tasks))
    finally:
        asked.cancel()
        server.should_exit = True
        for task in tasks[1:]:
            task.cancel()
        await worker.stop_worker()
        await asyncio.wait(tasks, timeout=ANSWER_FLUSH_SECONDS + 5)
        await authorizer.close()
        logger.info("stopped")
