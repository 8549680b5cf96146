"""Connections to members: one httpx client each.

httpx looks at every open connection with each request; with a client per member that is the
member's own share of what is in flight.
"""

from __future__ import annotations

import asyncio
import ssl

import httpx

CONNECT_SECONDS = 5.0
WRITE_SECONDS = 60.0
KEPT_SECONDS = 60.0
"""Below the 75 s for which a worker keeps an idle connection."""
KEPT_CONNECTIONS = 128

# Reading has no limit of its own: a queued request is silent for long. `Health` asks a silent
# worker whether it lives, and every attempt has the deadline of its request.
TIMEOUT = httpx.Timeout(None, connect=CONNECT_SECONDS, write=WRITE_SECONDS)


class Connections:
    """Clients by member URL, made when first needed."""

    def __init__(self) -> None:
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._tls: ssl.SSLContext | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, url: str) -> httpx.AsyncClient:
        """Return the client of a member; its base URL is the member's."""
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = self._new(url)
        return client

    def _new(self, url: str) -> httpx.AsyncClient:
        if self._tls is None:
            self._tls = httpx.create_ssl_context()
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=KEPT_CONNECTIONS,
            keepalive_expiry=KEPT_SECONDS,
        )
        # A proxy of the environment is not meant for pods of the own cluster.
        return httpx.AsyncClient(
            base_url=url, timeout=TIMEOUT, limits=limits, verify=self._tls, trust_env=False
        )

    def drop(self, url: str) -> None:
        """Close a member's client in the background; nothing may run on it any more."""
        client = self._clients.pop(url, None)
        if client is not None:
            task = asyncio.create_task(client.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all of them."""
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.aclose() for client in clients), *self._closing)
