"""Connections to members: httpx clients with one connection each.

httpx looks at all connections of a client when a request begins and when it ends. With hundreds in flight that takes most
of the time, and with 32 still half of it; a client is made in 30 µs and has 3 KiB.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from .settings import CONNECT_TIMEOUT_SECONDS, KEEP_ALIVE_SECONDS, WRITE_TIMEOUT_SECONDS

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
class _ClientsOfMember:
    """`every`: to be closed; `idle`: those that no request uses, the last used one at the end."""

    every: list[httpx.AsyncClient] = field(default_factory=list)
    idle: list[httpx.AsyncClient] = field(default_factory=list)


class MemberClients:
    """Clients by member URL, made when first needed; each request carries the token."""

    def __init__(self, token: DataToken = None) -> None:
        self._token = token
        self._clients: dict[str, _ClientsOfMember] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @contextmanager
    def client_for(self, url: str) -> Iterator[httpx.AsyncClient]:
        """Yield a client for one request to a member; its base URL is the member's."""
        clients = self._clients.setdefault(url, _ClientsOfMember())
        if clients.idle:
            client = clients.idle.pop()
        else:
            client = self._make_client(url)
            clients.every.append(client)
        try:
            yield client
        finally:
            clients.idle.append(client)

    def _make_client(self, url: str) -> httpx.AsyncClient:
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=1,
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
        for each in self._clients.pop(url, _ClientsOfMember()).every:
            task = asyncio.create_task(each.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all clients."""
        clients, self._clients = self._clients, {}
        closing = [each.aclose() for some in clients.values() for each in some.every]
        await asyncio.gather(*closing, *self._closing)
