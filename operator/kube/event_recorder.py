"""Events for people: `kubectl describe rr`, `kubectl get events`.

They are posted in the background, several at once, and a failure to post is never an error. What
waits is bounded by the pools and the reasons: of two events of a pool for one reason the newer takes
the place of the older one. The same event is not repeated for ten minutes.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
import uuid
from collections.abc import Callable
from typing import Literal

from rollout_common.kube.errors import KubeError
from rollout_operator.api.names import MANAGER_NAME
from rollout_operator.api.objects import Obj

from .kube_client import KubeClient
from .settings import EVENT_FLUSH_SECONDS, EVENT_REPEAT_SECONDS

logger = logging.getLogger(__name__)

MIN_FORGET_EVENTS = 1000
"""From this many known events on, and whenever they have doubled, old ones are forgotten."""

CONCURRENT_POSTS = 8
MAX_NOTE_BYTES = 1024
"""Bytes of the longest `note` that the API takes (it says characters)."""


class EventRecorder:
    """Posts events in the background, while `run` is running; `instance` is our pod's name, for `reportingInstance`."""

    def __init__(
        self, kube: KubeClient, *, instance: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kube = kube
        self._instance = instance[:128]
        self._clock = clock
        self._waiting: dict[tuple[str, str], tuple[str, Obj]] = {}
        """Message and object, by uid of the pool and reason, oldest first."""
        self._wanted = asyncio.Event()
        self._ending = False
        self._seen: dict[tuple[str, str, str], float] = {}
        self._many = MIN_FORGET_EVENTS

    def record_event(
        self,
        pool: Obj,
        type: Literal["Normal", "Warning"],  # noqa: A002 - the API's word
        reason: str,
        message: str,
    ) -> None:
        """Post an event about a pool, unless the same was posted within ten minutes.

        The reason is CamelCase, for machines, the message one sentence, for people.
        """
        of = (str(pool["metadata"].get("uid")), reason)
        now = self._clock()
        if now - self._seen.get((*of, message), -EVENT_REPEAT_SECONDS) < EVENT_REPEAT_SECONDS:
            return
        self._forget_old_events()
        self._seen[*of, message] = now
        older = self._waiting.pop(of, None)
        if older is not None:
            self._seen.pop((*of, older[0]), None)  # it was never posted
        self._waiting[of] = message, self._event_body(pool, type, reason, message)
        self._wanted.set()

    def waiting_count(self) -> int:
        """Return how many events are to be posted yet."""
        return len(self._waiting)

    async def run(self) -> None:
        """Post what comes, until `flush`."""
        async with asyncio.TaskGroup() as group:
            for number in range(CONCURRENT_POSTS):
                group.create_task(self._post_events(), name=f"events {number}")

    async def _post_events(self) -> None:
        while True:
            while self._waiting:
                _, body = self._waiting.pop(next(iter(self._waiting)))
                try:
                    await self._kube.create("events", body)
                except KubeError as error:
                    logger.warning("can't post an event: %s", error)
            if self._ending:
                return
            self._wanted.clear()
            await self._wanted.wait()

    async def flush_events(self, task: asyncio.Task[None]) -> None:
        """Post what waits, for two seconds at most, and end `run`, whose task is given."""
        self._ending = True
        self._wanted.set()
        try:
            async with asyncio.timeout(EVENT_FLUSH_SECONDS):
                await task
        except TimeoutError:
            task.cancel()

    def _event_body(self, pool: Obj, kind: str, reason: str, message: str) -> Obj:
        meta = pool["metadata"]
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "namespace": meta["namespace"],
                "name": f"{meta['name']}.{uuid.uuid4().hex[:16]}",
            },
            "eventTime": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "type": kind,
            "reason": reason,
            "note": _shorten_note(message),
            "action": reason,
            "reportingController": MANAGER_NAME,
            "reportingInstance": self._instance,
            "regarding": _object_reference(pool),
        }

    def _forget_old_events(self) -> None:
        if len(self._seen) < self._many:
            return
        limit = self._clock() - EVENT_REPEAT_SECONDS
        self._seen = {ident: at for ident, at in self._seen.items() if at > limit}
        self._many = max(MIN_FORGET_EVENTS, 2 * len(self._seen))


def _shorten_note(message: str) -> str:
    raw = message.encode()
    if len(raw) <= MAX_NOTE_BYTES:
        return message
    ellipsis = "…"
    return raw[: MAX_NOTE_BYTES - len(ellipsis.encode())].decode(errors="ignore") + ellipsis


def _object_reference(obj: Obj) -> Obj:
    meta = obj["metadata"]
    names = ("namespace", "name", "uid", "resourceVersion")
    found = {name: meta[name] for name in names if meta.get(name)}
    return {"apiVersion": obj.get("apiVersion"), "kind": obj.get("kind"), **found}
