"""Connections over httpx, for processes that send few requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import httpx
from typing_extensions import override

from .access import ClusterAccess
from .api_client import Answer, ApiRequest, Connections
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
    async def open_response(
        self, request: ApiRequest, headers: Mapping[str, str]
    ) -> AsyncIterator[Answer]:
        with _os_errors():
            async with self._http.stream(
                request.method,
                request.path,
                params=request.params,
                content=request.content(),
                headers=headers,
            ) as answer:
                yield Answer(
                    answer.status_code, answer.headers.get("Retry-After"), answer.aiter_bytes()
                )

    @override
    async def close(self) -> None:
        await self._http.aclose()


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise what httpx, httpcore and anyio have wrapped; where several addresses failed, the last failure."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
            cause = cause.exceptions[-1] if isinstance(cause, ExceptionGroup) else cause
        if isinstance(cause, OSError) and str(cause):
            raise cause from error
        raise ConnectionError(str(error) or type(error).__name__) from error
