"""How the operator reaches the API server: one login for kopf's streams and our own requests."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
from dataclasses import dataclass, field

import kopf
from multidict import CIMultiDict

from rollout_common.kube.access import ClusterAccess, load_access

from .settings import KOPF_LOGIN_SECONDS


def load_operator_access() -> ClusterAccess:
    """Return the service account's access in a pod, else that of the kubeconfig.

    Raises:
        LoginFailed: There is neither, or it can't be used.
    """
    return load_access(provider_token=_auth_provider_token)


def _auth_provider_token() -> str | None:
    """Return the token of a user with `auth-provider`, which the official client renews."""
    import kubernetes

    made = kubernetes.client.Configuration()
    try:
        kubernetes.config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=made)
    except kubernetes.config.ConfigException as error:
        raise ValueError(f"auth-provider: {error}") from error
    # Its name has changed between versions of the client.
    keys = (made.get_api_key_with_prefix(name) for name in ("BearerToken", "authorization"))
    return next((str(key).removeprefix("Bearer ") for key in keys if key), None)


@dataclass(frozen=True, kw_only=True)
class _KopfLogin(kopf.ConnectionInfo):
    """Our login as kopf takes it. Equal credentials are equal, so kopf does not retry refused ones."""

    tls: ssl.SSLContext = field(compare=False)
    impersonated: tuple[tuple[str, str], ...] = ()
    expiration: datetime.datetime | None = field(default=None, compare=False)

    def as_ssl_context(self) -> ssl.SSLContext:
        return self.tls

    def as_http_headers(self) -> CIMultiDict[str]:  # type: ignore[override]  # for one group each
        return CIMultiDict([*super().as_http_headers().items(), *self.impersonated])


async def load_kopf_login() -> kopf.ConnectionInfo:
    """Return a login for kopf, which asks for another one when it expires or is refused.

    Raises:
        LoginFailed: As `load_operator_access`.
    """
    access = await asyncio.to_thread(load_operator_access)
    headers = await asyncio.to_thread(access.request_headers)
    scheme, _, secret = dict(headers).get("Authorization", "").partition(" ")
    now = datetime.datetime.now(datetime.UTC)
    return _KopfLogin(
        server=access.server,
        tls=access.tls,
        impersonated=access.impersonated,
        scheme=scheme or None,
        token=secret or None,
        default_namespace=access.namespace,
        proxy_url=access.proxy,
        expiration=now + datetime.timedelta(seconds=KOPF_LOGIN_SECONDS),
    )
