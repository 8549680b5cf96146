"""How to reach an API server: the pod's service account, or a kubeconfig.

A kubeconfig may spread over several files. Its users may have a token, a file with one, a password, a
client certificate, or a program that hands out a token or a certificate.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from .errors import LoginFailed
from .exec_plugin import ExecPlugin

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Obj = dict[str, Any]
"""A Kubernetes object, or a part of one, as JSON."""

_PATH_FIELDS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """How to reach an API server.

    Attributes:
        server: URL.
        tls: With the CA, and the client's certificate if it has one.
        token: Returns the bearer token for a request; may block.
        namespace: The default of requests that name none.
        forget: Takes a token that the API server refused; returns whether the next one may differ.
        basic_auth: User and password, instead of a token.
        proxy: URL of the proxy in between.
        reload: Reads the same sources again.
    """

    server: str
    tls: ssl.SSLContext
    token: Callable[[], str | None]
    namespace: str
    forget: Callable[[str | None], bool] = lambda refused: False
    basic_auth: tuple[str, str] | None = None
    proxy: str | None = None
    reload: Callable[[], ClusterAccess] = lambda: load_access()

    def request_headers(self) -> dict[str, str]:
        """Return the `Authorization` of the next request, if it has one; may block.

        Raises:
            LoginFailed: The token can't be read.
        """
        if self.basic_auth is not None:
            return {"Authorization": f"Basic {_encode_base64(':'.join(self.basic_auth))}"}
        try:
            token = self.token()
        except (OSError, ValueError) as error:
            raise LoginFailed(f"the token for the API server can't be read: {error}") from error
        if token and not (token.isascii() and token.isprintable()):
            raise LoginFailed("the token for the API server has characters that no token has")
        return {"Authorization": f"Bearer {token}"} if token else {}


def load_access(
    kubeconfig: str | Path | None = None,
    context: str | None = None,
    provider_token: Callable[[], str | None] | None = None,
) -> ClusterAccess:
    """Return the access of this process.

    It comes from the given kubeconfig, else from `$KUBECONFIG`, else from the pod's service account, else
    from `~/.kube/config`.

    Args:
        kubeconfig: File.
        context: Its context; default: the current one.
        provider_token: Returns the token of a user with `auth-provider`; None: such users are refused.

    Raises:
        LoginFailed: There is none, or it can't be used.
    """
    named = kubeconfig or os.environ.get("KUBECONFIG")
    if not named and (SERVICE_ACCOUNT_DIR / "token").exists():
        try:
            return _service_account_access()
        except (OSError, ValueError) as error:
            raise LoginFailed(f"the service account can't be used: {error!r}") from error
    try:
        document = _merged_kubeconfig(str(named or "~/.kube/config"))
        found = _kubeconfig_access(document, context, provider_token)
        return replace(found, reload=partial(load_access, kubeconfig, context, provider_token))
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        where = named or "~/.kube/config (set KUBECONFIG, or run in a pod with a service account)"
        raise LoginFailed(f"the kubeconfig {where} can't be used: {error!r}") from error


def _service_account_access() -> ClusterAccess:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    host = f"[{host}]" if ":" in host else host
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return ClusterAccess(
        server=f"https://{host}:{port}",
        tls=ssl.create_default_context(cafile=str(SERVICE_ACCOUNT_DIR / "ca.crt")),
        token=lambda: (SERVICE_ACCOUNT_DIR / "token").read_text().strip(),
        namespace=(SERVICE_ACCOUNT_DIR / "namespace").read_text().strip(),
        forget=lambda refused: True,
    )


def _kubeconfig_access(
    document: Obj, context: str | None, provider_token: Callable[[], str | None] | None
) -> ClusterAccess:
    chosen = _find_entry(document, "contexts", context or document["current-context"])
    cluster = _find_entry(document, "clusters", chosen["cluster"])
    user = _find_entry(document, "users", chosen["user"])
    _refuse_unsupported(cluster, user)
    authority = cluster.get("certificate-authority-data")
    tls = ssl.create_default_context(
        cafile=cluster.get("certificate-authority"),
        cadata=None if authority is None else _decode_base64(authority),
    )
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    _load_certificate(tls, user)
    token, forget = _token_source(user, cluster, tls, provider_token)
    password = user.get("password")
    return ClusterAccess(
        server=str(cluster["server"]).rstrip("/"),
        tls=tls,
        token=token,
        namespace=chosen.get("namespace") or "default",
        forget=forget,
        basic_auth=(user["username"], password) if password else None,
        proxy=cluster.get("proxy-url"),
    )


def _refuse_unsupported(cluster: Obj, user: Obj) -> None:
    if cluster.get("tls-server-name"):  # kopf's connections have no such option
        raise ValueError(
            "clusters with tls-server-name are not supported: remove it, and give a server whose certificate has its host"
        )
    for field in ("as", "as-uid", "as-groups", "as-user-extra"):
        if user.get(field):
            raise ValueError(
                f"users with {field} (impersonation) are not supported: use the account's own token"
            )


def _token_source(
    user: Obj,
    cluster: Obj,
    tls: ssl.SSLContext,
    provider_token: Callable[[], str | None] | None,
) -> tuple[Callable[[], str | None], Callable[[str | None], bool]]:
    """Return what gives a user's token, and what takes a refused one."""
    if user.get("tokenFile"):
        file = Path(user["tokenFile"])
        return (lambda: file.read_text().strip()), (lambda refused: True)
    given = user.get("token")
    if "exec" in user and not given:
        plugin = ExecPlugin(user["exec"], cluster, lambda pem: _load_pem(tls, pem))
        return plugin.get_token, plugin.forget_token
    if "auth-provider" not in user or given:
        return (lambda: given), (lambda refused: False)
    if provider_token is None:
        raise ValueError("users with auth-provider are not supported: use exec, or a token")
    return provider_token, (lambda refused: True)


