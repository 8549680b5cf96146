"""Runs a worker behind its two sockets until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from rollout_worker.engine import Engine
from rollout_worker.service import Worker
from rollout_worker.settings import BadSettings, Settings

from .access import Authorizer
from .auth import make_authorizer
from .control import control_app
from .data import data_app

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5
"""What open connections get to take their last bytes."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the pools of usual clients, so that they close first and never hit a closed one."""

BACKLOG = 2048
"""Connections that may wait to be accepted: as uvicorn's."""


class _Server(uvicorn.Server):
    """A server that leaves signals to us: two of them share one process and one orderly end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int, flag: str) -> socket.socket:
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
        raise BadSettings(f"{flag} {host}:{port} can't be used: {error.strerror}") from error
    return sock


class Servers:
    """Both HTTP servers of one worker."""

    def __init__(self, worker: Worker, authorizer: Authorizer) -> None:
        settings = worker.settings
        self._authorizer = authorizer
        self._sockets = [
            bind(settings.data_host, settings.data_port, "--data-port"),
            bind(settings.control_host, settings.control_port, "--control-port"),
        ]
        apps = (data_app(worker), control_app(worker, authorizer))
        self._servers = [_server(app) for app in apps]

    @property
    def ports(self) -> tuple[int, int]:
        """Bound data and control port."""
        data, control = (sock.getsockname()[1] for sock in self._sockets)
        return data, control

    async def run(self) -> None:
        """Serve both ports until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            for server, sock in zip(self._servers, self._sockets, strict=True):
                tasks.create_task(server.serve([sock]))
        await self._authorizer.close()

    def stop(self) -> None:
        """Take no new connections, finish the answers under way, return from `run`."""
        for server in self._servers:
            server.should_exit = True


def _server(app: FastAPI) -> _Server:
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        lifespan="off",
        timeout_graceful_shutdown=FLUSH_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
    )
    return _Server(config)


async def serve(settings: Settings, make_engine: Callable[[], Engine] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Raises:
        BadSettings: a port or the credentials can't be used.
    """
    worker = Worker(settings, make_engine)
    servers = Servers(worker, make_authorizer(settings))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Until here a signal ends the process at once (`__main__`). The loop hears of one that comes
    # in between: it listens before it takes the handler's place.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    data, control = servers.ports
    logger.info("serving", extra={"data_port": data, "control_port": control})
    serving = asyncio.create_task(servers.run())
    running = asyncio.create_task(worker.run())
    asked = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, running, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            logger.critical("a part of the worker broke", exc_info=_cause(serving, running))
            return 1
        await worker.shut_down()
        return 0
    finally:
        asked.cancel()
        await _end(servers, serving, running, worker)


def _cause(*tasks: asyncio.Task[None]) -> BaseException | None:
    for task in tasks:
        if task.done() and not task.cancelled():
            return task.exception()
    return None


async def _end(
    servers: Servers,
    serving: asyncio.Task[None],
    running: asyncio.Task[None],
    worker: Worker,
) -> None:
    """Flush the last answers, then free the engine."""
    servers.stop()
    await asyncio.wait({serving}, timeout=FLUSH_SECONDS + 5)
    running.cancel()
    await asyncio.wait({running}, timeout=FLUSH_SECONDS)
    await worker.supervisor.stop_engine()
    logger.info("stopped")
