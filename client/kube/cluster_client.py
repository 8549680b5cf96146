"""The few requests to the API server that the client needs, over httpx alone."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import httpx

from rollout_client.errors import ClusterError

from .cluster_access import ClusterAccess, Obj
from .settings import (
    MAX_RETRY_PAUSE_SECONDS,
    MIN_RETRY_PAUSE_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
    WATCH_SLACK_SECONDS,
    WATCH_TIMEOUT_SECONDS,
)

UNAUTHORIZED = 401


ReportTrouble = Callable[[ClusterError | None], None]
"""Told what fails, and None once nothing does; it may raise to end what it is told of."""


def retry_pause(attempt: int) -> float:
    """Return how long to wait before the n-th try again (from 0), spread over many clients."""
    return min(
        MAX_RETRY_PAUSE_SECONDS, MIN_RETRY_PAUSE_SECONDS * 2.0 ** min(attempt, 10)
    ) * random.uniform(0.5, 1.0)


class ClusterClient:
    """Requests with deadlines; every failure is a `ClusterError`."""

    def __init__(self, where: ClusterAccess) -> None:
        self.namespace = where.namespace
        self._token, self._forget = where.token, where.forget
        self._http = httpx.AsyncClient(
            base_url=where.server,
            verify=where.tls,
            timeout=REQUEST_TIMEOUT_SECONDS,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def get(
        self, path: str, params: Mapping[str, str] | None = None, *, seconds: float = 0.0
    ) -> Obj:
        """Return an object or a list; what fails in passing is tried again for so many seconds."""
        until, attempt = time.monotonic() + seconds, 0
        while True:
            try:
                return await self._send_request("GET", path, params=params)
            except ClusterError as error:
                pause = retry_pause(attempt)
                if not error.is_transient or time.monotonic() + pause > until:
                    raise
            await asyncio.sleep(pause)
            attempt += 1

    async def merge_patch(self, path: str, body: Obj) -> Obj:
        """Merge into an object and return it.

        With `metadata.resourceVersion` only if the object still has that version; if not, this
        raises a `ClusterError` of status 409.
        """
        return await self._send_request(
            "PATCH",
            path,
            params={"fieldManager": "rollout-client"},
            content=json.dumps(body).encode(),
            kind="application/merge-patch+json",
        )

    async def _send_request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        content: bytes | None = None,
        kind: str | None = None,
    ) -> Obj:
        more = {"Content-Type": kind} if kind else {}
        for again in (True, False):
            token = await self._bearer_token()
            try:
                answer = await self._http.request(
                    method,
                    path,
                    params=params,
                    content=content,
                    headers=_bearer_headers(token) | more,
                )
            except httpx.HTTPError as error:
                raise _no_answer_error(f"{method} {path}", error) from error
            # Withdrawn, or over by the clock of the other side: one more, with a new one.
            if answer.status_code != UNAUTHORIZED or not (again and self._forget(token)):
                break
        if not answer.is_success:
            raise _refusal_error(answer.status_code, answer.content)
        return _parse_object(f"{method} {path}", answer.content)

    async def _bearer_token(self) -> str | None:
        try:
            # In a thread: it may be a file on a slow volume, or a program that asks a cloud.
            token = await asyncio.to_thread(self._token)
        except (OSError, ValueError) as error:
            raise ClusterError(f"the token for the API server can't be read: {error}") from error
        if token and not (token.isascii() and token.isprintable()):
            raise ClusterError("the token for the API server has characters that no token has")
        return token

    async def follow_objects(
        self, path: str, params: Mapping[str, str], trouble: ReportTrouble
    ) -> AsyncGenerator[dict[str, Obj]]:
        """Yield all objects of a collection by name, now and after each change, for ever.

        Args:
            path: Of the collection.
            params: Selectors.
            trouble: Called with the reason while nothing comes, and with None once something does.
        """
        attempt = 0
        while True:
            began = time.monotonic()
            try:
                async with aclosing(self._list_and_watch(path, params)) as cycle:
                    async for objects in cycle:
                        trouble(None)
                        yield objects
            except ClusterError as error:
                trouble(error)
            # However it ended: something between here and there may end each watch at once.
            lasted = time.monotonic() - began
            attempt = 0 if lasted >= MAX_RETRY_PAUSE_SECONDS else attempt + 1
            await asyncio.sleep(retry_pause(max(0, attempt - 1)))

    async def _list_and_watch(
        self, path: str, params: Mapping[str, str]
    ) -> AsyncGenerator[dict[str, Obj]]:
        """List, then watch until the watch ends, for whatever reason."""
        listed = await self.get(path, params)
        try:
            objects = {item["metadata"]["name"]: item for item in listed.get("items") or ()}
            version = str(listed["metadata"]["resourceVersion"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ClusterError(f"GET {path}: no list of objects: {error!r}") from error
        yield dict(objects)
        async with aclosing(
            self._watch_events(path, {**params, "resourceVersion": version})
        ) as events:
            async for event in events:
                try:
                    more = _apply_event(event, objects)
                except (KeyError, TypeError) as error:
                    raise ClusterError(f"watch {path}: no event: {error!r}") from error
                if not more:
                    return
                yield dict(objects)

    async def _watch_events(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[Obj]:
        watch = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_TIMEOUT_SECONDS),
        }
        # Bookmarks come every minute: a stream that is silent for longer than two is dead.
        limits = httpx.Timeout(
            REQUEST_TIMEOUT_SECONDS, read=WATCH_TIMEOUT_SECONDS / 2 + WATCH_SLACK_SECONDS
        )
        token = await self._bearer_token()
        try:
            async with self._http.stream(
                "GET",
                path,
                params={**params, **watch},
                headers=_bearer_headers(token),
                timeout=limits,
            ) as answer:
                if answer.status_code == UNAUTHORIZED and self._forget(token):
                    return  # listing again shows whether a new token is refused as well
                if not answer.is_success:
                    raise _refusal_error(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if line:
                        yield _parse_object(f"watch {path}", line)
        except httpx.HTTPError as error:
            raise _no_answer_error(f"watch {path}", error) from error


def _bearer_headers(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _parse_object(what: str, content: str | bytes) -> Obj:
    """Return a JSON object; what stands between here and the API server may send anything."""
    try:
        found = json.loads(content)
    except ValueError as error:
        raise ClusterError(f"{what}: the answer is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ClusterError(f"{what}: the answer is no JSON object")
    return found


def _apply_event(event: Obj, objects: dict[str, Obj]) -> bool:
    """Enter an event of a watch; whether the watch goes on."""
    item = event["object"]
    match event["type"]:
        case "BOOKMARK":
            pass
        case "ERROR":
            # Usually 410: the version to go on from is forgotten. List again.
            return False
        case "DELETED":
            objects.pop(item["metadata"]["name"], None)
        case _:
            objects[item["metadata"]["name"]] = item
    return True


def _no_answer_error(what: str, error: Exception) -> ClusterError:
    return ClusterError(f"{what}: {type(error).__name__}: {error}".rstrip(": "))


def _refusal_error(status: int, content: bytes) -> ClusterError:
    """Return the API server's own words as an error."""
    try:
        body = json.loads(content)
        message, reason = str(body.get("message", "")), str(body.get("reason", ""))
    except (ValueError, AttributeError):
        message, reason = content[:300].decode(errors="replace"), ""
    return ClusterError(message or f"HTTP {status}", status=status, reason=reason)
