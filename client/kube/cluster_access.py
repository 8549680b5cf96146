"""How to reach an API server: the pod's service account, or a kubeconfig.

In a pod the service account's token is read again for each request, because the kubelet renews it;
elsewhere a kubeconfig with a token, a client certificate, or a program that hands out either.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollout_client.errors import ClusterError

from .exec_plugin import ExecPlugin

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Obj = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """How to reach an API server.

    Attributes:
        server: URL.
        tls: With the CA, and the client's certificate if it has one.
        token: Returns the bearer token for a request; may block.
        namespace: Where nobody names another one.
        forget: Told a token that the API server refused; returns whether there may be another one.
    """

    server: str
    tls: ssl.SSLContext
    token: Callable[[], str | None]
    namespace: str
    forget: Callable[[str | None], bool] = lambda refused: False


def load_access(kubeconfig: str | Path | None = None, context: str | None = None) -> ClusterAccess:
    """Return the access of this process.

    It comes from the given kubeconfig, else from the pod's service account, else from `$KUBECONFIG`
    or `~/.kube/config`.

    Raises:
        ClusterError: There is none, or it can't be used.
    """
    if (
        kubeconfig is None
        and "KUBECONFIG" not in os.environ
        and (SERVICE_ACCOUNT_DIR / "token").exists()
    ):
        try:
            return _service_account_access()
        except (OSError, ValueError) as error:
            raise ClusterError(f"the service account can't be used: {error!r}") from error
    path = Path(kubeconfig or os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep)[0])
    try:
        return _kubeconfig_access(path.expanduser(), context)
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ClusterError(f"the kubeconfig {path} can't be used: {error!r}") from error


def _service_account_access() -> ClusterAccess:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    host = f"[{host}]" if ":" in host else host
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return ClusterAccess(
        server=f"https://{host}:{port}",
        tls=ssl.create_default_context(cafile=str(SERVICE_ACCOUNT_DIR / "ca.crt")),
        token=lambda: (SERVICE_ACCOUNT_DIR / "token").read_text().strip(),
        namespace=(SERVICE_ACCOUNT_DIR / "namespace").read_text().strip(),
    )


def _kubeconfig_access(path: Path, context: str | None) -> ClusterAccess:
    document = _parse_kubeconfig(path.read_text())
    name = context or document["current-context"]
    chosen = _find_entry(document, "contexts", name)["context"]
    cluster = _find_entry(document, "clusters", chosen["cluster"])["cluster"]
    user = _find_entry(document, "users", chosen["user"])["user"]
    tls = ssl.create_default_context(
        cafile=_file_path(cluster, "certificate-authority", path), cadata=_authority_pem(cluster)
    )
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    _load_certificate(tls, user, path)
    found = ClusterAccess(
        server=str(cluster["server"]).rstrip("/"),
        tls=tls,
        token=_token_source(user, path),
        namespace=chosen.get("namespace") or "default",
    )
    if "exec" not in user or user.get("tokenFile") or user.get("token"):
        return found
    plugin = ExecPlugin(user["exec"], cluster, path, lambda pem: _load_pem(tls, pem))
    return replace(found, token=plugin.get_token, forget=plugin.forget_token)


def _token_source(user: Obj, path: Path) -> Callable[[], str | None]:
    """Return what gives a user's token: a file, or the kubeconfig itself."""
    if "auth-provider" in user:
        raise ValueError("users with auth-provider are not supported: use exec, or a token")
    file, given = _file_path(user, "tokenFile", path), user.get("token")
    return (lambda: Path(file).read_text().strip()) if file else lambda: given


def _parse_kubeconfig(text: str) -> Obj:
    try:
        document = json.loads(text)
    except ValueError:
        import yaml

        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"it is no YAML: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("it is not a mapping")
    return document


def _find_entry(document: Obj, kind: str, name: str) -> Obj:
    for entry in document.get(kind) or ():
        if entry.get("name") == name:
            found: Obj = entry
            return found
    raise KeyError(f"{kind}: {name}")


def _file_path(section: Obj, key: str, beside: Path) -> str | None:
    value = section.get(key)
    return None if value is None else str(beside.parent / value)


def _authority_pem(cluster: Obj) -> str | None:
    data = cluster.get("certificate-authority-data")
    return None if data is None else base64.b64decode(data).decode()


def _load_certificate(tls: ssl.SSLContext, user: Obj, path: Path) -> None:
    certificate, key = (
        _file_path(user, "client-certificate", path),
        _file_path(user, "client-key", path),
    )
    if certificate and key:
        tls.load_cert_chain(certificate, key)
    if "client-certificate-data" in user:
        parts = (user["client-certificate-data"], user["client-key-data"])
        _load_pem(tls, "\n".join(base64.b64decode(part).decode() for part in parts))


def _load_pem(tls: ssl.SSLContext, pem: str) -> None:
    """Use a certificate and its key; the ssl module takes only files."""
    with tempfile.NamedTemporaryFile("w") as file:  # private, and deleted at once
        file.write(pem + "\n")
        file.flush()
        tls.load_cert_chain(file.name)
