"""One request to the API server: credentials, connection, deadline, fence, and its error.

Fenced requests are sent only while this process may write, and none may take longer than that, so that
a successor never sees one of our writes arrive late.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

from .access import ClusterAccess, Obj
from .errors import FencedError, KubeError, LoginFailed, Unauthorized, Unavailable, from_answer
from .settings import HEADERS_REUSE_SECONDS, REQUEST_TIMEOUT_SECONDS, WATCH_SILENCE_SECONDS

_METHODS = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "patch": "PATCH",
    "delete": "DELETE",
}


DecodeJson = Callable[[bytes], Any]
Headers = Sequence[tuple[str, str]]
"""Names may come several times."""


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request; `what` is it in words, for messages; `seconds` is its deadline."""

    verb: str
    resource: str
    path: str
    what: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    content_type: str = "application/json"
    fenced: bool = False
    seconds: float = REQUEST_TIMEOUT_SECONDS

    @property
    def method(self) -> str:
        """HTTP method."""
        return _METHODS[self.verb]

    def content(self) -> bytes | None:
        """Return what to send."""
        return None if self.body is None else json.dumps(self.body).encode()


class Answer(NamedTuple):
    """An answer whose body has not been read."""

    status: int
    retry_after: str | None
    chunks: AsyncIterator[bytes]

    async def read(self) -> bytes:
        """Return the body."""
        return b"".join([chunk async for chunk in self.chunks])


class Connections(Protocol):
    """Connections to the server of one access; what they raise is an `OSError`."""

    def open_response(
        self, request: ApiRequest, headers: Headers
    ) -> AbstractAsyncContextManager[Answer]:
        """Send a request; only connecting has a deadline."""

    async def close(self) -> None:
        """Close all of them."""


@dataclass(slots=True)
class _Login:
    access: ClusterAccess
    connections: Connections
    users: int = 0
    retired: bool = False
    headers: Headers = ()
    headers_until: float = 0.0


