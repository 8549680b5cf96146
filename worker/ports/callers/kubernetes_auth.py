"""`--auth kubernetes`: TokenReview says who is calling, LocalSubjectAccessReview whether they may.

Only tokens issued for this pool's audience count. If the API server can't be asked, the answer is
503, never yes; one exception is a member of a gang, which goes on to let its head in.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from typing_extensions import override

from rollout_common.wire.problems import ProblemError
from rollout_worker.gang.gang_addresses import head_pod_name
from rollout_worker.ports.settings import (
    CREDENTIALS_FILE_SECONDS,
    REVIEW_TIMEOUT_SECONDS,
    TOKEN_RETRY_SECONDS,
)
from rollout_worker.settings import InvalidSettings, WorkerSettings
from rollout_worker.threads import SharedCall

from .auth import AccessRight, Authorizer, read_bearer_token, token_digest
from .token_reviews import ReviewQueue, TokenReviews

API_GROUP = "rollout.dev"
RESOURCE = "rolloutreplicas"
POD_NAME = "authentication.kubernetes.io/pod-name"


@dataclass(frozen=True, slots=True)
class TokenUser:
    """The owner of a token, according to the API server."""

    name: str
    spec: dict[str, Any] = field(hash=False, compare=False, repr=False)
    """`user`, `uid`, `groups`, `extra`, as in the spec of an access review."""


NOBODY = TokenUser(name="", spec={})
"""The owner of a token that the API server rejected."""


class KubernetesReview(Authorizer):
    """Asks the cluster's API server, and keeps its answers for a while (`token_reviews`)."""

    def __init__(self, settings: WorkerSettings) -> None:
        assert settings.pool is not None
        assert settings.namespace is not None
        self._settings = settings
        self._pool, self._namespace = settings.pool, settings.namespace
        queue = ReviewQueue()
        self._users: TokenReviews[TokenUser] = TokenReviews(
            queue, accepts=lambda user: user is not NOBODY
        )
        self._denials: TokenReviews[str] = TokenReviews(queue, accepts=lambda denial: not denial)
        self._own_token = SharedCall(settings.kube_token_file.read_text, "token")
        self._http = httpx.AsyncClient(
            base_url=_api_server_url(settings),
            verify=_api_server_tls(settings),
            timeout=REVIEW_TIMEOUT_SECONDS,
            trust_env=False,  # a proxy in the pod's environment is not meant for the API server
        )

    @override
    async def check_caller(
        self, authorization: str | None, right: AccessRight, address: str = ""
    ) -> str:
        user = await self.authenticate_caller(authorization, address)
        key = token_digest(read_bearer_token(authorization).encode())
        denial = await self._denials.get(
            (key, right), address, lambda: self._review_right(user, right)
        )
        if denial:
            raise ProblemError("forbidden", denial)
        return user.name

    async def authenticate_caller(self, authorization: str | None, address: str = "") -> TokenUser:
        """Return the user that the token belongs to.

        Raises:
            ProblemError: 401 if it belongs to nobody, 503 if that can't be checked right now.
        """
        token = read_bearer_token(authorization)
        user = await self._users.get(
            token_digest(token.encode()), address, lambda: self._review_token(token)
        )
        if user is NOBODY:
            audience = self._settings.token_audience
            raise ProblemError(
                "unauthenticated",
                f"the token is not valid for audience {audience!r}: request one with"
                f" `kubectl create token ACCOUNT --audience {audience}`",
            )
        return user

    async def _review_token(self, token: str) -> TokenUser:
        audience = self._settings.token_audience
        status = await self._create_review(
            "/apis/authentication.k8s.io/v1/tokenreviews",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenReview",
                "spec": {"token": token, "audiences": [audience]},
            },
        )
        # `error` is also set for invalid tokens, so it adds nothing. An API server that does not
        # support audiences would accept a token issued for anyone: hence the second check.
        if not status.get("authenticated") or audience not in status.get("audiences", []):
            return NOBODY
        user = status.get("user", {})
        spec = {k: user[k] for k in ("uid", "groups", "extra") if k in user}
        return TokenUser(name=user["username"], spec={"user": user["username"], **spec})

    async def _review_right(self, user: TokenUser, right: AccessRight) -> str:
        """Empty if the user has the right, else what is missing."""
        attributes = {
            "namespace": self._namespace,
            "group": API_GROUP,
            "resource": RESOURCE,
            "subresource": right.subresource,
            "name": self._pool,
            "verb": right.verb,
        }
        status = await self._create_review(
            f"/apis/authorization.k8s.io/v1/namespaces/{self._namespace}/localsubjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "LocalSubjectAccessReview",
                "metadata": {"namespace": self._namespace},
                "spec": {**user.spec, "resourceAttributes": attributes},
            },
        )
        if status.get("allowed"):
            return ""
        return (
            f"{user.name} may not {right.verb} {RESOURCE}.{API_GROUP}/{right.subresource} of"
            f" {self._pool!r} in namespace {self._namespace!r}: grant it with a Role"
        )

    async def _create_review(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create a review and return its status; any failure is a 503, never a yes."""
        try:
            token = (await self._own_token.get_result(CREDENTIALS_FILE_SECONDS)).strip()
            answer = await self._http.post(
                path, json=body, headers={"Authorization": f"Bearer {token}"}
            )
            answer.raise_for_status()
            status = answer.json()["status"]
            if not isinstance(status, dict):
                raise TypeError("its status is not an object")
        except (OSError, httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ProblemError(
                "auth-unavailable",
                f"the Kubernetes API could not review the caller ({_failure_reason(error)}): try again",
                retry_after=2,
            ) from error
        return status

    @override
    async def close(self) -> None:
        await self._http.aclose()


def _failure_reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}"
    return type(error).__name__


def _api_server_url(settings: WorkerSettings) -> str:
    if settings.kube_api_url:
        return settings.kube_api_url
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if not host:
        raise InvalidSettings(
            "--auth kubernetes only works inside a pod (KUBERNETES_SERVICE_HOST is not set): use"
            " --auth token elsewhere"
        )
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _api_server_tls(settings: WorkerSettings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(settings.kube_ca))
    except OSError as error:
        raise InvalidSettings(
            f"the Kubernetes CA {str(settings.kube_ca)!r} can't be used: {error}; a pod has it unless "
            "automountServiceAccountToken is false: look whether an admission policy sets that"
        ) from error


class HeadTokenReview(Authorizer):
    """Lets the head of its own gang use a member's control port, and nobody else.

    The head needs no right in the cluster: its token is bound to its pod and issued for this pool, so it
    proves which pod sent it. While the API server can't be asked, a token that was accepted before is
    accepted until it expires. Otherwise every gang, whose members end when their head is silent, would end
    with an outage of the API server that outlasts the cached answers.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._review = KubernetesReview(settings)
        self._account = _own_service_account(settings.kube_token_file)
        self._pod = head_pod_name(settings)
        self._known = ""
        """The token that was accepted last."""

    @override
    async def check_caller(
        self, authorization: str | None, right: AccessRight, address: str = ""
    ) -> str:
        token = read_bearer_token(authorization)
        known = token == self._known and time.time() < _token_expiry(token)
        try:
            async with asyncio.timeout(TOKEN_RETRY_SECONDS if known else None):
                user = await self._review.authenticate_caller(authorization, address)
        except (ProblemError, TimeoutError) as error:
            away = isinstance(error, TimeoutError) or error.slug == "auth-unavailable"
            if known and away:
                return self._pod
            raise
        pods = user.spec.get("extra", {}).get(POD_NAME, [])
        if user.name != self._account or pods != [self._pod]:
            raise ProblemError(
                "forbidden",
                f"{user.name} of pod {', '.join(pods) or 'none'} is not the head of this gang, which"
                f" is pod {self._pod!r} with {self._account}",
            )
        self._known = token
        return self._pod

    @override
    async def close(self) -> None:
        await self._review.close()


def _own_service_account(token_file: Path) -> str:
    """The service account that this pod's own token belongs to."""
    try:
        return str(_token_claims(token_file.read_text().strip())["sub"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidSettings(
            f"--kube-token-file {str(token_file)!r} holds no token of a service account: {error}"
        ) from error


def _token_expiry(token: str) -> float:
    """When a token that the API server has accepted expires, in Unix time; 0 if it doesn't say."""
    try:
        return float(_token_claims(token)["exp"])
    except (ValueError, LookupError, TypeError):
        return 0.0


def _token_claims(token: str) -> Any:
    claims = token.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
