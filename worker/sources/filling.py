"""From a source to a sealed sink: is its path allowed? Open, check, ask for memory, read, verify, seal.

Every path is confined here and nowhere else; `files` holds single files to the same roots, since
what a folder holds may change until it is read. Whoever gives up halfway gives the memory back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollout_worker.engine import ContentMismatch, EngineError, Given, Layout, Sink
from rollout_worker.schemas import WeightsSource
from rollout_worker.settings import Settings
from rollout_worker.threads import in_thread
from rollout_worker.weights import check_layout
from rollout_worker.wire.problems import ProblemError

from .files import Readable, ReadCancelled, Report, Source, open_source, read

Located = tuple[Path, tuple[Path, ...]]
"""Where a source lies and its roots, as `locate` says."""

OpenSlot = Callable[..., Awaitable[Sink]]
"""As `Engine.open_slot`."""

Elsewhere = Callable[[str], Coroutine[Any, Any, Mapping[str, str]]]
"""Fills the slot of this id on other nodes; returns by their names which root hash they found."""

_THREADS = ThreadPoolExecutor(4, "paths")
"""As many lookups of links may hang, on a volume that does not answer, before the next ones wait."""


async def resolve_within(
    source: WeightsSource, settings: Settings, seconds: float
) -> WeightsSource:
    """As `resolve`, in a thread: a volume over the network may take long, or never answer.

    Raises:
        ProblemError: 422, as `resolve`; 504.
    """
    if source.path is None:  # there is nothing to look up, and the threads may hang
        return source
    call = asyncio.get_running_loop().run_in_executor(_THREADS, resolve, source, settings)
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError:
        raise ProblemError(
            "deadline-exceeded",
            f"source.path {source.path!r} could not be looked up within {seconds:g} s: see whether"
            " its volume answers, and try again",
            retry_after=1,
        ) from None


def resolve(source: WeightsSource, settings: Settings) -> WeightsSource:
    """Return the source with an absolute, real path that the settings allow.

    Relative paths lie below the last of the weights' roots. Links are followed before the check,
    so none leads out. Whether anything is there is the engine's to see.

    Raises:
        ProblemError: 422 that names the roots.
    """
    if source.path is None:
        return source
    roots = settings.weights_roots
    if "\0" in source.path:
        raise _refused(source.path, "no path holds a NUL character")
    path = Path(source.path)
    if not path.is_absolute():
        if not roots:
            raise _refused(source.path, "give an absolute path, or start with --weights-roots")
        path = roots[-1] / path
    path = _real(source.path, path)
    allowed = [Path(settings.model), *roots]
    if roots and not any(path.is_relative_to(root.resolve()) for root in allowed):
        names = ", ".join(str(root) for root in allowed)
        raise _refused(source.path, f"it must lie below one of {names}")
    return WeightsSource(path=str(path))


def locate(source: WeightsSource, settings: Settings, model: Path) -> tuple[Path, tuple[Path, ...]]:
    """Return where a resolved source lies, and below which roots all its files must lie.

    Args:
        source: What `resolve` returned.
        settings: The worker's.
        model: The folder of the model, whose own weights are the checkpoint.
    """
    if source.path is None:
        return model, ()  # whoever gave the model may link its files from anywhere
    roots = settings.weights_roots
    return Path(source.path), (model, *roots) if roots else ()


def _real(given: str, path: Path) -> Path:
    """Follow all links. In a circle Python either raises or goes on by the letter of the path."""
    try:
        real = path.resolve()
        settled = real == real.resolve()
    except (OSError, RuntimeError):
        settled = False
    if not settled:
        raise _refused(given, "its links can't be followed")
    return real


def _refused(path: str, fix: str) -> ProblemError:
    return ProblemError(
        "invalid-request",
        f"source.path {path!r} is not allowed: {fix}",
        errors=[{"field": "source.path", "message": fix}],
    )


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
        WeightsRejected: a missing, unexpected or ill-shaped tensor.
        ContentMismatch: the hash is wrong, or another node found other bytes.
        EngineError: the engine has no room, or another node failed.
    """
    source = await in_thread(lambda _: _open(layout, located), threading.Event())
    return await pour(open_slot, layout, source, verify, report, elsewhere)


async def pour(
    open_slot: OpenSlot,
    layout: Layout,
    source: Readable,
    verify: Callable[[str], None],
    report: Report = lambda done, total: None,
    elsewhere: Elsewhere | None = None,
    *,
    given: Given | None = None,
) -> Sink:
    """As `fill`, with an opened source; `given`: memory that has its bytes, which the sink may take."""
    cancel = threading.Event()
    sink = await (
        open_slot(source.entries) if given is None else open_slot(source.entries, given=given)
    )
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
    source: Readable,
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
            raise ContentMismatch(
                f"{name} found root_hash {found} where the head found {root_hash}: give all nodes"
                " the same bytes"
            )
