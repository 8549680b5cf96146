"""Sends one version of a trainer's tensors to the replicas: fills the memory, then serves it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from rollout_client.errors import PublishFailed
from rollout_client.steering.plain_tensors import torch_dtype
from rollout_client.steering.spool import iterate_tensors, run_to_end, spool_blocking
from rollout_client.steering.steering_protocol import Published, PublishReport, PushedTo
from rollout_common.transfer.connections.rate_limit import RateLimit
from rollout_common.transfer.connections.tls_session import Trust
from rollout_common.wire import PushedBytes, StageSource, WeightsId

from .options import PushPlan
from .push_deltas import PieceDeltas, PreviousVersion
from .push_progress import PushProgress
from .push_tensors import Given
from .routes import Receiver, Route, routes_for
from .sending import Link, Sender, start_senders
from .settings import FILLING_LOOK_SECONDS
from .stream_filling import Filling

PHASES = ("plan", "copy", "transfer", "stage", "commit")
"""Of a publish, as `PublishReport.seconds` names them."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a trainer that fill a push together.

    Attributes:
        fill: Fills it; returns once all of it is hashed.
        serve: As `RankZero.serve`.
        count_sources: Returns how many of their nodes serve, once the layout is known.
    """

    fill: Callable[[], None]
    serve: Callable[..., None]
    count_sources: Callable[[], float]


class Push:
    """One version that is filled and sent; make it with `Pusher.begin`.

    Args:
        found: The tensors.
        filling: The memory that they are copied to.
        settled: Takes over the memory and the senders at the end.
        ranks: They fill the memory instead of `found`, where several ranks do that.
        before: The previous version, if this one may be sent as deltas from it.
    """

    def __init__(
        self,
        found: Given,
        filling: Filling,
        plan: PushPlan,
        settled: Callable[[Push], None],
        ranks: Ranks | None = None,
        before: PreviousVersion | None = None,
    ) -> None:
        self._ranks = ranks
        self.filling = filling
        self.published: WeightsId | None = None
        """The version id under which it serves now; None: it does not serve."""
        self._before = before
        self._deltas: PieceDeltas | None = None
        self.senders: list[Sender] = []
        self._sender_of: dict[str, Sender] = {}
        self.spool: Path | None = None
        """Folder to write before the version is committed; None: no folder."""
        self._given, self._plan, self._settled = found, plan, settled
        self._progress: PushProgress | None = None
        self._routes: tuple[Route, ...] = ()
        self._opened_at = time.monotonic()

    # For the trainer's thread.

    def fill_here(self) -> None:
        """Copy all tensors in this thread, since it may be the only one with the right device.

        Raises:
            LayoutError: A tensor can't be published.
            SharedMemoryError: There is no room.
        """
        items: Any = self._given.items
        if isinstance(items, AsyncIterable):
            raise TypeError("an asynchronous stream of weights needs AsyncRolloutPool")
        self._fill(items)

    def _fill(self, items: Iterable[tuple[str, Any]]) -> None:
        rest = iter(items)
        try:
            if self._ranks is not None:
                return self._ranks.fill()
            self.filling.plan(self._given.specs)
            for name, tensor in rest:
                self.filling.take(name, tensor)
                if self._given.at_rest and self.filling.given_up:
                    return None
            self.filling.end()
        except BaseException as error:
            self.filling.fail(error)
            for _ in () if self._given.at_rest else rest:  # other ranks wait in the gathers
                pass
            raise
        return None

    async def fill(self) -> None:
        """Do what `fill_here` does without blocking the loop."""
        if self._given.at_rest:
            items: Any = self._given.items
            return await run_to_end(self._fill, items)
        source, filling = iterate_tensors(self._given.items), self.filling
        try:
            await run_to_end(filling.plan, self._given.specs)
            async for name, tensor in source:
                await run_to_end(filling.take, name, tensor)
            await run_to_end(filling.end)
        except BaseException as error:
            filling.fail(error)
            async for _ in source:
                pass
            raise
        return None

    # For the pool's loop.

    async def planned(self) -> None:
        """Wait until the layout is known.

        Raises:
            PublishFailed: The tensors can't be published.
        """
        # Shielded: a wait that is cancelled must not cancel the filling.
        await asyncio.shield(asyncio.wrap_future(self.filling.planned))
        self._opened_at = time.monotonic()

    @property
    def filled(self) -> bool:
        """Whether all tensors are in memory and hashed."""
        return self.filling.root_hash is not None

    @property
    def nbytes(self) -> int:
        """Size of one copy, gaps included."""
        return self.filling.layout.nbytes

    @property
    def source(self) -> StageSource:
        """The source that replicas are asked to stage."""
        layout = self.filling.layout
        return StageSource(pushed=PushedBytes(layout_id=layout.layout_id, bytes=layout.nbytes))

    @property
    def based(self) -> StageSource | None:
        """The same source for replicas that serve the previous version; None: deltas can't be sent."""
        before, whole = self._before, self.source.pushed
        assert whole is not None
        if self._plan.transport == "shm" or before is None or before.layout_id != whole.layout_id:
            return None
        return StageSource(pushed=whole.model_copy(update={"base": before.named}))

    def start(
        self,
        receivers: Sequence[Receiver],
        news: Callable[[], None],
        trust: Trust | None = None,
    ) -> None:
        """Start to send the bytes to these replicas; `news` is called, from any thread, when `progress` has changed.

        Raises:
            PublishFailed: A replica can't be reached by the requested transport.
        """
        sources = 1.0 if self._ranks is None else self._ranks.count_sources()
        self._routes = routes_for(receivers, self._plan.transport, sources)
        names = [receiver.name for receiver in receivers]
        self._progress = PushProgress(names, self.filling.layout.nbytes, news)
        rate = self._plan.rate
        link = Link(trust, None if rate is None else RateLimit(rate))
        if self._before is not None:
            self._deltas = PieceDeltas(self._before, self.filling.held)
        self.senders = start_senders(self._routes, self.filling, self._progress, link, self._deltas)
        routed = [route.receiver.name for route in self._routes]
        self._sender_of = dict(zip(routed, self.senders, strict=True))
        if self._ranks is not None:
            base = None if self._deltas is None else self._deltas.base
            needs_all = self.spool is not None or any(each.kind == "shm" for each in self._routes)
            self._ranks.serve(self._routes, base, trust, everything=needs_all)

    @property
    def progress(self) -> PushProgress:
        """The progress of all replicas; it exists once `start` was called."""
        assert self._progress is not None
        return self._progress

    def stands(self, name: str) -> bool:
        """Whether a replica's connection reports its progress, so that no status request is needed."""
        sender = self._sender_of.get(name)
        return sender is not None and sender.stands(name)

    async def ended(self) -> str:
        """Return the root hash of the version, once all of its tensors have come.

        Raises:
            PublishFailed: The tensors did not come.
        """
        return await asyncio.shield(asyncio.wrap_future(self.filling.ended))

    async def durable(self) -> None:
        """Write the folder, if one is wanted, and return once it is on the disk; call it after `ended`.

        Raises:
            OSError: The folder can't be written.
        """
        if self.spool is not None:
            held = self.filling.held
            while not await asyncio.to_thread(
                held.wait_for, lambda: held.is_complete, FILLING_LOOK_SECONDS
            ):
                if held.failure is not None:
                    raise PublishFailed(
                        "the tensors did not all come to the rank that writes the folder"
                    )
            await run_to_end(spool_blocking, self._in_memory(), self.spool)

    def _in_memory(self) -> Mapping[str, Any]:
        """Return the filled memory as tensors, without a copy."""
        import torch

        found = {}
        for placed in self.filling.layout.tensors:
            dtype = torch_dtype(placed.dtype)
            view = self.filling.slot.view_tensor(placed)
            flat = (
                torch.frombuffer(view, dtype=dtype)
                if placed.nbytes
                else torch.empty(0, dtype=dtype)
            )
            found[placed.name] = flat.reshape(placed.shape)
        return found

    @property
    def keeps(self) -> bool:
        """Whether a replica may get the next version as deltas from this one."""
        return self._plan.delta and any(route.kind != "shm" for route in self._routes)

    def stop(self) -> None:
        """Stop sending, and drop the tensors that still come."""
        self.filling.fail()
        for sender in self.senders:
            sender.stop()

    def close(self) -> None:
        """Release what only the trainer needs; call it once nothing fills the memory any more."""
        self._settled(self)
        self.filling.close()

    def reported(self, done: Published, left: Mapping[str, str]) -> Published:
        """Return the published version with the report of this push, as of now; `left`: why replicas have left it, by name."""
        self.published = done.identity
        return replace(done, report=self._report(time.monotonic(), left))

    def _report(self, committed_at: float, left: Mapping[str, str]) -> PublishReport:
        filling, progress = self.filling, self.progress
        names = {route.receiver.name: route.kind for route in self._routes}
        any_delta = self._deltas is not None and self._deltas.has_deltas
        by_delta = {route.receiver.name for route in self._routes if route.based and any_delta}
        of = {name: progress.of(name) for name in names}
        whole = max((each.whole_at or 0.0 for each in of.values()), default=0.0)
        staged = max((each.settled_at or 0.0 for each in of.values()), default=0.0)
        times = filling.began, self._opened_at, filling.filled_at, whole, staged, committed_at
        runs = pairwise(accumulate(times, max))
        seconds = {name: end - begin for name, (begin, end) in zip(PHASES, runs, strict=True)}
        replicas = {
            name: PushedTo(
                kind,
                max(0.0, (of[name].settled_at or committed_at) - self._opened_at),
                of[name].why or left.get(name),
                name in by_delta,
            )
            for name, kind in names.items()
        }
        sent = sum(sender.sent for sender in self.senders)
        return PublishReport(filling.layout.nbytes, seconds, replicas, sent)
