"""Connections to the workers' control ports.

Thousands of heads are polled, each over a connection that is kept open. aiohttp finds a host's
connection by its key; httpx goes through all open ones with every request, which at 400 heads took
forty times the CPU (measured once). Answers are read up to a bound and never unpacked: the image of a pool is its
user's choice. No request waits for a connection: a call that waits for a device or drains
keeps its own for minutes, while the polls of other workers go on. The poller bounds its polls, and each
head has at most one call for each of its keys.
"""

from __future__ import annotations

import os
import resource
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from rollout_operator.api.names import CONTROL_TLS_NAME
from rollout_operator.config import ConfigError

from .settings import CONNECT_TIMEOUT_SECONDS, KEEPALIVE_IDLE_SECONDS

TLS_BUFFER_BYTES = 32 * 1024
"""What a TLS connection of this process reads at once; a record has up to 16 KiB."""

MAX_OPEN_FILES = 65536

MAX_ANSWER_BYTES = 4 << 20
"""A state has some kilobytes."""

_parse_url = lru_cache(maxsize=16_384)(URL)
"""Each head is asked for its state again and again, and to parse its URL is a tenth of what a request costs."""


class WorkerConnections:
    """The operator's `Send` (see `rollout_client.worker_control`); `close` it at the end.

    Args:
        ca: File with the certificates that those of https control ports are checked against.

    Raises:
        ConfigError: That file can't be used.
    """

    def __init__(self, ca: Path | None = None) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._tls = None if ca is None else _tls_context(ca)
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
            OSError: no answer in time, or none at all.
        """
        limit = aiohttp.ClientTimeout(
            total=seconds, sock_connect=min(seconds, CONNECT_TIMEOUT_SECONDS)
        )
        try:
            async with self._open_session().request(
                method,
                _parse_url(url),
                data=content,
                headers=headers,
                timeout=limit,
                allow_redirects=False,
                **self._tls_options(),
            ) as answer:
                return answer.status, await _read_answer(answer)
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {seconds:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ConnectionError(_error_reason(error)) from error

    def _tls_options(self) -> dict[str, Any]:
        if self._tls is None:
            return {}
        return {"ssl": self._tls, "server_hostname": CONTROL_TLS_NAME}

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_IDLE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


async def _read_answer(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise ConnectionError(f"the answer has more than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(body)


def _tls_context(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        raise ConfigError(f"--control-ca-file {str(ca)!r} can't be used: {error}") from error


def _error_reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientSSLError):
        # Its own words have an address in memory, and its number is not an errno.
        return str(error.__cause__ or error)
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    return str(error) or type(error).__name__


def _raise_open_files_limit() -> None:
    """Raise the soft limit: a connection is kept for each head, and one for each watch."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