def _merged_kubeconfig(paths: str) -> Obj:
    """Return all files of a kubeconfig as one: of two entries with one name the first counts."""
    names = [name for name in paths.split(os.pathsep) if name.strip()]
    files = [Path(name.strip()).expanduser().absolute() for name in names]
    # As kubectl: a file of several may be absent.
    present = [file for file in files if file.exists()] or files[:1]
    merged: Obj = {}
    for file in present:
        document = _parse_kubeconfig(file)
        for kind in ("contexts", "clusters", "users"):
            merged[kind] = [*merged.get(kind, ()), *(document.get(kind) or ())]
        if document.get("current-context"):
            merged.setdefault("current-context", document["current-context"])
    return merged


def _parse_kubeconfig(file: Path) -> Obj:
    """Read one file; its relative paths begin at its folder."""
    text = file.read_text()
    try:
        document = json.loads(text)
    except ValueError:
        import yaml  # a worker has no kubeconfig, and need not have yaml

        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"it is not YAML: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("it is not a mapping")
    for section in _sections(document):
        for field in _PATH_FIELDS:
            if section.get(field):
                section[field] = str(file.parent / section[field])
        command = (section.get("exec") or {}).get("command")
        if command and os.sep in command:
            section["exec"]["command"] = str(file.parent / command)
    return document


def _sections(document: Obj) -> Iterator[Obj]:
    for entry in document.get("clusters") or ():
        yield entry.get("cluster") or {}
    for entry in document.get("users") or ():
        yield entry.get("user") or {}


def _find_entry(document: Obj, kind: str, name: str) -> Obj:
    for entry in document.get(kind) or ():
        if entry.get("name") == name:
            found: Obj = entry.get(kind.removesuffix("s")) or {}
            return found
    raise KeyError(f"{kind}: {name}")


def _load_certificate(tls: ssl.SSLContext, user: Obj) -> None:
    certificate, key = user.get("client-certificate"), user.get("client-key")
    if certificate and key:
        tls.load_cert_chain(certificate, key)
    if "client-certificate-data" in user:
        parts = (user["client-certificate-data"], user["client-key-data"])
        _load_pem(tls, "\n".join(map(_decode_base64, parts)))


def _load_pem(tls: ssl.SSLContext, pem: str) -> None:
    """Use a certificate and its key; the ssl module takes only files."""
    with tempfile.NamedTemporaryFile("w") as file:  # private, and deleted at once
        file.write(pem + "\n")
        file.flush()
        tls.load_cert_chain(file.name)


def _decode_base64(text: str) -> str:
    return base64.b64decode(text).decode()


def _encode_base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
