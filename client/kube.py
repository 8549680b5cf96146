"""The few requests to the API server that the client needs, over httpx alone.

In a pod the service account's token is read again for each request, since the kubelet renews it;
elsewhere a kubeconfig with a token or a client certificate is used.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import random
import ssl
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from .errors import ClusterError

logger = logging.getLogger(__name__)

Obj = dict[str, Any]

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_SECONDS = 30.0
WATCH_SECONDS = 240
"""After so long the API server ends a watch, and everything is listed again: nothing that a watch
missed stays unknown for longer."""

SLACK_SECONDS = 15.0
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 10.0


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach an API server."""

    server: str
    tls: ssl.SSLContext
    token: Callable[[], str | None]
    namespace: str


def access(kubeconfig: str | Path | None = None, context: str | None = None) -> Access:
    """Return the access of this process.

    It is the given kubeconfig's, else the pod's account's, else that of `$KUBECONFIG` or
    `~/.kube/config`.

    Raises:
        ClusterError: There is none, or it can't be used.
    """
    if kubeconfig is None and "KUBECONFIG" not in os.environ and (ACCOUNT / "token").exists():
        return _of_pod()
    path = Path(kubeconfig or os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep)[0])
    try:
        return _of_file(path.expanduser(), context)
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ClusterError(f"the kubeconfig {path} can't be used: {error!r}") from error


def _of_pod() -> Access:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    host = f"[{host}]" if ":" in host else host
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return Access(
        server=f"https://{host}:{port}",
        tls=ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")),
        token=lambda: (ACCOUNT / "token").read_text().strip(),
        namespace=(ACCOUNT / "namespace").read_text().strip(),
    )


def _of_file(path: Path, context: str | None) -> Access:
    document = _parsed(path.read_text())
    name = context or document["current-context"]
    chosen = _named(document, "contexts", name)["context"]
    cluster = _named(document, "clusters", chosen["cluster"])["cluster"]
    user = _named(document, "users", chosen["user"])["user"]
    tls = ssl.create_default_context(
        cafile=_file(cluster, "certificate-authority", path), cadata=_text(cluster)
    )
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    _load_certificate(tls, user, path)
    token_file = _file(user, "tokenFile", path)
    given = user.get("token")
    if "exec" in user or "auth-provider" in user:
        raise ValueError("users with exec or auth-provider are not supported: give a token")
    return Access(
        server=str(cluster["server"]).rstrip("/"),
        tls=tls,
        token=lambda: Path(token_file).read_text().strip() if token_file else given,
        namespace=chosen.get("namespace") or "default",
    )


def _parsed(text: str) -> Obj:
    try:
        document = json.loads(text)
    except ValueError:
        import yaml

        document = yaml.safe_load(text)
    if not isinstance(document, dict):
        raise ValueError("it is no mapping")
    return document


def _named(document: Obj, kind: str, name: str) -> Obj:
    for entry in document.get(kind) or ():
        if entry.get("name") == name:
            found: Obj = entry
            return found
    raise KeyError(f"{kind}: {name}")


def _file(section: Obj, key: str, beside: Path) -> str | None:
    value = section.get(key)
    return None if value is None else str(beside.parent / value)


def _text(cluster: Obj) -> str | None:
    data = cluster.get("certificate-authority-data")
    return None if data is None else base64.b64decode(data).decode()


def _load_certificate(tls: ssl.SSLContext, user: Obj, path: Path) -> None:
    certificate, key = _file(user, "client-certificate", path), _file(user, "client-key", path)
    if certificate and key:
        tls.load_cert_chain(certificate, key)
    if "client-certificate-data" in user:
        # The ssl module takes files only; this one is private and gone at once.
        with tempfile.NamedTemporaryFile() as file:
            for part in ("client-certificate-data", "client-key-data"):
                file.write(base64.b64decode(user[part]) + b"\n")
            file.flush()
            tls.load_cert_chain(file.name)


