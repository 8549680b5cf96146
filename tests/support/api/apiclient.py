"""The API server as tests and benchmarks see it: objects over HTTP, and watches with a clock."""

from __future__ import annotations

import contextlib
import functools
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from localkube import Cluster

Obj = dict[str, Any]
MERGE = "application/merge-patch+json"
POOLS = "/apis/rollout.dev/v1alpha1/namespaces/{}/rolloutreplicas"
PODS = "/api/v1/namespaces/{}/pods"
SERVICES = "/api/v1/namespaces/{}/services"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"


class ApiError(AssertionError):
    """The API server refused a request that must succeed, or took one that it must refuse."""

    def __init__(self, request: str, status: int, text: str) -> None:
        super().__init__(f"{request}: {status} {text[:500]}")
        self.status = status


def connect(cluster: Cluster, *, timeout: float | None = 30.0) -> httpx.Client:
    """Return a client of the API server as cluster-admin."""
    keys = cluster.settings.pki
    tls = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    tls.load_cert_chain(keys / "admin.crt", keys / "admin.key")
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
    return httpx.Client(
        base_url=cluster.settings.server,
        verify=tls,
        timeout=timeout,
        limits=limits,
        trust_env=False,
    )


class Api:
    """Requests that must succeed, or be refused; close it, or use it as a context manager."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._client = connect(cluster)

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, **params: str) -> Obj:
        return self._send("GET", path, params=params)

    def items(self, path: str, selector: str = "", *, fresh: bool = False) -> list[Obj]:
        """Return a list's objects: from the API server's own cache, or `fresh` as they are now."""
        params = {} if fresh else {"resourceVersion": "0"}
        if selector:
            params["labelSelector"] = selector
        found: list[Obj] = self._send("GET", path, params=params)["items"]
        return found

    def version(self, path: str) -> str:
        """Return the resourceVersion of a collection: `changes` tells what happened since."""
        found: str = self.get(path, limit="1")["metadata"]["resourceVersion"]
        return found

    def changes(self, path: str, name: str, since: str) -> list[Obj]:
        """Return every state that an object was in after `since`, up to now, oldest first."""
        last = int(self.get(f"{path}/{name}")["metadata"]["resourceVersion"])
        found: list[Obj] = []
        if last <= int(since):
            return found
        params = {
            "watch": "1",
            "resourceVersion": since,
            "fieldSelector": f"metadata.name={name}",
            "timeoutSeconds": "5",
        }
        with self._client.stream("GET", path, params=params) as answer:
            for line in answer.iter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise AssertionError(f"changes of {path}/{name}: {event['object']}")
                found.append(event["object"])
                if int(event["object"]["metadata"]["resourceVersion"]) >= last:
                    return found
        raise AssertionError(f"changes of {path}/{name} end before {last}: {len(found)} were seen")

    def create(self, path: str, body: Obj) -> Obj:
        return self._send("POST", path, body)

    def patch(self, path: str, body: Obj, *, kind: str = MERGE, missing: bool = False) -> Obj:
        """Merge `body` into an object; with `missing`, gone already is success."""
        return self._send("PATCH", path, body, kind=kind, missing=missing)

    def delete(self, path: str, **options: Any) -> None:
        """Delete an object or a collection; gone already is success."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        self._send("DELETE", path, body, missing=True)

    def refusal(
        self, method: str, path: str, body: Obj, *, kind: str = "application/json", **params: str
    ) -> str:
        """Return the words with which a request is refused; fail if it is not."""
        answer = self._ask(method, path, body, kind, params)
        if not answer.is_client_error:
            raise ApiError(f"{method} {path}", answer.status_code, answer.text)
        words: str = answer.json()["message"]
        return words

    def _send(
        self,
        method: str,
        path: str,
        body: Obj | None = None,
        *,
        kind: str = "application/json",
        params: dict[str, str] | None = None,
        missing: bool = False,
    ) -> Obj:
        answer = self._ask(method, path, body, kind, params)
        if not (answer.is_success or (missing and answer.status_code in (404, 409))):
            raise ApiError(f"{method} {path}", answer.status_code, answer.text)
        found: Obj = answer.json()
        return found

    def _ask(
        self,
        method: str,
        path: str,
        body: Obj | None,
        kind: str,
        params: dict[str, str] | None,
    ) -> httpx.Response:
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": kind}
        return self._client.request(method, path, content=content, headers=headers, params=params)


@functools.cache
def api_of(cluster: Cluster) -> Api:
    """Return the one client of this process for a cluster."""
    return Api(cluster)


@dataclass(frozen=True, slots=True)
class Seen:
    """A watch event; `at` is this process's monotonic time of its arrival."""

    at: float
    kind: str
    obj: Obj


class Watch:
    """Follows a collection from now on, in a thread of its own; a context manager."""

    def __init__(self, cluster: Cluster, path: str) -> None:
        self._client = connect(cluster, timeout=None)
        self._path = path
        self._changed = threading.Condition()
        self._events: list[Seen] = []
        self._failure: BaseException | None = None
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"watch {path}")

    def __enter__(self) -> Watch:
        listed = self._client.get(self._path, params={"limit": "1"}).raise_for_status().json()
        self._version = listed["metadata"]["resourceVersion"]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        # Ends the read that the thread waits in.
        self._client.close()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while not self._ending:
                self._follow()
        except Exception as error:  # noqa: BLE001 - told to whoever waits
            with self._changed:
                self._failure = None if self._ending else error
                self._changed.notify_all()

    def _follow(self) -> None:
        """Follow from the last version; the API server cuts off who reads too slowly."""
        params = {"watch": "1", "resourceVersion": self._version}
        with self._client.stream("GET", self._path, params=params) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                self._take(json.loads(line))

    def _take(self, event: Obj) -> None:
        if event["type"] == "ERROR":
            raise AssertionError(f"the watch of {self._path}: {event['object']}")
        self._version = event["object"]["metadata"]["resourceVersion"]
        with self._changed:
            self._events.append(Seen(time.monotonic(), event["type"], event["object"]))
            self._changed.notify_all()

    def events(self, since: float = 0.0) -> list[Seen]:
        """Return what was seen from monotonic time `since` on."""
        with self._changed:
            return [event for event in self._events if event.at >= since]

    def first(
        self, what: str, holds: Callable[[Seen], bool], since: float, seconds: float = 60.0
    ) -> Seen:
        """Return the first event since then for which `holds`; wait for it if need be."""
        end = time.monotonic() + seconds
        looked = 0
        with self._changed:
            while True:
                for event in self._events[looked:]:
                    if event.at >= since and holds(event):
                        return event
                looked = len(self._events)
                if self._failure is not None:
                    raise AssertionError(f"the watch of {self._path} ended") from self._failure
                left = end - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"not seen within {seconds:g} s: {what}")
                self._changed.wait(left)


@contextlib.contextmanager
def watching(cluster: Cluster, *paths: str) -> Iterator[tuple[Watch, ...]]:
    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(Watch(cluster, path)) for path in paths)
