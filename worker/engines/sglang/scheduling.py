"""Which requests wait, which run in the child, and the commands to the child about them.

Requests wait here, not in the child, until it has capacity: so none starts that must not, and what
has not begun is made by the weights that serve when it begins. Everything runs in the asyncio loop.
"""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from rollout_common.wire import AbortReason, WeightsId
from rollout_worker.engine import EngineCrashed, EngineError, InvalidRequest
from rollout_worker.engines.admission_queue import AdmissionQueue
from rollout_worker.engines.file_adapters import FileAdapters
from rollout_worker.engines.recent_values import RecentValues
from rollout_worker.pictures.picture import Picture
from rollout_worker.pictures.picture_decoding import MAX_REQUEST_PIXELS

from .child_connection import ChildConnection
from .sglang_streams import SglangStream

KEPT_BYTES = 4 * 3 * MAX_REQUEST_PIXELS
"""Of pictures that the child keeps, of 3 bytes a pixel: more than one request may have, whose own stay."""


class RequestScheduler:
    """The requests of one child."""

    def __init__(
        self,
        connection: ChildConnection,
        max_running: int,
        weights: WeightsId,
        adapters: FileAdapters[str],
    ) -> None:
        self._connection = connection
        self._adapters = adapters
        self._weights = weights
        self._queue = AdmissionQueue[SglangStream](
            lambda _: not self.paused and len(self._posted) < max_running, self._post_request
        )
        # By the child's id, until the child has ended them; None: ended here, not there yet.
        self._posted: dict[str, SglangStream | None] = {}
        self._numbers = itertools.count()
        self._resets = 0
        self._pixels = SentPixels()
        self.paused = False
        self._ordered_at: float | None = (
            None  # time of an order to rest or go on, until it is answered
        )
        self._progress = time.monotonic()

    def add_request(self, stream: SglangStream) -> None:
        """Queue a request."""
        self._queue.add_request(stream)
        self._queue.admit_requests()

    def _post_request(self, stream: SglangStream) -> None:
        if not self._posted:
            self._progress = time.monotonic()
        try:
            adapter = self._adapters.find_handle(stream.request.adapter)
        except InvalidRequest as error:
            stream.fail_output(error)
            return
        rid = f"{next(self._numbers):016x}"
        for op, args in self._pixels.commands_for(stream.request.pictures):
            self._connection.send_command(op, **args)
        begun = stream.begin_request(rid, self._weights, self._resets)
        self._connection.send_command("generate", **begun, lora_path=adapter)
        self._posted[rid] = stream

    def take_frames(self, frames: list[Any]) -> None:
        """Pass what the child made to the streams."""
        self._progress = time.monotonic()
        surplus = []
        for rid, ids, logprobs, about in frames:
            if rid not in self._posted:
                continue
            stream = self._posted[rid]
            if "error" in about:
                del self._posted[rid]
                if stream is not None:
                    stream.fail_output(_request_error(about["error"]))
                continue
            if stream is not None and stream.take_tokens(ids, logprobs, about):
                surplus.append(rid)
            if about["finish"] is not None:
                del self._posted[rid]
            elif stream is not None and stream.done:
                self._posted[rid] = None
        if surplus:
            self._connection.send_command("abort", rids=surplus)
        self._queue.admit_requests()

    def abort_requests(self, streams: Collection[SglangStream], reason: AbortReason) -> None:
        """End requests with what they have; the child ends them when it can."""
        rids = []
        for stream in streams:
            stream.end_output(reason)
            if stream.rid is not None and self._posted.get(stream.rid) is stream:
                self._posted[stream.rid] = None
                rids.append(stream.rid)
        if rids:
            self._connection.send_command("abort", rids=rids)

    def hold_admission(self) -> None:
        """Post nothing more, and requeue what the child has not begun."""
        self._queue.is_open = False
        for rid, stream in list(self._posted.items()):
            if stream is not None and not stream.produced:
                self._requeue_stream(rid, stream)

    async def reset_cache(self) -> None:
        """Share no prefix of earlier requests; SGLang frees their memory now, or while something runs one by one later."""
        self._resets += 1
        await self._connection.call_child("flush")

    async def pause(self) -> None:
        """Return once the child makes no step."""
        self.paused = True
        await self.stop_steps("in_place")

    async def stop_steps(self, mode: Literal["in_place", "retract"]) -> None:
        """Stop the child's steps; `retract` also moves what runs into its queue, without KV."""
        self._made = await self._order_child("pause", mode=mode)
        if mode == "retract":
            # A paused child keeps those that ended here; from its queue it can remove them.
            left = [rid for rid, stream in self._posted.items() if stream is None]
            if left:
                await self._order_child("abort", rids=left)

    async def _order_child(self, op: str, **args: Any) -> Any:
        self._ordered_at = time.monotonic()
        try:
            return await self._connection.call_child(op, **args)
        finally:
            self._ordered_at = None

    def switch_weights(self, weights: WeightsId, *, keep: bool) -> None:
        """Note that the child serves other weights now."""
        self._weights = weights
        for rid, stream in list(self._posted.items()):
            if stream is None:
                continue
            made = self._made.get(rid, stream.produced)
            if made == 0:
                self._requeue_stream(rid, stream)
            else:
                stream.switch_weights(made, weights, stale=keep)

    def _requeue_stream(self, rid: str, stream: SglangStream) -> None:
        """Queue again what has no token yet: the weights that serve when it begins will make it."""
        self._posted[rid] = None
        self._connection.send_command("abort", rids=[rid])
        stream.rid = None
        self._queue.add_request(stream)

    def note_recomputed(self) -> None:
        """Note that all KV was dropped and will be computed again."""
        for rid, stream in self._posted.items():
            if stream is not None and stream.has_stale_kv:
                made = self._made.get(rid, stream.produced)
                stream.switch_weights(made, stream.changes[-1][1], stale=False)

    async def resume(self) -> None:
        """Let the child step, and post what waits."""
        if self.paused:
            await self._order_child("resume")
        self.paused, self._queue.is_open = False, True
        self._progress = time.monotonic()
        self._queue.admit_requests()

    @property
    def running(self) -> frozenset[str]:
        """Ids of the requests that have made a token."""
        begun = (
            stream for stream in self._posted.values() if stream is not None and stream.produced
        )
        return frozenset(stream.request.request_id for stream in begun)

    def find_hang(self, deadline: float) -> str | None:
        """Describe the hang if a running request, or an order to rest, got no answer for too long."""
        if self._ordered_at is not None:
            since, owed = max(self._ordered_at, self._progress), "it got an order to rest or go on"
        elif self._posted and not self.paused:
            since, owed = self._progress, "requests run"
        else:
            return None
        if (age := time.monotonic() - since) <= deadline:
            return None
        return (
            f"SGLang made nothing for {age:.0f} s although {owed}; the deadline is {deadline:g} s"
        )


def _request_error(error: str) -> EngineError:
    """Return the error for the reader: a ValueError of the child is about this request alone."""
    kind, _, why = error.partition(": ")
    if kind == ValueError.__name__:
        return InvalidRequest("sampling", f"SGLang refuses it: {why}")
    return EngineCrashed(f"SGLang failed in a request: {error}")


class SentPixels:
    """The pictures that one child was sent and keeps, up to `most` bytes.

    Child and worker keep the same list, by the same rule and in the same order of commands, so the worker knows without
    asking what the child has dropped.
    """

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._kept = RecentValues[str, int](most, lambda nbytes: nbytes)

    def commands_for(self, pictures: Sequence[Picture]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the commands, (name, arguments), that come before a request with these pictures."""
        if not pictures:
            return
        by_ref = {each.ref: each for each in pictures}
        missing = self._kept.use_values(by_ref)
        yield "use_pictures", {"refs": list(by_ref)}
        for ref, each in by_ref.items():
            if ref not in missing:
                continue
            self._kept.find_or_make(ref, partial(len, each.pixels))
            pixels = base64.b64encode(each.pixels).decode()
            sent = {"ref": ref, "width": each.width, "height": each.height, "pixels": pixels}
            yield "keep_picture", sent
