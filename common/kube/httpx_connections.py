"""Connections over httpx, for processes that send few requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
from typing_extensions import override

from .access import ClusterAccess
from .api_client import Answer, ApiRequest, Connections, Headers
from .settings import CONNECT_TIMEOUT_SECONDS


class HttpxConnections(Connections):
    """Connections of an httpx client."""

    def __init__(self, access: ClusterAccess) -> None:
        self._http = httpx.AsyncClient(
            base_url=access.server,
            verify=access.tls,
            proxy=access.proxy,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_SECONDS),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    @override
    @asynccontextmanager
    async def open_response(self, request: ApiRequest, headers: Headers) -> AsyncIterator[Answer]:
        with _os_errors():
            async with self._http.stream(
                request.method,
                request.path,
                params=request.params,
                content=request.content(),
                headers=list(headers),
            ) as answer:
                yield Answer(
                    answer.status_code, answer.headers.get("Retry-After"), answer.aiter_bytes()
                )

    @override
    async def close(self) -> None:
        await self._http.aclose()


def system_error(error: BaseException) -> OSError | None:
    """Return what httpx, httpcore and anyio have wrapped, if it is the system's and has a text.

    Where several addresses failed, it is the last failure.
    """
    while True:
        # httpcore's pool cuts the chain of causes; its errors have theirs as argument.
        inner = error.__cause__ or next(iter(error.args), None)
        if isinstance(inner, ExceptionGroup):
            inner = inner.exceptions[-1]
        if not isinstance(inner, BaseException):
            return error if isinstance(error, OSError) and str(error) else None
        error = inner


@contextmanager
def _os_errors() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        if (found := system_error(error)) is not None:
            raise found from error
        raise ConnectionError(str(error) or type(error).__name__) from error
