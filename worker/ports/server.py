"""Runs a worker behind its two sockets until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from rollout_common.transfer import delta
from rollout_worker.engine import GangMembership, ProcessSpent
from rollout_worker.gang.gang_addresses import EXIT_GANG_BROKEN, GangBroken
from rollout_worker.ports.callers.auth import AllowAnyone, Authorizer, SharedToken
from rollout_worker.service import WorkerService
from rollout_worker.settings import WorkerSettings

from . import port_connections, serving_certificate
from .control_routes import make_control_app
from .data_routes import make_data_app
from .lending_port import LendingPort
from .port_connections import (
    PROBE_ALLOWANCE,
    AnyRequestForm,
    ConcurrencyLimit,
    ConnectionPool,
    ConnectionQuota,
    HttpProtocol,
    Listener,
    bind_port,
    raise_descriptor_limit,
)
from .serving_certificate import ServingCertificate
from .settings import ANSWER_FLUSH_SECONDS, HEADER_TIMEOUT_SECONDS, KEEP_ALIVE_SECONDS
from .weights_port import WeightsPort

logger = logging.getLogger(__name__)

EXIT_SPENT = 4
"""Exit status of a process in which no engine works any more: only a new process helps."""


class UvicornServer(uvicorn.Server):
    """A server that leaves signals and sockets to us: two of them share one process and its end."""

    def __init__(
        self, app: ASGIApp, pool: ConnectionPool, certificate: ServingCertificate | None = None
    ) -> None:
        config = uvicorn.Config(
            AnyRequestForm(app),
            http=HttpProtocol,
            ws="none",
            access_log=False,
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=ANSWER_FLUSH_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            server_header=False,
        )
        super().__init__(config)
        self._pool = pool
        self._certificate = certificate

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        listeners = [
            Listener(s, self._make_protocol, self._pool, self._certificate) for s in sockets or ()
        ]
        self.servers = [cast(Any, each) for each in listeners]
        self.started = True

    def _make_protocol(self) -> asyncio.Protocol:
        make = cast(Any, self.config.http_protocol_class)
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state={}
        )
        return protocol


class HttpServers:
    """Both HTTP servers of one worker."""

    def __init__(
        self,
        worker: WorkerService,
        authorizer: Authorizer,
        quota: ConnectionQuota | None = None,
        header_seconds: float = HEADER_TIMEOUT_SECONDS,
    ) -> None:
        settings = worker.settings
        quota = quota or port_connections.connection_quota()
        self._certificate = serving_certificate.serving_certificate(settings)
        self._authorizer = authorizer
        app = make_data_app(worker)  # before a port is taken: it may refuse its token's file
        with contextlib.ExitStack() as opened:  # the process of an embedded worker may go on
            self._sockets = [
                opened.enter_context(bind_port(host, port, flag))
                for host, port, flag in (
                    (settings.data_host, settings.data_port, "--data-port"),
                    (settings.control_host, settings.control_port, "--control-port"),
                )
            ]
            self._weights = WeightsPort(
                settings, worker.updates.pushes.pushed_source, self._certificate
            )
            opened.pop_all()
        self._lending = LendingPort(worker) if worker.runtime.turn is not None else None
        data = ConcurrencyLimit(app, max(1, quota.data - PROBE_ALLOWANCE), worker.count_refusal)
        control = make_control_app(worker, authorizer)
        self._servers = [
            UvicornServer(data, ConnectionPool(quota.data, header_seconds)),
            UvicornServer(
                control, ConnectionPool(quota.control, header_seconds), self._certificate
            ),
        ]

    @property
    def bound_ports(self) -> tuple[int, int]:
        """The data port and the control port."""
        data, control = (sock.getsockname()[1] for sock in self._sockets)
        return data, control

    async def serve_both_ports(self) -> None:
        """Serve both ports until `stop`."""
        beside = [] if self._certificate is None else [self._certificate.keep_reloading()]
        beside += [] if self._lending is None else [self._lending.serve()]
        running = [asyncio.create_task(each) for each in beside]
        self._weights.start()
        async with asyncio.TaskGroup() as tasks:
            for server, sock in zip(self._servers, self._sockets, strict=True):
                tasks.create_task(server.serve([sock]))
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.to_thread(self._weights.stop)
        await self._authorizer.close()

    def stop(self) -> None:
        """Let `serve_both_ports` accept nothing more, finish the answers under way and return."""
        for server in self._servers:
            server.should_exit = True


def make_authorizer(settings: WorkerSettings) -> Authorizer:
    """The authorizer for `--auth`: of the head's control port, or of a member's, which only its head may use.

    Raises:
        InvalidSettings: The token file can't be used.
    """
    if settings.auth == "none":
        return AllowAnyone()
    if settings.auth == "token":
        assert settings.auth_token_file is not None
        return SharedToken(settings.auth_token_file)
    # Imported late: it brings an HTTP client that only clusters need.
    from rollout_worker.ports.callers.kubernetes_auth import HeadTokenReview, KubernetesReview

    return HeadTokenReview(settings) if settings.rank else KubernetesReview(settings)


async def serve_worker(settings: WorkerSettings, gang: GangMembership | None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Raises:
        InvalidSettings: A port or the credentials can't be used.
    """
    raise_descriptor_limit()
    worker = WorkerService(settings, gang=gang)
    servers = HttpServers(worker, make_authorizer(settings))
    stop = stop_on_signals()
    cause = await serve_until(stop, worker, servers)
    return 0 if stop.is_set() else report_failure(cause)


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set from now on."""
    stop = asyncio.Event()
    # Until here a signal ends the process at once (`__main__`). One that comes in between is not lost:
    # the loop watches for signals before it replaces the handler.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def serve_until(
    stop: asyncio.Event, worker: WorkerService, servers: HttpServers
) -> BaseException | None:
    """Serve until `stop`, then drain and free everything; returns the error that ended it earlier, if any."""
    data, control = servers.bound_ports
    ports = {"data_port": data, "control_port": control, "deltas_by": delta.WAY}
    logger.info("serving", extra=ports)
    serving = asyncio.create_task(servers.serve_both_ports())
    running = asyncio.create_task(worker.run_until_cancelled())
    asked = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, running, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            return failure_cause(serving, running)
        await worker.shut_down()
        return None
    finally:
        asked.cancel()
        servers.stop()  # it flushes the last answers
        await asyncio.wait({serving}, timeout=ANSWER_FLUSH_SECONDS + 5)
        running.cancel()
        await asyncio.wait({running}, timeout=ANSWER_FLUSH_SECONDS)
        await worker.supervisor.end_engine()
        logger.info("stopped")


def report_failure(cause: BaseException | None) -> int:
    """Log what ended the worker; returns the exit status."""
    if isinstance(cause, ProcessSpent):
        logger.critical("no engine works in this process any more: %s", cause)
        return EXIT_SPENT
    if isinstance(cause, GangBroken):
        logger.critical("the gang is broken: %s", cause)
        return EXIT_GANG_BROKEN
    logger.critical("a part of the worker broke", exc_info=cause)
    return 1


def failure_cause(*tasks: asyncio.Task[None]) -> BaseException | None:
    """Return the error of the first of these tasks that has ended."""
    for task in tasks:
        if task.done() and not task.cancelled():
            error = task.exception()
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]  # the one that ended a group of tasks
            return error
    return None
