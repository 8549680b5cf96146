"""How to reach an API server: the pod's service account, or a kubeconfig.

A kubeconfig may spread over several files. Its users may have a token, a file with one, a password, a
client certificate, or a program that hands out a token or a certificate.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .environment_proxy import environment_proxy
from .errors import LoginFailed
from .exec_plugin import ExecPlugin
from .server_tls import load_certificate, make_tls

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
        impersonated: Headers that name the account to act as, if it is another one.
        proxy: URL of the proxy in between.
        reload: Reads the same sources again.
    """

    server: str
    tls: ssl.SSLContext
    token: Callable[[], str | None]
    namespace: str
    forget: Callable[[str | None], bool] = lambda refused: False
    basic_auth: tuple[str, str] | None = None
    impersonated: tuple[tuple[str, str], ...] = ()
    proxy: str | None = None
    reload: Callable[[], ClusterAccess] = lambda: load_access()

    def request_headers(self) -> list[tuple[str, str]]:
        """Return the `Authorization` of the next request, if it has one, and `impersonated`; may block.

        Raises:
            LoginFailed: The token can't be read.
        """
        if self.basic_auth is not None:
            secret = base64.b64encode(":".join(self.basic_auth).encode()).decode()
            return [("Authorization", f"Basic {secret}"), *self.impersonated]
        try:
            token = self.token()
        except (OSError, ValueError) as error:
            raise LoginFailed(f"the token for the API server can't be read: {error}") from error
        if token and not (token.isascii() and token.isprintable()):
            raise LoginFailed("the token for the API server has characters that no token has")
        said = [("Authorization", f"Bearer {token}")] if token else []
        return [*said, *self.impersonated]


def uses_service_account(kubeconfig: str | Path | None, context: str | None) -> bool:
    """Whether `load_access` takes the account of the pod that this process runs in."""
    named = kubeconfig or context or os.environ.get("KUBECONFIG")
    return not named and (SERVICE_ACCOUNT_DIR / "token").exists()


def load_access(
    kubeconfig: str | Path | None = None,
    context: str | None = None,
    provider_token: Callable[[], str | None] | None = None,
) -> ClusterAccess:
    """Return the access of this process.

    It comes from the given kubeconfig, else from `$KUBECONFIG`, else from the pod's service account (unless a
    context is given), else from `~/.kube/config`.

    Args:
        kubeconfig: File.
        context: Its context; default: the current one.
        provider_token: Returns the token of a user with `auth-provider`; None: such users are refused.

    Raises:
        LoginFailed: There is none, or it can't be used.
    """
    if uses_service_account(kubeconfig, context):
        try:
            return _service_account_access()
        except (OSError, ValueError) as error:
            raise LoginFailed(f"the service account can't be used: {error!r}") from error
    named = kubeconfig or os.environ.get("KUBECONFIG")
    try:
        document = _merged_kubeconfig(str(named or "~/.kube/config"))
        found = _kubeconfig_access(document, context, provider_token)
        return replace(found, reload=partial(load_access, kubeconfig, context, provider_token))
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        where = named or "~/.kube/config (set KUBECONFIG, or run in a pod with a service account)"
        # Texts of errors in values are ours: Python's would quote tokens and keys.
        why = str(error) if isinstance(error, (OSError, ValueError)) else repr(error)
        raise LoginFailed(f"the kubeconfig {where} can't be used: {why}") from error


def _service_account_access() -> ClusterAccess:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    host = f"[{host}]" if ":" in host else host
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return ClusterAccess(
        server=f"https://{host}:{port}",
        tls=make_tls((SERVICE_ACCOUNT_DIR / "ca.crt").read_bytes()),
        token=lambda: (SERVICE_ACCOUNT_DIR / "token").read_text().strip(),
        namespace=(SERVICE_ACCOUNT_DIR / "namespace").read_text().strip(),
        forget=lambda refused: True,
    )