class ApiClient:
    """Sends requests; use it as an async context manager, or call `close`.

    Args:
        load: Returns the access; called again when the API server refuses it, or we its certificate.
        connect: Makes the connections to its server.
        access: What `load` returned, if it was called already.
        on_request: Called with (verb, resource, code) after each request; code 0: no answer.
        decode: Reads JSON, and raises a ValueError for anything else.
    """

    def __init__(
        self,
        load: Callable[[], ClusterAccess],
        connect: Callable[[ClusterAccess], Connections],
        access: ClusterAccess | None = None,
        *,
        on_request: Callable[[str, str, int], None] = lambda verb, resource, code: None,
        decode: DecodeJson = json.loads,
    ) -> None:
        self._decode = decode
        self._load = load
        self._connect = connect
        self._access = access
        self._on_request = on_request
        self._write_seconds: Callable[[], float] = lambda: REQUEST_TIMEOUT_SECONDS
        self._login: _Login | None = None
        self._login_lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._login is not None:
            await self._login.connections.close()
            self._login = None

    def fence_with(self, write_seconds: Callable[[], float]) -> None:
        """Set what says how many more seconds writes are allowed; 0 or less: fenced."""
        self._write_seconds = write_seconds

    async def send_request(self, request: ApiRequest) -> Obj:
        """Send a request; once more with fresh credentials if these were refused."""
        try:
            return await self._send_once(request)
        except LoginFailed:
            raise
        except Unauthorized:
            return await self._send_once(request)

    async def _send_once(self, request: ApiRequest) -> Obj:
        async with self._open_response(request) as answer:
            return parse_object(await answer.read(), request.what, self._decode)

    async def stream_objects(self, request: ApiRequest, seconds: float) -> AsyncGenerator[Obj]:
        """Send a request whose answer is one object in each line, for so many seconds.

        Bookmarks come every minute, so a stream that is silent for much longer counts as dead.
        """
        for again in (True, False):
            try:
                async with self._open_response(request, stream=True) as answer:
                    async for line in _lines(answer, seconds + WATCH_SILENCE_SECONDS):
                        yield parse_object(line, request.what, self._decode)
                return
            except Unauthorized as error:
                if isinstance(error, LoginFailed) or not again:
                    raise

    @asynccontextmanager
    async def _open_response(
        self, request: ApiRequest, *, stream: bool = False
    ) -> AsyncIterator[Answer]:
        """Send a request and yield the answer, unless it is an error; a stream may last."""
        login = await self._log_in(request.what)
        code: int | None = None
        login.users += 1
        try:
            headers = await self._request_headers(login, request)
            seconds, code = self._request_deadline(request), 0
            async with (
                asyncio.timeout(seconds) as deadline,
                login.connections.open_response(request, headers) as answer,
            ):
                code = answer.status
                if code >= 400:
                    raise from_answer(code, await answer.read(), request.what, answer.retry_after)
                if stream:
                    deadline.reschedule(None)
                yield answer
        except Unauthorized as error:
            self._note_refused(login, error)
            raise
        except OSError as error:
            code = 0
            if isinstance(error, ssl.SSLError):
                self._retire(login)  # perhaps the CA is another one now
            reason = str(error) or "no answer in time"
            text = f"{request.what}: {reason}"
            raise Unavailable(0, "NoAnswer", text, said=reason) from error
        finally:
            if code is not None:
                self._on_request(request.verb, request.resource, code)
            login.users -= 1
            if login.retired and not login.users:
                await login.connections.close()

    def _request_deadline(self, request: ApiRequest) -> float:
        if not request.fenced:
            return request.seconds
        left = self._write_seconds()
        if left <= 0:
            raise FencedError(request.what)
        return min(REQUEST_TIMEOUT_SECONDS, left)

    async def _log_in(self, what: str) -> _Login:
        async with self._login_lock:
            if self._login is None:
                access, self._access = self._access, None
                try:
                    if access is None:
                        access = await asyncio.to_thread(self._load)
                except LoginFailed as error:
                    raise LoginFailed(f"{what}: {error.message}") from error
                self._login = _Login(access, self._connect(access))
            return self._login

    async def _request_headers(self, login: _Login, request: ApiRequest) -> Headers:
        loop = asyncio.get_running_loop()
        if loop.time() >= login.headers_until:
            try:
                # In a thread: it may read a slow volume, or run a program that asks a cloud.
                login.headers = await asyncio.to_thread(login.access.request_headers)
            except LoginFailed as error:
                raise LoginFailed(f"{request.what}: {error.message}") from error
            login.headers_until = loop.time() + HEADERS_REUSE_SECONDS
        content = [] if request.body is None else [("Content-Type", request.content_type)]
        return [("Accept", "application/json"), *content, *login.headers]

    def _note_refused(self, login: _Login, error: Unauthorized) -> None:
        """Ask for another token next time; where none can come, log in again."""
        token = dict(login.headers).get("Authorization", "").removeprefix("Bearer ") or None
        login.headers_until = 0.0
        if isinstance(error, LoginFailed) or not login.access.forget(token):
            self._retire(login)

    def _retire(self, login: _Login) -> None:
        """Log in again before the next request; those under way end on their connections."""
        login.retired = True
        if self._login is login:
            self._login = None


async def _lines(answer: Answer, seconds: float) -> AsyncGenerator[bytes]:
    """Yield the lines of a stream, which lasts so many seconds at most."""
    loop = asyncio.get_running_loop()
    until, rest = loop.time() + seconds, b""
    while (left := until - loop.time()) > 0:
        async with asyncio.timeout(min(left, WATCH_SILENCE_SECONDS)):
            chunk = await anext(answer.chunks, None)
        if chunk is None:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        for line in filter(None, lines):
            yield line


def parse_object(raw: bytes, what: str, decode: DecodeJson = json.loads) -> Obj:
    """Return a JSON object; a proxy in between may send anything.

    Raises:
        KubeError: It is something else.
    """
    try:
        answer = decode(raw)
    except ValueError as error:
        raise KubeError(0, "BadAnswer", f"{what}: the answer is not JSON") from error
    if not isinstance(answer, dict):
        raise KubeError(0, "BadAnswer", f"{what}: the answer is not a JSON object")
    return answer
