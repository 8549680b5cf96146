"""From a source to a sealed sink: open and check, ask for memory, read, verify, seal.

Whoever gives up halfway gives the memory back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_worker.engine import EngineError, Entry, Layout, Sink, WeightsRejected
from rollout_worker.threads import in_thread
from rollout_worker.weights import check_layout

from .files import ReadCancelled, Report, Source, open_source, read

Located = tuple[Path, tuple[Path, ...]]
"""Where a source lies and its roots, as `resolve.locate` says."""

OpenSlot = Callable[[Sequence[Entry]], Awaitable[Sink]]
"""As `Engine.open_slot`."""

Elsewhere = Callable[[str], Coroutine[Any, Any, Mapping[str, str]]]
"""Fills the slot of this id on other nodes; returns by their names which root hash they found."""


async def fill(
    open_slot: OpenSlot,
    layout: Layout,
    located: Located,
    verify: Callable[[str], None],
    report: Report = lambda done, total: None,
    elsewhere: Elsewhere | None = None,
) -> Sink:
    """Return a sealed sink with everything that the source holds.

    Args:
        open_slot: Gives the memory.
        layout: What the source must hold.
        located: The source.
        verify: Raises unless the root hash is the right one; called in the loop.
        report: Told of progress, in a thread.
        elsewhere: Set in a gang: all nodes must have found the same.

    Raises:
        WeightsRejected: a missing, unexpected or ill-shaped tensor, or a wrong hash.
        EngineError: the engine has no room, or another node failed.
    """
    cancel = threading.Event()
    source = await in_thread(lambda _: _open(layout, located), cancel)
    sink = await open_slot(source.entries)
    others = None if elsewhere is None else asyncio.ensure_future(elsewhere(sink.slot))
    if others is not None:
        others.add_done_callback(lambda done: cancel.set() if _failed(done) else None)
    try:
        if sink.memory != "host":
            raise EngineError(f"files can't be read into {sink.memory} memory: use a transport")
        root_hash = await _bring(source, layout, sink, report, cancel, others)
        verify(root_hash)
        if others is not None:
            _check_votes(root_hash, await others)
        await in_thread(lambda _: sink.seal(), cancel)
    except BaseException:
        if others is not None:
            others.cancel()
            await asyncio.wait([others])
        await asyncio.to_thread(sink.close)
        raise
    return sink


def _open(layout: Layout, located: Located) -> Source:
    path, roots = located
    source = open_source(path, roots=roots)
    check_layout(layout, source.entries, str(path))
    return source


async def _bring(
    source: Source,
    layout: Layout,
    sink: Sink,
    report: Report,
    cancel: threading.Event,
    others: asyncio.Future[Mapping[str, str]] | None,
) -> str:
    """Read everything; what another node failed of is the reason to give up, not that we did."""

    def bring(cancelled: Callable[[], bool]) -> str:
        return read(source, layout.tied, sink.allocate, report, cancelled)

    try:
        return await in_thread(bring, cancel)
    except ReadCancelled:
        if others is not None and _failed(others):
            others.result()
        raise


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _check_votes(root_hash: str, votes: Mapping[str, str]) -> None:
    for name, found in votes.items():
        if found != root_hash:
            raise WeightsRejected(
                f"{name} found root_hash {found} under the path where the head found {root_hash}:"
                " give all nodes the same bytes"
            )
