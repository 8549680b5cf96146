"""Connections to members: httpx clients with a few connections each.

httpx looks at all connections of a client when a request begins and when it ends; with hundreds in
flight that takes most of the time. So each `STREAMS_PER_CLIENT` requests get a client of their own.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from .settings import CONNECT_TIMEOUT_SECONDS, KEEP_ALIVE_SECONDS, WRITE_TIMEOUT_SECONDS

STREAMS_PER_CLIENT = 32
"""Requests that one client has in flight, and connections that it keeps."""

# Reading has no limit: a queued request is silent for a long time. `HealthChecker` asks silent workers
# whether they are alive, and every attempt has the deadline of its request.
TIMEOUT = httpx.Timeout(None, connect=CONNECT_TIMEOUT_SECONDS, write=WRITE_TIMEOUT_SECONDS)


@functools.cache
def trusted_authorities(*, environment: bool) -> ssl.SSLContext:
    """Return the authorities for https servers; `environment`: honour `SSL_CERT_FILE`, `SSL_CERT_DIR`.

    They are loaded once: that takes longer than a request.
    """
    return httpx.create_ssl_context(trust_env=environment)


def describe_error(error: Exception) -> str:
    """Return an error's kind and text; some errors of httpx have no text."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


DataToken = str | Callable[[], str] | None
"""Token of the members' data ports, or a function that returns it at each request; None: no token."""


@dataclass(slots=True)
class _SharedClient:
    client: httpx.AsyncClient
    in_flight: int = 0


class MemberClients:
    """Clients by member URL, made when first needed; each request carries the token."""

    def __init__(self, token: DataToken = None) -> None:
        self._token = token
        self._clients: dict[str, list[_SharedClient]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @contextmanager
    def client_for(self, url: str) -> Iterator[httpx.AsyncClient]:
        """Yield a client for one request to a member; its base URL is the member's."""
        clients = self._clients.setdefault(url, [])
        lent = next((each for each in clients if each.in_flight < STREAMS_PER_CLIENT), None)
        if lent is None:
            lent = _SharedClient(self._make_client(url))
            clients.append(lent)
        lent.in_flight += 1
        try:
            yield lent.client
        finally:
            lent.in_flight -= 1

    def _make_client(self, url: str) -> httpx.AsyncClient:
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=STREAMS_PER_CLIENT,
            keepalive_expiry=KEEP_ALIVE_SECONDS,
        )
        # A proxy in the environment is not meant for pods of the same cluster.
        return httpx.AsyncClient(
            base_url=url,
            auth=None if self._token is None else self._add_token,
            timeout=TIMEOUT,
            limits=limits,
            verify=trusted_authorities(environment=True),
            trust_env=False,
        )

    def _add_token(self, request: httpx.Request) -> httpx.Request:
        token = self._token() if callable(self._token) else self._token
        request.headers["Authorization"] = f"Bearer {token}"
        return request

    def drop_member(self, url: str) -> None:
        """Close a member's clients in the background; no request may be using them."""
        for each in self._clients.pop(url, ()):
            task = asyncio.create_task(each.client.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all clients."""
        clients, self._clients = self._clients, {}
        closing = [each.client.aclose() for some in clients.values() for each in some]
        await asyncio.gather(*closing, *self._closing)
