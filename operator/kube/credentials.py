"""How the operator reaches the API server: its service account in a pod, else a kubeconfig.

One login for both clients, kopf's streams and our own requests. Tokens of a pod are files that the
kubelet renews, so they are read again and never held for long.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
import os
from pathlib import Path

import kopf
import yaml

from rollout_operator.config import SERVICE_ACCOUNT_DIR, own_namespace

from .settings import TOKEN_REREAD_SECONDS

logger = logging.getLogger(__name__)


class LoginFailed(Exception):
    """No usable credentials; the message says what to provide."""


async def load_connection_info() -> kopf.ConnectionInfo:
    """Return server, certificates and token.

    Raises:
        LoginFailed: There is neither a service account nor a usable kubeconfig.
    """
    if _is_in_cluster():
        return _service_account_info()
    return await asyncio.to_thread(_kubeconfig_info)


def _is_in_cluster() -> bool:
    return (
        not os.environ.get("KUBECONFIG")
        and bool(os.environ.get("KUBERNETES_SERVICE_HOST"))
        and (SERVICE_ACCOUNT_DIR / "token").exists()
    )


def _service_account_info() -> kopf.ConnectionInfo:
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if ":" in host:
        host = f"[{host}]"
    try:
        token = (SERVICE_ACCOUNT_DIR / "token").read_text().strip()
    except OSError as error:
        raise LoginFailed(f"the service account's token can't be read: {error}") from error
    now = datetime.datetime.now(datetime.UTC)
    return kopf.ConnectionInfo(
        server=f"https://{host}:{port}",
        ca_path=str(SERVICE_ACCOUNT_DIR / "ca.crt"),
        token=token,
        default_namespace=own_namespace(),
        expiration=now + datetime.timedelta(seconds=TOKEN_REREAD_SECONDS),
    )


def _kubeconfig_info() -> kopf.ConnectionInfo:
    settings = kopf.OperatorSettings()
    try:
        info = kopf.login_with_kubeconfig(settings=settings)
        if info is None:
            raise LoginFailed(
                "no kubeconfig: set KUBECONFIG, or run in a pod with a service account"
            )
        if not (info.token or info.username or info.certificate_path or info.certificate_data):
            # An exec plugin or an auth provider: the official client knows how to ask them.
            info = kopf.login_via_client(settings=settings, logger=logger)
    except (OSError, KeyError, ValueError, yaml.YAMLError, kopf.LoginError) as error:
        raise LoginFailed(f"the kubeconfig can't be used: {error!r}") from error
    if info is None or not info.server:
        raise LoginFailed("the kubeconfig names no server for its current context")
    return _with_absolute_paths(info)


def _with_absolute_paths(info: kopf.ConnectionInfo) -> kopf.ConnectionInfo:
    """Resolve paths beside the kubeconfig, as kubectl does."""
    first = os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep)[0]
    folder = Path(first).expanduser().absolute().parent

    def resolved(path: object) -> str | None:
        return str(folder / os.fsdecode(path)) if isinstance(path, str | bytes) else None

    return dataclasses.replace(
        info,
        ca_path=resolved(info.ca_path),
        certificate_path=resolved(info.certificate_path),
        private_key_path=resolved(info.private_key_path),
    )
