"""Events for people: `kubectl describe rr`, `kubectl get events`.

They are posted in the background, in bounded number, and a failure to post is never an error. The
same event is not repeated for ten minutes.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
import uuid
from collections.abc import Callable
from typing import Literal

from rollout_operator.api.names import MANAGER
from rollout_operator.api.objects import Obj

from .client import Kube
from .errors import KubeError

logger = logging.getLogger(__name__)

REPEAT_SECONDS = 600.0
MAX_WAITING = 1000
MAX_NOTE = 1024
"""Bytes of the longest `note` that the API takes (it says characters)."""

FLUSH_SECONDS = 2.0
_STOP = object()


class Recorder:
    """Posts events in the background, while `run` is running.

    Args:
        kube: The client.
        instance: Our pod's name, for `reportingInstance`.
        clock: Monotonic seconds, for the repetition.
    """

    def __init__(
        self, kube: Kube, *, instance: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kube = kube
        self._instance = instance[:128]
        self._clock = clock
        self._waiting: asyncio.Queue[object] = asyncio.Queue(MAX_WAITING)
        self._seen: dict[tuple[str, str, str], float] = {}

    def event(
        self,
        pool: Obj,
        type: Literal["Normal", "Warning"],  # noqa: A002 - the API's word
        reason: str,
        message: str,
    ) -> None:
        """Post an event about a pool, unless the same was posted within ten minutes.

        Args:
            pool: The RolloutReplica.
            type: As in Kubernetes.
            reason: CamelCase, for machines.
            message: One sentence, for people.
        """
        ident = (str(pool["metadata"].get("uid")), reason, message)
        now = self._clock()
        if now - self._seen.get(ident, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        self._seen[ident] = now
        body = self._build(pool, type, reason, message)
        try:
            self._waiting.put_nowait(body)
        except asyncio.QueueFull:
            logger.warning("dropped an event because too many are queued: %s", message)

    async def run(self) -> None:
        """Post what comes, until `flush`."""
        while True:
            body = await self._waiting.get()
            if body is _STOP:
                return
            assert isinstance(body, dict)
            try:
                await self._kube.create("events", body)
            except KubeError as error:
                logger.warning("can't post an event: %s", error)
            self._forget_old()

    async def flush(self, task: asyncio.Task[None]) -> None:
        """Post what is queued, for two seconds at most, and end `run`, whose task is given."""
        try:
            self._waiting.put_nowait(_STOP)
            async with asyncio.timeout(FLUSH_SECONDS):
                await task
        except (asyncio.QueueFull, TimeoutError):
            task.cancel()

    def _build(self, pool: Obj, kind: str, reason: str, message: str) -> Obj:
        meta = pool["metadata"]
        moment = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "namespace": meta["namespace"],
                "name": f"{meta['name']}.{uuid.uuid4().hex[:16]}",
            },
            "eventTime": moment,
            "type": kind,
            "reason": reason,
            "note": _shortened(message),
            "action": reason,
            "reportingController": MANAGER,
            "reportingInstance": self._instance,
            "regarding": _reference(pool),
        }

    def _forget_old(self) -> None:
        if len(self._seen) <= MAX_WAITING:
            return
        limit = self._clock() - REPEAT_SECONDS
        self._seen = {ident: at for ident, at in self._seen.items() if at > limit}


def _shortened(message: str) -> str:
    raw = message.encode()
    if len(raw) <= MAX_NOTE:
        return message
    ellipsis = "…"
    return raw[: MAX_NOTE - len(ellipsis.encode())].decode(errors="ignore") + ellipsis


def _reference(obj: Obj) -> Obj:
    meta = obj["metadata"]
    names = ("namespace", "name", "uid", "resourceVersion")
    found = {name: meta[name] for name in names if meta.get(name)}
    return {"apiVersion": obj.get("apiVersion"), "kind": obj.get("kind"), **found}
