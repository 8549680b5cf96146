"""Connections to the workers' control ports.

Thousands of heads are polled, each over a connection that is kept open. httpx goes through all open ones with every request, which at 400
heads took forty times the CPU of finding a host's connection by its address (measured once). The image of a pool is its user's choice,
and so is what answers. No request waits for a connection: a call that waits for a device or drains
keeps its own for minutes, while the polls of other workers go on. The poller bounds its polls, and each
head has at most one call for each of its keys.
"""

from __future__ import annotations

import asyncio
import os
import resource
import ssl
from asyncio.sslproto import SSLProtocol
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from rollout_operator.api.names import CONTROL_TLS_NAME
from rollout_operator.config import ConfigError

from .settings import CONNECT_TIMEOUT_SECONDS, KEEPALIVE_IDLE_SECONDS
from .worker_exchange import WorkerConnection

TLS_BUFFER_BYTES = 32 * 1024
"""What a TLS connection of this process reads at once; a record has up to 16 KiB."""

MAX_OPEN_FILES = 65536


class WorkerConnections:
    """The operator's `Send` (see `rollout_client.worker_control`); `close` it at the end.

    Args:
        ca: File with the certificates that those of https control ports are checked against.

    Raises:
        ConfigError: That file can't be used.
    """

    def __init__(self, ca: Path | None = None) -> None:
        self._tls = None if ca is None else _tls_context(ca)
        self._idle: defaultdict[str, list[WorkerConnection]] = defaultdict(list)
        """By host and port, the one that was used last at the end."""
        self._sweep: asyncio.TimerHandle | None = None
        _raise_open_files_limit()
        # By default asyncio allocates 256 KiB for each connection at its start: 2.5 GiB for 9,999 heads.
        SSLProtocol.max_size = TLS_BUFFER_BYTES

    async def send_request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes | None,
        seconds: float,
    ) -> tuple[int, bytes]:
        """Send a request; redirects are not followed.

        Raises:
            OSError: no connection or no answer in time, or none at all. A timeout says which: a process that hangs
                still has connections accepted for it, a firewall that drops packets has not.
        """
        missing, within = "answer", seconds
        try:
            async with asyncio.timeout(seconds):
                to = urlsplit(url)
                request = _encode_request(method, to, headers, content)
                if (answer := await self._send_over_kept(to, request, method)) is not None:
                    return answer
                missing, within = "connection", min(seconds, CONNECT_TIMEOUT_SECONDS)
                connection = await self._connect(to)
                missing = "answer"
                if self._tls is not None:
                    # Not with the connection, so that it is known which of them failed.
                    async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                        await connection.start_tls(self._tls, CONTROL_TLS_NAME)
                within = seconds
                return await self._send_over(connection, to, request)
        except TimeoutError as error:
            raise TimeoutError(f"no {missing} within {within:g} s") from error
        except (OSError, ValueError) as error:
            raise ConnectionError(_error_reason(error)) from error

    async def _send_over_kept(
        self, to: SplitResult, request: bytes, method: str
    ) -> tuple[int, bytes] | None:
        """Send a request over a connection that is there; None: there is none, or none any more."""
        idle = self._idle.get(to.netloc, [])
        since = asyncio.get_running_loop().time() - KEEPALIVE_IDLE_SECONDS
        while idle:
            connection = idle.pop()
            if not connection.is_open or connection.used_at < since:
                connection.close()  # the worker is about to
                continue
            try:
                return await self._send_over(connection, to, request)
            except ConnectionResetError:
                if method != "GET":  # the worker may have got it
                    raise
        return None

    async def _send_over(
        self, connection: WorkerConnection, to: SplitResult, request: bytes
    ) -> tuple[int, bytes]:
        answer = await connection.send_request(request)
        if connection.is_open:
            loop = asyncio.get_running_loop()
            connection.used_at = loop.time()
            self._idle[to.netloc].append(connection)
            self._sweep = self._sweep or loop.call_later(KEEPALIVE_IDLE_SECONDS, self._close_idle)
        return answer

    async def _connect(self, to: SplitResult) -> WorkerConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
            host, port = to.hostname or "", to.port or 80
            _, made = await loop.create_connection(WorkerConnection, host, port)
        return made

    def _close_idle(self) -> None:
        """Close what was not used for long, and look again later while there is more."""
        loop = asyncio.get_running_loop()
        before = loop.time() - KEEPALIVE_IDLE_SECONDS
        for netloc, connections in list(self._idle.items()):
            for each in connections:
                if each.used_at <= before:
                    each.close()
            left = [each for each in connections if each.is_open]
            if left:
                self._idle[netloc][:] = left
            else:
                del self._idle[netloc]
        self._sweep = None
        if self._idle:
            self._sweep = loop.call_later(KEEPALIVE_IDLE_SECONDS / 4, self._close_idle)

    async def close(self) -> None:
        """Close all connections that nobody uses."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connections in self._idle.values():
            for each in connections:
                each.close()
        self._idle.clear()
        await asyncio.sleep(0)  # they end in the next step of the loop


def _encode_request(
    method: str, to: SplitResult, headers: Mapping[str, str], content: bytes | None
) -> bytes:
    target = f"{to.path}?{to.query}" if to.query else to.path
    given = {"Host": to.netloc, "Accept-Encoding": "identity", **headers}
    if content is not None:
        given["Content-Length"] = str(len(content))
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header has several lines")
    return "\r\n".join([*lines, "", ""]).encode() + (content or b"")


def _tls_context(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        raise ConfigError(f"--control-ca-file {str(ca)!r} can't be used: {error}") from error


def _error_reason(error: Exception) -> str:
    # The number of an error of TLS is not an errno.
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def _raise_open_files_limit() -> None:
    """Raise the soft limit: a connection is kept for each head, and one for each watch."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