def _kubeconfig_access(
    document: Obj, context: str | None, provider_token: Callable[[], str | None] | None
) -> ClusterAccess:
    chosen = _find_entry(document, "contexts", context or document.get("current-context"))
    cluster = _find_entry(document, "clusters", chosen.get("cluster"))
    user = _find_entry(document, "users", chosen.get("user"))
    if not cluster.get("server"):
        raise ValueError(f"the cluster {chosen['cluster']} has no server")
    server = str(cluster["server"]).rstrip("/")
    tls = make_tls(
        _read_pem(cluster, "certificate-authority"),
        server_name=cluster.get("tls-server-name") or None,
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
    )
    certificate, key = (_read_pem(user, field) for field in ("client-certificate", "client-key"))
    if certificate and key:
        load_certificate(tls, certificate + b"\n" + key)
    token, forget = _token_source(user, cluster, tls, provider_token)
    password = user.get("password")
    return ClusterAccess(
        server=server,
        tls=tls,
        token=token,
        namespace=chosen.get("namespace") or "default",
        forget=forget,
        basic_auth=(user["username"], password) if password else None,
        impersonated=_impersonation_headers(user),
        proxy=_check_proxy(cluster.get("proxy-url") or environment_proxy(server, os.environ)),
    )


def _check_proxy(proxy: str | None) -> str | None:
    """Return a proxy, unless it is of a kind that the HTTP libraries don't speak to."""
    scheme, found, _ = (proxy or "").partition("://")
    if proxy and (not found or scheme not in ("http", "https")):
        raise ValueError(  # the URL itself may have a password
            f"its proxy-url, or HTTPS_PROXY, begins with {scheme if found else 'no scheme'}: "
            "give a proxy with http:// or https://"
        )
    return proxy


def _impersonation_headers(user: Obj) -> tuple[tuple[str, str], ...]:
    """Return the headers that name the account as which a user acts."""
    uid, groups = user.get("as-uid"), user.get("as-groups") or ()
    extra: Obj = user.get("as-user-extra") or {}
    if not user.get("as"):
        if uid or groups or extra:
            raise ValueError("users with as-uid, as-groups or as-user-extra also need as")
        return ()
    return (
        ("Impersonate-User", str(user["as"])),
        *((("Impersonate-Uid", str(uid)),) if uid else ()),
        *(("Impersonate-Group", str(group)) for group in groups),
        *(
            (f"Impersonate-Extra-{quote(key, safe='')}", str(value))
            for key, values in extra.items()
            for value in values
        ),
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
        plugin = ExecPlugin(user["exec"], cluster, lambda pem: load_certificate(tls, pem.encode()))
        return plugin.get_token, plugin.forget_token
    if "auth-provider" not in user or given:
        return (lambda: given), (lambda refused: False)
    if provider_token is None:
        raise ValueError("users with auth-provider are not supported: use exec, or a token")
    return provider_token, (lambda refused: True)


def _merged_kubeconfig(paths: str) -> Obj:
    """Return all files of a kubeconfig as one: of two entries with one name the first counts."""
    names = [name for name in paths.split(os.pathsep) if name.strip()]
    # Unlike Path.expanduser, this takes an account without a home, as containers have.
    files = [Path(os.path.expanduser(name.strip())).absolute() for name in names]
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
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text") from error
    try:
        document = json.loads(text)
    except ValueError:
        import yaml  # a worker has no kubeconfig, and need not have yaml

        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)  # the text has the line itself
            where = f", line {mark.line + 1}" if mark else ""
            raise ValueError(f"{file}{where} is not YAML") from error
    if not isinstance(document, dict):
        raise ValueError(f"{file} is not a mapping")
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


def _find_entry(document: Obj, kind: str, name: str | None) -> Obj:
    entries = document.get(kind) or ()
    for entry in entries:
        if name and entry.get("name") == name:
            found: Obj = entry.get(kind.removesuffix("s")) or {}
            return found
    names = ", ".join(str(entry.get("name")) for entry in entries) or "none"
    if not name:
        wanting = (
            "current-context" if kind == "contexts" else f"{kind.removesuffix('s')} of its context"
        )
        raise ValueError(f"it names no {wanting}; its {kind}: {names}")
    raise ValueError(f"{name!r} is not among its {kind}: {names}")


def _read_pem(section: Obj, field: str) -> bytes | None:
    """Return what a field of certificates or keys has, or the file that it names; None: neither."""
    if data := section.get(f"{field}-data"):
        try:
            return base64.b64decode("".join(str(data).split()), validate=True)
        except ValueError as error:
            raise ValueError(f"its {field}-data is not base64") from error
    return Path(section[field]).read_bytes() if section.get(field) else None
