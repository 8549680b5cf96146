"""The few requests to the API server that the client needs; every failure is a `ClusterError`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path

from rollout_common.kube import access as accesses
from rollout_common.kube.access import ClusterAccess, Obj
from rollout_common.kube.api_client import ApiClient, ApiRequest
from rollout_common.kube.errors import KubeError
from rollout_common.kube.httpx_connections import HttpxConnections
from rollout_common.kube.reflector import Collection, Reflector, follow_collection, retry_pause
from rollout_common.kube.settings import REQUEST_TIMEOUT_SECONDS

from .errors import ClusterError
from .settings import LAST_REQUEST_SECONDS

ReportTrouble = Callable[[ClusterError | None], None]
"""Takes what fails, and None once nothing does; what it raises ends the watch."""


def load_access(kubeconfig: str | Path | None = None, context: str | None = None) -> ClusterAccess:
    """Return the access of this process, as `rollout_common.kube.access.load_access` finds it.

    Raises:
        ClusterError: There is none, or it can't be used.
    """
    try:
        return accesses.load_access(kubeconfig, context)
    except KubeError as error:
        raise _cluster_error(error) from error


def pools_path(namespace: str) -> str:
    """Return the API server's path of a namespace's RolloutReplicas."""
    return f"/apis/rollout.dev/v1alpha1/namespaces/{namespace}/rolloutreplicas"


class ClusterClient(ApiClient):
    """Requests with deadlines to the API server of an access."""

    def __init__(self, where: ClusterAccess) -> None:
        super().__init__(where.reload, HttpxConnections, where)
        self.namespace = where.namespace

    async def get(
        self, path: str, params: Mapping[str, str] | None = None, *, seconds: float | None = None
    ) -> Obj:
        """Return an object or a list; with `seconds` passing failures are retried until then."""
        until, attempt, left = time.monotonic() + (seconds or 0), 0, REQUEST_TIMEOUT_SECONDS
        while True:
            if seconds is not None:
                left = _request_seconds(until - time.monotonic())
            request = ApiRequest("get", "", path, f"GET {path}", params or {}, seconds=left)
            try:
                return await self._send(request)
            except ClusterError as error:
                pause = retry_pause(attempt)
                if not error.is_transient or time.monotonic() + pause > until:
                    raise
            await asyncio.sleep(pause)
            attempt += 1

    async def get_text(self, path: str, params: Mapping[str, str] | None = None) -> str:
        """Return a text, such as a log."""
        request = ApiRequest("get", "", path, f"GET {path}", params or {})
        try:
            async with self._open_response(request) as answer:
                return (await answer.read()).decode(errors="replace")
        except KubeError as error:
            raise _cluster_error(error) from error

    async def merge_patch(self, path: str, body: Obj, seconds: float) -> Obj:
        """Merge into an object and return it, within so many seconds.

        With `metadata.resourceVersion` only if the object still has that version; if not, this
        raises a `ClusterError` of status 409.
        """
        params, kind = {"fieldManager": "rollout-client"}, "application/merge-patch+json"
        what, left = f"PATCH {path}", _request_seconds(seconds)
        request = ApiRequest("patch", "", path, what, params, body, kind, seconds=left)
        return await self._send(request)

    async def _send(self, request: ApiRequest) -> Obj:
        try:
            return await self.send_request(request)
        except KubeError as error:
            raise _cluster_error(error) from error

    async def follow_objects(
        self, path: str, params: Mapping[str, str], trouble: ReportTrouble
    ) -> AsyncGenerator[dict[str, Obj]]:
        """Yield all objects of a collection by name, now and after each change, without end.

        `trouble` is called with the reason while nothing comes, and with None once something does.
        """

        def report(error: KubeError | None) -> None:
            trouble(None if error is None else _cluster_error(error))

        of = Collection("", path, path, params)
        reflector: Reflector[Obj] = Reflector(
            lambda: follow_collection(self, of, lambda obj: (obj["metadata"]["name"], obj), report)
        )
        async with aclosing(reflector.changes()) as changes:
            async for _ in changes:
                yield dict(reflector.values)


def _request_seconds(left: float) -> float:
    """Return the deadline of one request of a caller that has so many seconds left."""
    return min(max(left, LAST_REQUEST_SECONDS), REQUEST_TIMEOUT_SECONDS)


def _cluster_error(error: KubeError) -> ClusterError:
    """Return an error as the client's callers get it: a refusal is in the API server's own words."""
    text = error.said if error.status else error.message
    return ClusterError(text, status=error.status, reason=error.reason if error.status else "")
