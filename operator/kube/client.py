"""A thin asynchronous client of the API server: the few verbs and resources that we use.

Every request has a deadline, is counted, and either returns the object or raises one error of
`kube_errors`. Writes are fenced: none is sent unless this process holds the Lease, and none may
take longer than the Lease lasts, so that a successor never meets a write of ours.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import aiohttp
import kopf

from rollout_operator.api.names import API_VERSION, GROUP, KIND, MANAGER, PLURAL, VERSION
from rollout_operator.api.objects import Obj

from .credentials import LoginFailed, login
from .errors import FencedError, Forbidden, KubeError, Unauthorized, Unavailable, from_answer

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 30.0
CONNECT_SECONDS = 5.0
MAX_CONNECTIONS = 100
TOKEN_RENEW_SHARE = 0.7
"""A minted token is replaced when this share of its life is over."""

PatchKind = Literal["merge", "json", "apply"]
_CONTENT_TYPES: Mapping[PatchKind, str] = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}


@dataclass(frozen=True, slots=True)
class _Resource:
    prefix: str
    api_version: str
    kind: str


RESOURCES: Mapping[str, _Resource] = {
    PLURAL: _Resource(f"/apis/{GROUP}/{VERSION}", API_VERSION, KIND),
    "pods": _Resource("/api/v1", "v1", "Pod"),
    "services": _Resource("/api/v1", "v1", "Service"),
    "serviceaccounts": _Resource("/api/v1", "v1", "ServiceAccount"),
    "leases": _Resource("/apis/coordination.k8s.io/v1", "coordination.k8s.io/v1", "Lease"),
    "events": _Resource("/apis/events.k8s.io/v1", "events.k8s.io/v1", "Event"),
}


class Page(NamedTuple):
    """A part of a list; `resource_version` is that of the whole list."""

    items: list[Obj]
    resource_version: str


class Kube:
    """See the module; use it as an async context manager, or call `close`.

    Args:
        on_request: Called with (verb, resource, code) after each request; code 0: no answer.
        write_seconds: Seconds for which writes are allowed still; 0 or less: fenced.
        service_account: (namespace, name) of the account that `token` mints for.
    """

    def __init__(
        self,
        *,
        on_request: Callable[[str, str, int], None] = lambda verb, resource, code: None,
        write_seconds: Callable[[], float] = lambda: REQUEST_SECONDS,
        service_account: tuple[str, str] | None = None,
    ) -> None:
        self._on_request = on_request
        self._write_seconds = write_seconds
        self._account = service_account
        self._session: aiohttp.ClientSession | None = None
        self._info: kopf.ConnectionInfo | None = None
        self._ssl: ssl.SSLContext | None = None
        self._login_until = 0.0
        self._login_lock = asyncio.Lock()
        self._tokens: dict[str, tuple[float, str]] = {}
        self._token_locks: dict[str, asyncio.Lock] = {}

    async def __aenter__(self) -> Kube:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def fence_with(self, write_seconds: Callable[[], float]) -> None:
        """Set who says for how long writes are allowed."""
        self._write_seconds = write_seconds

    async def get(self, resource: str, namespace: str, name: str) -> Obj:
        """Return one object, or raise `NotFound`."""
        return await self._send("get", resource, namespace, name)

    async def create(self, resource: str, obj: Obj) -> Obj:
        """Create an object; unknown fields are an error (`Invalid`), a taken name `AlreadyExists`."""
        params = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        namespace = obj["metadata"]["namespace"]
        return await self._send("create", resource, namespace, body=obj, params=params)

    async def delete(
        self,
        resource: str,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        grace: int | None = None,
        propagation: str | None = None,
    ) -> None:
        """Delete an object; with `uid` only that very object (else `Conflict`)."""
        options: Obj = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if propagation is not None:
            options["propagationPolicy"] = propagation
        await self._send("delete", resource, namespace, name, body=options)

    async def patch(
        self,
        resource: str,
        namespace: str,
        name: str,
        body: Any,
        *,
        kind: PatchKind = "merge",
        subresource: str | None = None,
    ) -> Obj:
        """Patch an object or a subresource of it.

        `apply` is a server-side apply as field manager `rollout-operator`, by force; `body` needs
        apiVersion and kind then, and may carry `metadata.resourceVersion` to be refused
        (`Conflict`) where somebody else was faster. `merge` may carry it too.
        """
        params = {"fieldManager": MANAGER}
        if kind == "apply":
            params["force"] = "true"
        path = f"{name}/{subresource}" if subresource else name
        return await self._send(
            "patch", resource, namespace, path, body=body, params=params, content=kind
        )

    async def list_pages(
        self,
        resource: str,
        namespace: str | None,
        *,
        selector: str | None = None,
        limit: int = 500,
    ) -> AsyncIterator[Page]:
        """Yield a list page by page; namespace None: all of them.

        Raises:
            Gone: The continuation expired (the list took minutes): begin again.
        """
        known = RESOURCES[resource]
        params = {"limit": str(limit)}
        if selector:
            params["labelSelector"] = selector
        while True:
            answer = await self._send("list", resource, namespace, params=params)
            items = answer.get("items") or []
            for item in items:
                item.setdefault("apiVersion", known.api_version)
                item.setdefault("kind", known.kind)
            meta = answer.get("metadata") or {}
            yield Page(items, str(meta.get("resourceVersion", "")))
            if not meta.get("continue"):
                return
            params["continue"] = meta["continue"]

    async def token(self, audience: str, seconds: int = 600) -> str:
        """Return a token of the operator's own account for one audience, from a cache if fresh.

        Raises:
            Forbidden: No service account was named, or it may not mint tokens.
        """
        if self._account is None:
            raise Forbidden(0, "NoServiceAccount", "no account to mint tokens: --service-account")
        lock = self._token_locks.setdefault(audience, asyncio.Lock())
        async with lock:
            renew_at, token = self._tokens.get(audience, (0.0, ""))
            if time.monotonic() < renew_at:
                return token
            token = await self._mint(self._account, audience, seconds)
            renew_at = time.monotonic() + TOKEN_RENEW_SHARE * seconds
            self._tokens[audience] = (renew_at, token)
            return token

    def forget_token(self, audience: str) -> None:
        """Mint a new token the next time, because this one was refused or the pool is gone."""
        self._tokens.pop(audience, None)
        self._token_locks.pop(audience, None)

    async def _mint(self, account: tuple[str, str], audience: str, seconds: int) -> str:
        namespace, name = account
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": seconds},
        }
        answer = await self._send(
            "create", "serviceaccounts", namespace, f"{name}/token", body=body, fenced=False
        )
        return str(answer["status"]["token"])

    async def _send(
        self,
        verb: str,
        resource: str,
        namespace: str | None,
        path: str = "",
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        content: PatchKind | None = None,
        fenced: bool | None = None,
    ) -> Obj:
        """Send one request; once more with fresh credentials if these were refused."""
        what = f"{verb} {resource} {namespace or '*'}/{path}".rstrip("/")
        url = _url(RESOURCES[resource], resource, namespace, path)
        if fenced is None:
            # The Lease is how the fence is kept; reading changes nothing.
            fenced = verb not in ("get", "list") and resource != "leases"
        request = _Request(verb, resource, url, what, body, dict(params or {}), content, fenced)
        try:
            return await self._attempt(request)
        except Unauthorized:
            self._login_until = 0.0
            return await self._attempt(request)

    async def _attempt(self, request: _Request) -> Obj:
        session, info = await self._connected(request.what)
        seconds = self._deadline(request)
        headers = {"Accept": "application/json", **info.as_http_headers()}
        if request.body is not None:
            kind = _CONTENT_TYPES[request.content] if request.content else "application/json"
            headers["Content-Type"] = kind
        code = 0
        try:
            async with session.request(
                _METHODS[request.verb],
                info.server.rstrip("/") + request.url,
                params=request.params,
                data=None if request.body is None else json.dumps(request.body).encode(),
                headers=headers,
                ssl=self._ssl if self._ssl is not None else True,
                proxy=info.proxy_url,
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS),
            ) as response:
                code = response.status
                raw = await response.read()
                retry_after = response.headers.get("Retry-After")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            code = 0
            if isinstance(error, aiohttp.ClientSSLError):
                self._login_until, self._ssl = 0.0, None  # perhaps the CA is another one now
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            reason = str(cause) or type(error).__name__
            raise Unavailable(0, "NoAnswer", f"{request.what}: {reason}") from error
        finally:
            self._on_request(request.verb, request.resource, code)
        if code >= 400:
            raise from_answer(code, raw, request.what, retry_after)
        return _parsed(raw, request.what)

    def _deadline(self, request: _Request) -> float:
        if not request.fenced:
            return REQUEST_SECONDS
        left = self._write_seconds()
        if left <= 0:
            raise FencedError(request.what)
        return min(REQUEST_SECONDS, left)

    async def _connected(self, what: str) -> tuple[aiohttp.ClientSession, kopf.ConnectionInfo]:
        async with self._login_lock:
            if self._info is None or time.monotonic() >= self._login_until:
                try:
                    info = await login()
                except LoginFailed as error:
                    raise Unauthorized(0, "LoginFailed", f"{what}: {error}") from error
                if self._ssl is None or info.expiration is None:
                    self._ssl = info.as_ssl_context()  # a pod's CA does not change with its token
                self._info = info
                renewed = info.expiration is not None
                self._login_until = time.monotonic() + (60.0 if renewed else 3600.0)
            if self._session is None:
                connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS)
                self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
            return self._session, self._info


@dataclass(frozen=True, slots=True)
class _Request:
    verb: str
    resource: str
    url: str
    what: str
    body: Any
    params: dict[str, str]
    content: PatchKind | None
    fenced: bool


_METHODS = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "patch": "PATCH",
    "delete": "DELETE",
}


def _url(known: _Resource, resource: str, namespace: str | None, path: str) -> str:
    scope = f"/namespaces/{namespace}" if namespace is not None else ""
    return f"{known.prefix}{scope}/{resource}" + (f"/{path}" if path else "")


def _parsed(raw: bytes, what: str) -> Obj:
    try:
        answer = json.loads(raw)
    except ValueError as error:
        raise KubeError(200, "BadAnswer", f"{what}: the answer is no JSON") from error
    if not isinstance(answer, dict):
        raise KubeError(200, "BadAnswer", f"{what}: the answer is no object")
    return answer
