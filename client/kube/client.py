"""The few requests to the API server that the client needs, over httpx alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import httpx

from rollout_client.errors import ClusterError

from .access import Access, Obj

REQUEST_SECONDS = 30.0
WATCH_SECONDS = 240
"""After so long the API server ends a watch, and everything is listed again: nothing that a watch
missed stays unknown for longer."""

SLACK_SECONDS = 15.0
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 10.0


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

        With `metadata.resourceVersion` only if the object still has that version; if not, this
        raises a `ClusterError` of status 409.
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
            raise _no_answer(f"{method} {path}", error) from error
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
        """Yield all objects of a collection by name, now and after each change, for ever.

        Args:
            path: Of the collection.
            params: Selectors.
            trouble: Called with the reason while nothing comes, and with "" once something does.
        """
        pause = FIRST_PAUSE
        while True:
            try:
                async with aclosing(self._cycle(path, params)) as cycle:
                    async for objects in cycle:
                        pause = FIRST_PAUSE
                        trouble("")
                        yield objects
            except ClusterError as error:
                trouble(str(error))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(LONGEST_PAUSE, pause * 2)

    async def _cycle(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[dict[str, Obj]]:
        """List, then watch until the watch ends, for whatever reason."""
        listed = await self.get(path, params)
        objects = {item["metadata"]["name"]: item for item in listed.get("items") or ()}
        yield dict(objects)
        version = str(listed["metadata"]["resourceVersion"])
        async with aclosing(self._watch(path, {**params, "resourceVersion": version})) as events:
            async for event in events:
                item = event["object"]
                match event["type"]:
                    case "BOOKMARK":
                        continue
                    case "ERROR":
                        # Usually 410: the version to go on from is forgotten. List again.
                        return
                    case "DELETED":
                        objects.pop(item["metadata"]["name"], None)
                    case _:
                        objects[item["metadata"]["name"]] = item
                yield dict(objects)

    async def _watch(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[Obj]:
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
            raise _no_answer(f"watch {path}", error) from error
        except ValueError as error:
            raise ClusterError(f"watch {path}: a broken line: {error}") from error


def _no_answer(what: str, error: Exception) -> ClusterError:
    return ClusterError(f"{what}: {type(error).__name__}: {error}".rstrip(": "))


def _refused(status: int, content: bytes) -> ClusterError:
    """Return the API server's own words as an error."""
    try:
        body = json.loads(content)
        message, reason = str(body.get("message", "")), str(body.get("reason", ""))
    except (ValueError, AttributeError):
        message, reason = content[:300].decode(errors="replace"), ""
    return ClusterError(message or f"HTTP {status}", status=status, reason=reason)
