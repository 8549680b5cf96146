"""Connections to the members' data ports, and how their errors are described."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable

import httpx

from rollout_client.http_clients import HttpClients, bearer_header
from rollout_common.kube.httpx_connections import system_error

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
    """Return an error's kind and text, that of the system if there is one; some errors of httpx have none."""
    return f"{type(error).__name__}: {system_error(error) or error}".rstrip(": ")


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
            verify=trusted_authorities(environment=True),
            trust_env=False,
        )

    def _add_token(self, request: httpx.Request) -> httpx.Request:
        try:
            token = self._token() if callable(self._token) else self._token
            request.headers["Authorization"] = bearer_header(token or "")
        except ValueError as error:
            # Callers handle the errors of httpx.
            raise httpx.LocalProtocolError(f"data_token can't be used: {error}") from error
        return request
