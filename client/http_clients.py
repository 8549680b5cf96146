"""httpx clients with one connection each, to all ports of workers, the token that their requests carry, and their errors.

httpx looks at all connections of a client when a request begins and when it ends: with hundreds in flight that takes most
of the time, and asking a thousand workers at once took 25 s. A client is made in 30 µs and has 3 KiB.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import resource
import ssl
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from rollout_common.kube.httpx_connections import system_error

from .settings import CONNECT_TIMEOUT_SECONDS, KEEP_ALIVE_SECONDS, WRITE_TIMEOUT_SECONDS

# Reading has no limit: a queued request is silent for a long time. `HealthChecker` asks silent workers
# whether they are alive, and every attempt has the deadline of its request.
TIMEOUT = httpx.Timeout(None, connect=CONNECT_TIMEOUT_SECONDS, write=WRITE_TIMEOUT_SECONDS)

FILES_EACH = 3
"""Connections to one worker that a process may have at once: to its ports for data, control and weights."""
SPARE_FILES = 1024
"""Files that the rest of the process may have open."""


@functools.cache
def trusted_authorities(*, environment: bool) -> ssl.SSLContext:
    """Return the authorities for https servers; `environment`: honour `SSL_CERT_FILE`, `SSL_CERT_DIR`.

    They are loaded once: that takes longer than a request.
    """
    return httpx.create_ssl_context(trust_env=environment)


@functools.cache
def _no_authorities() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _authorities_for(url: str) -> ssl.SSLContext:
    """Return the authorities for a server; none over http, which must work whatever the environment says of certificates.

    Raises:
        httpx.ConnectError: Those that the environment names can't be read.
    """
    if not url.lower().startswith("https:"):
        return _no_authorities()
    try:
        return trusted_authorities(environment=True)
    except OSError as error:
        raise httpx.ConnectError(f"SSL_CERT_FILE or SSL_CERT_DIR can't be used: {error}") from None


def describe_error(error: Exception) -> str:
    """Return an error's kind and text, that of the system if there is one; some errors of httpx have none."""
    return f"{type(error).__name__}: {system_error(error) or error}".rstrip(": ")


def allow_connections(workers: int) -> None:
    """Raise this process's limit of open files as far as it may: the usual 1,024 are few for a large pool."""
    wanted = FILES_EACH * workers + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def lacks_files(error: BaseException) -> bool:
    """Whether an error came because this process, or the machine, may open no more files."""
    found = system_error(error)
    return found is not None and found.errno in (errno.EMFILE, errno.ENFILE)


@dataclass(slots=True)
class _ClientsOfOrigin:
    """`every`: to be closed; `idle`: those that no request uses, the last used one at the end."""

    every: list[httpx.AsyncClient] = field(default_factory=list)
    idle: list[httpx.AsyncClient] = field(default_factory=list)


def origin_of(url: str) -> str:
    """Return scheme, host and port of a URL: `http://10.0.0.7:8001` of `http://10.0.0.7:8001/v1/state`."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def bearer_header(token: str) -> str:
    """Return the `Authorization` of a request; whitespace around the token, such as a file's last line break, is left out.

    Raises:
        ValueError: No token is like this. httpx would refuse it too, but quote it.
    """
    token = token.strip()
    if not (token and token.isascii() and token.isprintable()):
        raise ValueError(
            "it is empty or has characters that no token has: give it as it was issued"
        )
    return f"Bearer {token}"


class HttpClients:
    """Clients by origin (`http://10.0.0.7:8001`), made by `make` when first needed, for one event loop."""

    def __init__(self, make: Callable[[str], httpx.AsyncClient]) -> None:
        self._make = make
        self._clients: dict[str, _ClientsOfOrigin] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._count = 0
        self.is_closed = False
        """Whether it is too late to ask anything."""

    @contextmanager
    def client_for(self, origin: str) -> Iterator[httpx.AsyncClient]:
        """Yield a client for one request to an origin.

        Raises:
            RuntimeError: They were closed.
        """
        if self.is_closed:
            raise RuntimeError("the connections were closed")
        clients = self._clients.setdefault(origin, _ClientsOfOrigin())
        if clients.idle:
            client = clients.idle.pop()
        else:
            client = self._make(origin)
            self._count += 1
            allow_connections(self._count)
            clients.every.append(client)
        try:
            yield client
        finally:
            clients.idle.append(client)

    def drop_origin(self, origin: str) -> None:
        """Close an origin's clients in the background; no request may be using them."""
        for each in self._clients.pop(origin, _ClientsOfOrigin()).every:
            self._count -= 1
            task = asyncio.create_task(each.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def keep_origins(self, origins: Collection[str]) -> None:
        """Drop the origins that are not among these, except those that requests use."""
        for origin in self._clients.keys() - set(origins):
            clients = self._clients[origin]
            if len(clients.idle) == len(clients.every):
                self.drop_origin(origin)

    async def close(self) -> None:
        """Close all clients; requests that use them fail."""
        self.is_closed = True
        for origin in list(self._clients):
            self.drop_origin(origin)
        await asyncio.gather(*self._closing)


DataToken = str | Callable[[], str] | None
"""Token of the members' data ports, or a function that returns it at each request; None: no token."""


class MemberClients(HttpClients):
    """Clients by member URL, which is their base URL; each request carries the token."""

    def __init__(self, token: DataToken = None) -> None:
        super().__init__(self._make_client)
        self._token = token

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
            verify=_authorities_for(url),
            trust_env=False,
        )

    def _add_token(self, request: httpx.Request) -> httpx.Request:
        try:
            token = self._token() if callable(self._token) else self._token
            request.headers["Authorization"] = bearer_header(token or "")
        except (OSError, ValueError) as error:  # its file may be about to be replaced
            # Callers handle the errors of httpx, and show the cause of one that has any.
            raise httpx.LocalProtocolError(f"data_token can't be used: {error}") from None
        return request
