"""A thin asynchronous client of the API server: the few verbs and resources that we use.

Every request has a deadline, is counted, and either returns the object or raises one error of
`errors`. Writes are fenced (see `transport`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollout_operator.api.names import API_VERSION, GROUP, KIND, MANAGER_NAME, PLURAL, VERSION
from rollout_operator.api.objects import Obj

from .errors import Forbidden, from_answer
from .settings import REQUEST_TIMEOUT_SECONDS
from .transport import ApiRequest, ApiTransport, PatchKind

TOKEN_RENEW_SHARE = 0.7
"""A minted token is replaced when this share of its life is over."""


@dataclass(frozen=True, slots=True)
class _ResourceType:
    prefix: str
    api_version: str
    kind: str


RESOURCE_TYPES: Mapping[str, _ResourceType] = {
    PLURAL: _ResourceType(f"/apis/{GROUP}/{VERSION}", API_VERSION, KIND),
    "pods": _ResourceType("/api/v1", "v1", "Pod"),
    "services": _ResourceType("/api/v1", "v1", "Service"),
    "endpointslices": _ResourceType(
        "/apis/discovery.k8s.io/v1", "discovery.k8s.io/v1", "EndpointSlice"
    ),
    "resourceclaims": _ResourceType(
        "/apis/resource.k8s.io/v1", "resource.k8s.io/v1", "ResourceClaim"
    ),
    "resourceslices": _ResourceType(
        "/apis/resource.k8s.io/v1", "resource.k8s.io/v1", "ResourceSlice"
    ),
    "serviceaccounts": _ResourceType("/api/v1", "v1", "ServiceAccount"),
    "leases": _ResourceType("/apis/coordination.k8s.io/v1", "coordination.k8s.io/v1", "Lease"),
    "events": _ResourceType("/apis/events.k8s.io/v1", "events.k8s.io/v1", "Event"),
}


class ListPage(NamedTuple):
    """A part of a list; `resource_version` is that of the whole list."""

    items: list[Obj]
    resource_version: str


class KubeClient:
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
        write_seconds: Callable[[], float] = lambda: REQUEST_TIMEOUT_SECONDS,
        service_account: tuple[str, str] | None = None,
    ) -> None:
        self._transport = ApiTransport(on_request, write_seconds)
        self._account = service_account
        self._tokens: dict[str, tuple[float, str]] = {}
        self._token_locks: dict[str, asyncio.Lock] = {}

    async def __aenter__(self) -> KubeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    def fence_with(self, write_seconds: Callable[[], float]) -> None:
        """Set who says for how long writes are allowed."""
        self._transport.write_seconds = write_seconds

    async def get(self, resource: str, namespace: str, name: str) -> Obj:
        """Return one object, or raise `NotFound`."""
        return await self._send_request("get", resource, namespace, name)

    async def get_openapi(self) -> Obj:
        """Return the OpenAPI document of our API group, as the API server publishes it."""
        url = f"/openapi/v3/apis/{GROUP}/{VERSION}"
        what = f"get the OpenAPI document of {API_VERSION}"
        request = ApiRequest("get", "openapi", url, what, None, {}, None, fenced=False)
        return await self._transport.send_request(request)

    async def create(self, resource: str, obj: Obj) -> Obj:
        """Create an object; unknown fields are an error (`Invalid`), a taken name `AlreadyExists`."""
        params = {"fieldManager": MANAGER_NAME, "fieldValidation": "Strict"}
        namespace = obj["metadata"]["namespace"]
        return await self._send_request("create", resource, namespace, body=obj, params=params)

    async def delete(
        self,
        resource: str,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        grace: int | None = None,
    ) -> Obj:
        """Delete an object; with `uid` only that very object (else `Conflict`).

        Returns:
            The object as it terminates, or a `Status` if it is gone at once.
        """
        options: Obj = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        return await self._send_request("delete", resource, namespace, name, body=options)

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
        params = {"fieldManager": MANAGER_NAME}
        if kind == "apply":
            params["force"] = "true"
        path = f"{name}/{subresource}" if subresource else name
        return await self._send_request(
            "patch", resource, namespace, path, body=body, params=params, content=kind
        )

    async def list_pages(
        self,
        resource: str,
        namespace: str | None,
        *,
        selector: str | None = None,
        limit: int = 500,
    ) -> AsyncIterator[ListPage]:
        """Yield a list page by page; namespace None: all of them.

        Raises:
            Gone: The continuation expired (the list took minutes): begin again.
        """
        known = RESOURCE_TYPES[resource]
        params = {"limit": str(limit)}
        if selector:
            params["labelSelector"] = selector
        while True:
            answer = await self._send_request("list", resource, namespace, params=params)
            items = answer.get("items") or []
            for item in items:
                item.setdefault("apiVersion", known.api_version)
                item.setdefault("kind", known.kind)
            meta = answer.get("metadata") or {}
            yield ListPage(items, str(meta.get("resourceVersion", "")))
            if not meta.get("continue"):
                return
            params["continue"] = meta["continue"]

    async def watch(
        self,
        resource: str,
        namespace: str | None,
        version: str,
        *,
        selector: str | None = None,
        seconds: float,
    ) -> AsyncIterator[tuple[str, Obj]]:
        """Yield the events after `version`, as (type, object), for so many seconds.

        Raises:
            Gone: The API server has not kept the events since then: list again.
        """
        params = {"watch": "true", "resourceVersion": version, "timeoutSeconds": f"{seconds:.0f}"}
        if selector:
            params["labelSelector"] = selector
        what = f"watch {resource} {namespace or '*'}"
        url = _resource_url(RESOURCE_TYPES[resource], resource, namespace, "")
        request = ApiRequest("watch", resource, url, what, None, params, None, fenced=False)
        async for event in self._transport.stream_objects(request, seconds):
            kind, obj = event["type"], event["object"]
            if kind == "ERROR":
                raise from_answer(int(obj.get("code", 500)), json.dumps(obj).encode(), what, None)
            yield kind, obj

    async def get_token(self, audience: str, seconds: int = 600) -> str:
        """Return a token of the operator's own account for one audience, from a cache if fresh.

        Raises:
            Forbidden: No service account was named, or it may not mint tokens.
        """
        if self._account is None:
            raise Forbidden(
                0,
                "NoServiceAccount",
                "no service account to mint tokens for: set --service-account",
            )
        lock = self._token_locks.setdefault(audience, asyncio.Lock())
        async with lock:
            renew_at, token = self._tokens.get(audience, (0.0, ""))
            if time.monotonic() < renew_at:
                return token
            token = await self._mint_token(self._account, audience, seconds)
            renew_at = time.monotonic() + TOKEN_RENEW_SHARE * seconds
            self._tokens[audience] = (renew_at, token)
            return token

    def forget_token(self, audience: str) -> None:
        """Mint a new token the next time: this one was refused, or the pool is gone."""
        self._tokens.pop(audience, None)
        self._token_locks.pop(audience, None)

    async def _mint_token(self, account: tuple[str, str], audience: str, seconds: int) -> str:
        namespace, name = account
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": seconds},
        }
        answer = await self._send_request(
            "create", "serviceaccounts", namespace, f"{name}/token", body=body, fenced=False
        )
        return str(answer["status"]["token"])

    async def _send_request(
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
        what = f"{verb} {resource} {namespace or '*'}/{path}".rstrip("/")
        url = _resource_url(RESOURCE_TYPES[resource], resource, namespace, path)
        if fenced is None:
            # The Lease is how the fence is kept; reading changes nothing.
            fenced = verb not in ("get", "list") and resource != "leases"
        request = ApiRequest(verb, resource, url, what, body, params or {}, content, fenced)
        return await self._transport.send_request(request)


def _resource_url(known: _ResourceType, resource: str, namespace: str | None, path: str) -> str:
    scope = f"/namespaces/{namespace}" if namespace is not None else ""
    return f"{known.prefix}{scope}/{resource}" + (f"/{path}" if path else "")
