"""Connections to members: httpx clients with a few connections each.

httpx goes through all connections of a client when a request begins and when it ends: a client with
hundreds in flight spends most of its time on that. So a member gets one client for each `STREAMS_PER_CLIENT`.
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

# Reading has no limit: a queued request is silent for a long time. `HealthChecker` asks a silent worker
# whether it is alive, and every attempt has the deadline of its request.
TIMEOUT = httpx.Timeout(None, connect=CONNECT_TIMEOUT_SECONDS, write=WRITE_TIMEOUT_SECONDS)


@functools.cache
def trusted_authorities(*, environment: bool) -> ssl.SSLContext:
    """What https servers are checked against by default, loaded once: it takes longer than a request.

    Args:
        environment: Whether `SSL_CERT_FILE` and `SSL_CERT_DIR` count.
    """
    return httpx.create_ssl_context(trust_env=environment)


DataToken = str | Callable[[], str] | None
"""Token of the members' data ports, or what returns it at each request; None: they want none."""


@dataclass(slots=True)
class _SharedClient:
    client: httpx.AsyncClient
    in_flight: int = 0


class MemberClients:
    """Clients by member URL, made when first needed.

    Args:
        token: Sent with each request.
    """

    def __init__(self, token: DataToken = None) -> None:
        self._token = token
        self._clients: dict[str, list[_SharedClient]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @contextmanager
    def client_for(self, url: str) -> Iterator[httpx.AsyncClient]:
        """Lend a client for one request to a member; its base URL is the member's."""
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
        # A proxy named in the environment is not meant for pods of the same cluster.
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
        """Close a member's clients in the background; no request may use them any more."""
        for each in self._clients.pop(url, ()):
            task = asyncio.create_task(each.client.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all of them."""
        clients, self._clients = self._clients, {}
        closing = [each.client.aclose() for some in clients.values() for each in some]
        await asyncio.gather(*closing, *self._closing)