class Kube:
    """Requests with deadlines; every failure is a `ClusterError`."""

    def __init__(self, where: Access) -> None:
        self.namespace = where.namespace
        self._token = where.token
        self._http = httpx.AsyncClient(
            base_url=where.server, verify=where.tls, timeout=REQUEST_SECONDS, trust_env=False
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Obj:
        """Return an object or a list."""
        return await self._send("GET", path, params=params)

    async def merge(self, path: str, body: Obj) -> Obj:
        """Merge into an object and return it.

        With `metadata.resourceVersion` only if it is that one still: else `ClusterError`, 409.
        """
        return await self._send(
            "PATCH",
            path,
            params={"fieldManager": "rollout-client"},
            content=json.dumps(body).encode(),
            kind="application/merge-patch+json",
        )

    async def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        content: bytes | None = None,
        kind: str | None = None,
    ) -> Obj:
        headers = self._headers() | ({"Content-Type": kind} if kind else {})
        try:
            answer = await self._http.request(
                method, path, params=params, content=content, headers=headers
            )
        except httpx.HTTPError as error:
            raise _silent(f"{method} {path}", error) from error
        if not answer.is_success:
            raise _refused(answer.status_code, answer.content)
        found: Obj = answer.json()
        return found

    def _headers(self) -> dict[str, str]:
        token = self._token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    async def follow(
        self, path: str, params: Mapping[str, str], trouble: Callable[[str], None]
    ) -> AsyncGenerator[dict[str, Obj]]:
        """Yield all objects of a collection by name, at once and after each change, for ever.

        Args:
            path: Of the collection.
            params: Selectors.
            trouble: Told why nothing comes at the moment; "" when something does.
        """
        pause = FIRST_PAUSE
        while True:
            try:
                async for objects in self._cycle(path, params):
                    pause = FIRST_PAUSE
                    trouble("")
                    yield objects
            except ClusterError as error:
                trouble(str(error))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(LONGEST_PAUSE, pause * 2)

    async def _cycle(self, path: str, params: Mapping[str, str]) -> AsyncIterator[dict[str, Obj]]:
        """List, then watch until the watch ends, for whatever reason."""
        listed = await self.get(path, params)
        objects = {item["metadata"]["name"]: item for item in listed.get("items") or ()}
        yield dict(objects)
        version = str(listed["metadata"]["resourceVersion"])
        async for event in self._watch(path, {**params, "resourceVersion": version}):
            item = event["object"]
            match event["type"]:
                case "BOOKMARK":
                    continue
                case "ERROR":
                    # Usually 410: what we would have gone on from is forgotten. List again.
                    return
                case "DELETED":
                    objects.pop(item["metadata"]["name"], None)
                case _:
                    objects[item["metadata"]["name"]] = item
            yield dict(objects)

    async def _watch(self, path: str, params: Mapping[str, str]) -> AsyncIterator[Obj]:
        watch = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        # Bookmarks come every minute: a stream that is silent for longer than two is dead.
        limits = httpx.Timeout(REQUEST_SECONDS, read=WATCH_SECONDS / 2 + SLACK_SECONDS)
        try:
            async with self._http.stream(
                "GET", path, params={**params, **watch}, headers=self._headers(), timeout=limits
            ) as answer:
                if not answer.is_success:
                    raise _refused(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if line:
                        yield json.loads(line)
        except httpx.HTTPError as error:
            raise _silent(f"watch {path}", error) from error
        except ValueError as error:
            raise ClusterError(f"watch {path}: a broken line: {error}") from error


def _silent(what: str, error: Exception) -> ClusterError:
    return ClusterError(f"{what}: {type(error).__name__}: {error}".rstrip(": "))


def _refused(status: int, content: bytes) -> ClusterError:
    """The API server's own words."""
    try:
        body = json.loads(content)
        message, reason = str(body.get("message", "")), str(body.get("reason", ""))
    except (ValueError, AttributeError):
        message, reason = content[:300].decode(errors="replace"), ""
    return ClusterError(message or f"HTTP {status}", status=status, reason=reason)
