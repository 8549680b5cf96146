"""Runs a worker behind its two sockets until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_common.transfer import delta
from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import Engine, ProcessSpent
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.gang.gang_addresses import EXIT_GANG_BROKEN, GangBroken, make_gang
from rollout_worker.service import WorkerService, make_member_factory
from rollout_worker.settings import InvalidSettings, WorkerSettings

from . import port_connections, serving_certificate
from .access_rights import Authorizer
from .auth import make_authorizer
from .control_routes import make_control_app
from .data_routes import make_data_app
from .port_app import problem_response
from .port_connections import ConnectionPool, ConnectionQuota, Listener, raise_descriptor_limit
from .settings import ANSWER_FLUSH_SECONDS, HEADER_TIMEOUT_SECONDS, KEEP_ALIVE_SECONDS
from .weights_port import WeightsPort

logger = logging.getLogger(__name__)

EXIT_SPENT = 4
"""Exit status of a process in which no engine works any more: only a new one helps."""

BACKLOG = 2048
"""Connections that may wait to be accepted: as uvicorn's."""


PROBE_ALLOWANCE = 32
"""Places of the data port that requests leave to probes and scrapes."""


class UvicornServer(uvicorn.Server):
    """A server that leaves signals and sockets to us: two of them share one process and its end."""

    def __init__(
        self,
        config: uvicorn.Config,
        room: ConnectionPool,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        super().__init__(config)
        self._room = room
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets."""
        listeners = [Listener(s, self._make_protocol, self._room, self._tls) for s in sockets or ()]
        self.servers = [cast(Any, each) for each in listeners]
        self.started = True

    def _make_protocol(self) -> asyncio.Protocol:
        make = cast(Any, self.config.http_protocol_class)
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state={}
        )
        return protocol


class ConcurrencyLimit:
    """Refuses requests beyond a number of them at once; probes and scrapes are always answered."""

    def __init__(self, app: ASGIApp, most: int, refused: Callable[[str], object]) -> None:
        """`refused` is told the slug of each refusal."""
        self._app = app
        self._most = most
        self._refused = refused
        self._now = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 429."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._now >= self._most:
            detail = f"{self._now} requests are open: try again, or use another replica"
            refusal = ProblemError("queue-full", detail, retry_after=1)
            self._refused(refusal.slug)
            await problem_response(refusal)(scope, receive, send)
            return
        self._now += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._now -= 1


def bind_port(host: str, port: int, flag: str) -> socket.socket:
    """Open a listening socket.

    Raises:
        BadSettings: the port is taken or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small pieces at once (TCP_NODELAY) only where the protocol is named: without it a
    # body waits for the acknowledgement of its header, up to 40 ms with a connection kept alive.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        # Only listening tells that another socket has the port on another address of ours.
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise InvalidSettings(f"{flag} {host}:{port} can't be used: {error.strerror}") from error
    return sock


def _bind_both_ports(settings: WorkerSettings) -> list[socket.socket]:
    data = bind_port(settings.data_host, settings.data_port, "--data-port")
    try:
        control = bind_port(settings.control_host, settings.control_port, "--control-port")
    except InvalidSettings:
        data.close()
        raise
    return [data, control]


class HttpServers:
    """Both HTTP servers of one worker."""

    def __init__(
        self,
        worker: WorkerService,
        authorizer: Authorizer,
        places: ConnectionQuota | None = None,
        header_seconds: float = HEADER_TIMEOUT_SECONDS,
    ) -> None:
        settings = worker.settings
        places = places or port_connections.connection_quota()
        self._certificate = serving_certificate.serving_certificate(settings)
        self._authorizer = authorizer
        app = make_data_app(worker)  # may refuse its token's file, while no port is taken yet
        self._sockets = _bind_both_ports(settings)
        try:
            self._weights = WeightsPort(settings, worker.updates.pushes.desk, self._certificate)
        except BaseException:
            for each in self._sockets:  # this process may go on without us
                each.close()
            raise
        data = ConcurrencyLimit(app, max(1, places.data - PROBE_ALLOWANCE), worker.count_refusal)
        control = make_control_app(worker, authorizer)
        held = self._certificate
        self._servers = [
            UvicornServer(uvicorn_config(data), ConnectionPool(places.data, header_seconds)),
            UvicornServer(
                uvicorn_config(control),
                ConnectionPool(places.control, header_seconds),
                None if held is None else lambda: held.context,
            ),
        ]

    @property
    def bound_ports(self) -> tuple[int, int]:
        """Bound data and control port."""
        data, control = (sock.getsockname()[1] for sock in self._sockets)
        return data, control

    async def serve_both_ports(self) -> None:
        """Serve both ports until `stop`."""
        renewing = None
        if self._certificate is not None:
            renewing = asyncio.create_task(self._certificate.keep_reloading())
        self._weights.start()
        async with asyncio.TaskGroup() as tasks:
            for server, sock in zip(self._servers, self._sockets, strict=True):
                tasks.create_task(server.serve([sock]))
        if renewing is not None:
            renewing.cancel()
        await asyncio.to_thread(self._weights.stop)
        await self._authorizer.close()

    def stop(self) -> None:
        """Take no new connections, finish the answers under way, return from `serve_both_ports`."""
        for server in self._servers:
            server.should_exit = True


def uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    """How an application is served."""
    return uvicorn.Config(
        app,
        ws="none",
        access_log=False,
        log_config=None,
        lifespan="off",
        timeout_graceful_shutdown=ANSWER_FLUSH_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
    )


async def serve_worker(
    settings: WorkerSettings, make_engine: Callable[[], Engine] | None = None
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Raises:
        BadSettings: a port or the credentials can't be used.
    """
    raise_descriptor_limit()
    gang = make_gang(settings)
    if gang is not None and gang.rank > 0:
        from .member_port import serve_member

        staging = StagingBudget(settings.staging_memory)
        create = make_member_factory(settings, gang, staging)
        return await serve_member(settings, gang, create, staging.claim_memory)
    worker = WorkerService(settings, make_engine, gang)
    servers = HttpServers(worker, make_authorizer(settings))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Until here a signal ends the process at once (`__main__`). The loop hears of one that comes
    # in between: it listens before it takes the handler's place.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    cause = await serve_until(stop, worker, servers)
    return 0 if stop.is_set() else _report_failure(cause)


async def serve_until(
    stop: asyncio.Event, worker: WorkerService, servers: HttpServers
) -> BaseException | None:
    """Serve until `stop`, then drain and free everything; returns what ended it before, if so."""
    data, control = servers.bound_ports
    said = {"data_port": data, "control_port": control, "deltas_by": delta.WAY}
    logger.info("serving", extra=said)
    serving = asyncio.create_task(servers.serve_both_ports())
    running = asyncio.create_task(worker.run_until_cancelled())
    asked = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, running, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            return _failure_cause(serving, running)
        await worker.shut_down()
        return None
    finally:
        asked.cancel()
        await _end_serving(servers, serving, running, worker)


def _report_failure(cause: BaseException | None) -> int:
    """Say what ended the worker; returns the exit status."""
    if isinstance(cause, ProcessSpent):
        logger.critical("no engine works in this process any more: %s", cause)
        return EXIT_SPENT
    if isinstance(cause, GangBroken):
        logger.critical("the gang is broken: %s", cause)
        return EXIT_GANG_BROKEN
    logger.critical("a part of the worker broke", exc_info=cause)
    return 1


def _failure_cause(*tasks: asyncio.Task[None]) -> BaseException | None:
    for task in tasks:
        if task.done() and not task.cancelled():
            error = task.exception()
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]  # of a group of tasks, what ended it
            return error
    return None


async def _end_serving(
    servers: HttpServers,
    serving: asyncio.Task[None],
    running: asyncio.Task[None],
    worker: WorkerService,
) -> None:
    """Flush the last answers, then free the engine."""
    servers.stop()
    await asyncio.wait({serving}, timeout=ANSWER_FLUSH_SECONDS + 5)
    running.cancel()
    await asyncio.wait({running}, timeout=ANSWER_FLUSH_SECONDS)
    await worker.supervisor.end_engine()
    logger.info("stopped")
