"""The resources and verbs of the API server that the operator uses.

Every request has a deadline, is counted, and either returns the object or raises a `KubeError`. Writes
are fenced (see `rollout_common.kube.api_client`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from rollout_common.kube.api_client import ApiClient, ApiRequest
from rollout_common.kube.errors import Forbidden, KubeError, NotFound, Unavailable
from rollout_common.kube.reflector import Collection
from rollout_operator.api.names import API_VERSION, GROUP, MANAGER_NAME, PLURAL, VERSION
from rollout_operator.api.objects import Obj

from .aiohttp_connections import AiohttpConnections
from .credentials import load_operator_access
from .settings import (
    TOKEN_REFUSED_SECONDS,
    TOKEN_RENEWAL_SECONDS,
    TOKEN_REQUEST_SECONDS,
    TOKEN_RETRY_SECONDS,
    TOKEN_SECONDS,
)

TOKEN_RENEW_SHARE = 0.7
"""A minted token is replaced when this share of its life is over."""

PatchKind = Literal["merge", "apply"]
_CONTENT_TYPES: Mapping[PatchKind, str] = {
    "merge": "application/merge-patch+json",
    "apply": "application/apply-patch+yaml",
}
_PATHS = {
    PLURAL: f"/apis/{GROUP}/{VERSION}",
    "pods": "/api/v1",
    "nodes": "/api/v1",
    "services": "/api/v1",
    "endpointslices": "/apis/discovery.k8s.io/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "podgroups.scheduling.volcano.sh": "/apis/scheduling.volcano.sh/v1beta1",
    "podgroups.scheduling.x-k8s.io": "/apis/scheduling.x-k8s.io/v1alpha1",
    "resourceclaims": "/apis/resource.k8s.io/v1",
    "resourceslices": "/apis/resource.k8s.io/v1",
    "serviceaccounts": "/api/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    "events": "/apis/events.k8s.io/v1",
}


def resource_collection(
    resource: str, namespace: str | None, selector: str | None = None, fields: str | None = None
) -> Collection:
    """Return what to list or watch, selected by labels and by fields; namespace None: all of them, or none."""
    params = {"labelSelector": selector} if selector else {}
    params |= {"fieldSelector": fields} if fields else {}
    what = f"{resource} {namespace or '*'}"
    return Collection(resource, _resource_path(resource, namespace), what, params)


def _resource_path(resource: str, namespace: str | None) -> str:
    scope = f"/namespaces/{namespace}" if namespace is not None else ""
    # Two kinds of PodGroups have one plural: their group is a part of the resource's name here.
    return f"{_PATHS[resource]}{scope}/{resource.partition('.')[0]}"


def explain_error(error: KubeError, absent: str) -> str:
    """Return an error of a list with what to do about it; `absent`: what to ask where nothing is found."""
    if isinstance(error, NotFound):
        return f"{error}; {absent}"
    if isinstance(error, Forbidden):
        return (
            f"{error}; the operator's role lacks this permission: upgrade its chart, or, where that creates "
            "nothing cluster-wide, let a cluster admin grant it (the chart's README says how)"
        )
    return str(error)


@dataclass(frozen=True, slots=True)
class _OwnToken:
    """A token for one audience, if `value` is not empty; times are monotonic."""

    value: str = ""
    ends_at: float = 0.0
    renew_at: float = 0.0
    error: KubeError | None = None
    """Why it has no successor."""


class KubeClient(ApiClient):
    """The API server, and tokens of the operator's own account: `service_account`, as (namespace, name)."""

    def __init__(
        self,
        *,
        on_request: Callable[[str, str, int], None] = lambda verb, resource, code: None,
        service_account: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(
            load_operator_access,
            AiohttpConnections,
            on_request=on_request,
            decode=orjson.loads,  # half the time of json's, and names of fields once for all objects
        )
        self._account = service_account
        self._tokens: dict[str, _OwnToken] = {}
        self._token_locks: dict[str, asyncio.Lock] = {}

    async def get(self, resource: str, namespace: str, name: str) -> Obj:
        """Return one object, or raise `NotFound`."""
        return await self._ask("get", resource, namespace, name)

    async def get_openapi(self) -> Obj:
        """Return the OpenAPI document of our API group, as the API server publishes it."""
        url = f"/openapi/v3/apis/{GROUP}/{VERSION}"
        what = f"get the OpenAPI document of {API_VERSION}"
        return await self.send_request(ApiRequest("get", "openapi", url, what))

    async def get_group_names(self) -> frozenset[str]:
        """Return the names of the API groups that the cluster has, core's left out."""
        answer = await self.send_request(ApiRequest("get", "apigroups", "/apis", "get API groups"))
        return frozenset(str(each["name"]) for each in answer["groups"])

    async def create(self, resource: str, obj: Obj) -> Obj:
        """Create an object; unknown fields are an error (`Invalid`), a taken name `AlreadyExists`."""
        params = {"fieldManager": MANAGER_NAME, "fieldValidation": "Strict"}
        namespace = obj["metadata"]["namespace"]
        return await self._ask("create", resource, namespace, body=obj, params=params)

    async def delete(
        self,
        resource: str,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        grace: int | None = None,
    ) -> Obj:
        """Delete an object; with `uid` only the object that has it (else `Conflict`).

        Returns:
            The object as it terminates, or a `Status` if it is gone at once.
        """
        options: Obj = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        return await self._ask("delete", resource, namespace, name, body=options)

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

        `apply` is a server-side apply as field manager `rollout-operator`, by force; its `body` needs
        apiVersion and kind. With `metadata.resourceVersion`, which `merge` may carry too, the patch is a
        `Conflict` if somebody else was faster.
        """
        params = {"fieldManager": MANAGER_NAME}
        if kind == "apply":
            params["force"] = "true"
        path = f"{name}/{subresource}" if subresource else name
        return await self._ask(
            "patch",
            resource,
            namespace,
            path,
            body=body,
            params=params,
            content_type=_CONTENT_TYPES[kind],
        )

    async def get_token(self, audience: str) -> str:
        """Return a token of the operator's own account for one audience, a cached one while it is fresh.

        One that can't be renewed is good until its end.

        Raises:
            Forbidden: No service account was named, or it may not mint tokens.
            KubeError: The API server did not give one; for some seconds it is not asked again.
        """
        if self._account is None:
            raise Forbidden(
                0,
                "NoServiceAccount",
                "no service account to mint tokens for: set --service-account",
            )
        lock = self._token_locks.setdefault(audience, asyncio.Lock())
        async with lock:
            known = self._tokens.get(audience, _OwnToken())
            if time.monotonic() >= known.renew_at:
                known = await self._renew_token(self._account, audience, known)
                self._tokens[audience] = known
        if known.error is not None and time.monotonic() >= known.ends_at:
            raise known.error.with_traceback(None)  # it is raised again and again
        return known.value

    def forget_token(self, audience: str) -> None:
        """Mint a new token the next time: this one was refused, or the pool is gone."""
        self._tokens.pop(audience, None)
        self._token_locks.pop(audience, None)

    async def _renew_token(
        self, account: tuple[str, str], audience: str, known: _OwnToken
    ) -> _OwnToken:
        began = time.monotonic()
        # Polls wait for it: not for long while the old one is good.
        seconds = TOKEN_RENEWAL_SECONDS if began < known.ends_at else TOKEN_REQUEST_SECONDS
        error: KubeError
        try:
            async with asyncio.timeout(seconds):
                value = await self._mint_token(account, audience)
            renew_at = began + TOKEN_RENEW_SHARE * TOKEN_SECONDS
            return _OwnToken(value, began + TOKEN_SECONDS, renew_at)
        except TimeoutError:
            why = f"the API server gave no token for {audience} within {seconds:g} s"
            error = Unavailable(0, "NoAnswer", why)
        except KubeError as refused:
            error = refused
        now = time.monotonic()
        pause = TOKEN_RETRY_SECONDS if now < known.ends_at else TOKEN_REFUSED_SECONDS
        return replace(known, renew_at=now + pause, error=error)

    async def _mint_token(self, account: tuple[str, str], audience: str) -> str:
        namespace, name = account
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": TOKEN_SECONDS},
        }
        answer = await self._ask(
            "create", "serviceaccounts", namespace, f"{name}/token", body=body, fenced=False
        )
        return str(answer["status"]["token"])

    async def _ask(
        self,
        verb: str,
        resource: str,
        namespace: str,
        path: str = "",
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        fenced: bool | None = None,
    ) -> Obj:
        what = f"{verb} {resource} {namespace}/{path}".rstrip("/")
        url = f"{_resource_path(resource, namespace)}/{path}".rstrip("/")
        if fenced is None:
            # The Lease is how the fence is kept; reading changes nothing.
            fenced = verb != "get" and resource != "leases"
        request = ApiRequest(verb, resource, url, what, params or {}, body, content_type, fenced)
        return await self.send_request(request)
