"""One request to the API server: login, connection, deadline, fence, and its error.

Writes are fenced: none is sent unless this process holds the Lease, and none may take longer than
the Lease lasts, so that a successor never sees one of our writes arrive late.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import kopf

from rollout_operator.api.objects import Obj

from .credentials import LoginFailed, load_connection_info
from .errors import FencedError, KubeError, Unauthorized, Unavailable, from_answer
from .settings import CONNECT_TIMEOUT_SECONDS, REQUEST_TIMEOUT_SECONDS, STREAM_SLACK_SECONDS

PatchKind = Literal["merge", "json", "apply"]
_CONTENT_TYPES: Mapping[PatchKind, str] = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}
_METHODS = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "patch": "PATCH",
    "delete": "DELETE",
}


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request; `what` is it in words, for messages."""

    verb: str
    resource: str
    url: str
    what: str
    body: Any
    params: Mapping[str, str]
    content: PatchKind | None
    fenced: bool


class ApiTransport:
    """Sends requests; see the module.

    Args:
        on_request: Called with (verb, resource, code) after each request; code 0: no answer.
        write_seconds: Seconds for which writes are allowed still; 0 or less: fenced.
    """

    def __init__(
        self, on_request: Callable[[str, str, int], None], write_seconds: Callable[[], float]
    ) -> None:
        self.write_seconds = write_seconds
        self._on_request = on_request
        self._session: aiohttp.ClientSession | None = None
        self._info: kopf.ConnectionInfo | None = None
        self._ssl: ssl.SSLContext | None = None
        self._login_until = 0.0
        self._login_lock = asyncio.Lock()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def send_request(self, request: ApiRequest) -> Obj:
        """Send a request; once more with fresh credentials if these were refused."""
        try:
            return await self._send_once(request)
        except Unauthorized:
            self._login_until = 0.0
            return await self._send_once(request)

    async def _send_once(self, request: ApiRequest) -> Obj:
        async with self._open_response(request) as response:
            raw = await response.read()
        return _parse_object(raw, request.what)

    async def stream_objects(self, request: ApiRequest, seconds: float) -> AsyncIterator[Obj]:
        """Send a request whose answer is one object in each line, as they come."""
        async with self._open_response(request, lasting=seconds + STREAM_SLACK_SECONDS) as response:
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield _parse_object(line, request.what)

    @asynccontextmanager
    async def _open_response(
        self, request: ApiRequest, *, lasting: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and yield the answer unless it is an error."""
        session, info = await self._ensure_session(request.what)
        seconds = self._request_deadline(request) if lasting is None else lasting
        headers = {"Accept": "application/json", **info.as_http_headers()}
        if request.body is not None:
            kind = _CONTENT_TYPES[request.content] if request.content else "application/json"
            headers["Content-Type"] = kind
        code = 0
        try:
            async with session.request(
                _METHODS[request.verb],
                info.server.rstrip("/") + request.url,
                params=dict(request.params),
                data=None if request.body is None else json.dumps(request.body).encode(),
                headers=headers,
                ssl=self._ssl if self._ssl is not None else True,
                proxy=info.proxy_url,
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_TIMEOUT_SECONDS),
            ) as response:
                code = response.status
                if code >= 400:
                    raw, later = await response.read(), response.headers.get("Retry-After")
                    raise from_answer(code, raw, request.what, later)
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            code = 0
            if isinstance(error, aiohttp.ClientSSLError):
                self._login_until, self._ssl = 0.0, None  # perhaps the CA is another one now
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            reason = str(cause) or type(error).__name__
            text = f"{request.what}: {reason}"
            raise Unavailable(0, "NoAnswer", text, said=reason) from error
        finally:
            self._on_request(request.verb, request.resource, code)

    def _request_deadline(self, request: ApiRequest) -> float:
        if not request.fenced:
            return REQUEST_TIMEOUT_SECONDS
        left = self.write_seconds()
        if left <= 0:
            raise FencedError(request.what)
        return min(REQUEST_TIMEOUT_SECONDS, left)

    async def _ensure_session(self, what: str) -> tuple[aiohttp.ClientSession, kopf.ConnectionInfo]:
        async with self._login_lock:
            if self._info is None or time.monotonic() >= self._login_until:
                try:
                    info = await load_connection_info()
                except LoginFailed as error:
                    raise Unauthorized(0, "LoginFailed", f"{what}: {error}") from error
                if self._ssl is None or info.expiration is None:
                    self._ssl = info.as_ssl_context()  # a pod's CA does not change with its token
                self._info = info
                renewed = info.expiration is not None
                self._login_until = time.monotonic() + (60.0 if renewed else 3600.0)
            if self._session is None:
                # No request waits for another one's connection: watches hold theirs for minutes, and
                # the Lease has to be renewed meanwhile. Who sends requests bounds how many.
                connector = aiohttp.TCPConnector(limit=0)
                self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
            return self._session, self._info


def _parse_object(raw: bytes, what: str) -> Obj:
    try:
        answer = json.loads(raw)
    except ValueError as error:
        raise KubeError(200, "BadAnswer", f"{what}: the answer is not JSON") from error
    if not isinstance(answer, dict):
        raise KubeError(200, "BadAnswer", f"{what}: the answer is not an object")
    return answer
