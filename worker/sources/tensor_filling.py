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

from rollout_common.wire import WeightsSource
from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import ContentMismatch, EngineError, GivenWeights, Sink, WeightsLayout
from rollout_worker.settings import WorkerSettings
from rollout_worker.threads import run_in_thread
from rollout_worker.weights import check_layout

from .checkpoint_files import FileSource, open_source
from .source_reading import ReadableSource, ReadCancelled, Report, read_source

Located = tuple[Path, tuple[Path, ...]]
"""Where a source lies and its roots, as `locate_source` says."""

OpenSlot = Callable[..., Awaitable[Sink]]
"""As `Engine.open_slot`."""

Elsewhere = Callable[[str], Coroutine[Any, Any, Mapping[str, str]]]
"""Fills the slot of this id on other nodes; returns by their names which root hash they found."""

_THREADS = ThreadPoolExecutor(4, "paths")
"""As many lookups of links may hang, on a volume that does not answer, before the next ones wait."""


async def resolve_within(
    source: WeightsSource, settings: WorkerSettings, seconds: float
) -> WeightsSource:
    """As `resolve_source`, in a thread: a volume over the network may take long, or never answer.

    Raises:
        ProblemError: 422, as `resolve_source`; 504.
    """
    if source.path is None:  # there is nothing to look up, and the threads may hang
        return source
    call = asyncio.get_running_loop().run_in_executor(_THREADS, resolve_source, source, settings)
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


def resolve_source(source: WeightsSource, settings: WorkerSettings) -> WeightsSource:
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
        raise _refused_path(source.path, "no path holds a NUL character")
    path = Path(source.path)
    if not path.is_absolute():
        if not roots:
            raise _refused_path(source.path, "give an absolute path, or start with --weights-roots")
        path = roots[-1] / path
    path = _real_path(source.path, path)
    allowed = [Path(settings.model), *roots]
    if roots and not any(path.is_relative_to(root.resolve()) for root in allowed):
        names = ", ".join(str(root) for root in allowed)
        raise _refused_path(source.path, f"it must lie below one of {names}")
    return WeightsSource(path=str(path))


def locate_source(
    source: WeightsSource, settings: WorkerSettings, model: Path
) -> tuple[Path, tuple[Path, ...]]:
    """Return where a resolved source lies, and below which roots all its files must lie.

    Args:
        source: What `resolve_source` returned.
        settings: The worker's.
        model: The folder of the model, whose own weights are the checkpoint.
    """
    if source.path is None:
        return model, ()  # whoever gave the model may link its files from anywhere
    roots = settings.weights_roots
    return Path(source.path), (model, *roots) if roots else ()


def _real_path(given: str, path: Path) -> Path:
    """Follow all links. In a circle Python either raises or goes on by the letter of the path."""
    try:
        real = path.resolve()
        settled = real == real.resolve()
    except (OSError, RuntimeError):
        settled = False
    if not settled:
        raise _refused_path(given, "its links can't be followed")
    return real


def _refused_path(path: str, fix: str) -> ProblemError:
    return ProblemError(
        "invalid-request",
        f"source.path {path!r} is not allowed: {fix}",
        errors=[{"field": "source.path", "message": fix}],
    )


async def fill_sink(
    open_slot: OpenSlot,
    layout: WeightsLayout,
    located: Located,
    verify: Callable[[str], None],
    report: Report = lambda done, total: None,
    elsewhere: Elsewhere | None = None,
    *,
    expected: str | None = None,
) -> Sink:
    """Return a sealed sink with everything that the source holds.

    Args:
        open_slot: Gives the memory.
        layout: What the source must hold.
        located: The source.
        verify: Raises unless the root hash is the right one; called in the loop.
        report: Told of progress, in a thread.
        elsewhere: Set in a gang: all nodes must have found the same.
        expected: The root hash that `verify` compares with, if there is one: its scheme is the one to hash with.

    Raises:
        WeightsRejected: a missing, unexpected or ill-shaped tensor.
        ContentMismatch: the hash is wrong, or another node found other bytes.
        EngineError: the engine has no room, or another node failed.
    """
    source = await run_in_thread(lambda _: _open_located(layout, located), threading.Event())
    return await fill_from_source(
        open_slot, layout, source, verify, report, elsewhere, expected=expected
    )


async def fill_from_source(
    open_slot: OpenSlot,
    layout: WeightsLayout,
    source: ReadableSource,
    verify: Callable[[str], None],
    report: Report = lambda done, total: None,
    elsewhere: Elsewhere | None = None,
    *,
    given: GivenWeights | None = None,
    expected: str | None = None,
) -> Sink:
    """As `fill_sink`, with an opened source; `given`: memory that has its bytes, which the sink may take."""
    cancel = threading.Event()
    offered = {} if given is None else {"given": given}
    sink = await open_slot(source.entries, **offered)
    others = None if elsewhere is None else asyncio.ensure_future(elsewhere(sink.slot))
    if others is not None:
        others.add_done_callback(lambda done: cancel.set() if _has_failed(done) else None)
    try:
        if sink.memory != "host":
            raise EngineError(f"files can't be read into {sink.memory} memory: use a transport")

        def bring(cancelled: Callable[[], bool]) -> str:
            tied, take = layout.tied, sink.allocate
            return read_source(source, tied, take, report, cancelled, expected=expected)

        root_hash = await _read_into_sink(bring, cancel, others)
        verify(root_hash)
        if others is not None:
            _check_votes(root_hash, await others)
        await run_in_thread(lambda _: sink.seal(), cancel)
    except BaseException:
        try:
            if others is not None:
                others.cancel()
                await asyncio.wait([others])
        finally:  # whatever else cancels this: nobody else would close it
            await run_in_thread(lambda _: sink.close(), cancel)
        raise
    return sink


def _open_located(layout: WeightsLayout, located: Located) -> FileSource:
    path, roots = located
    source = open_source(path, roots=roots)
    check_layout(layout, source.entries, str(path))
    return source


async def _read_into_sink(
    bring: Callable[[Callable[[], bool]], str],
    cancel: threading.Event,
    others: asyncio.Future[Mapping[str, str]] | None,
) -> str:
    """Read everything; what another node failed of is the reason to give up, not that we did."""
    try:
        return await run_in_thread(bring, cancel)
    except ReadCancelled:
        if others is not None and _has_failed(others):
            others.result()
        raise


def _has_failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _check_votes(root_hash: str, votes: Mapping[str, str]) -> None:
    for name, found in votes.items():
        if found != root_hash:
            raise ContentMismatch(
                f"{name} found root_hash {found} where the head found {root_hash}: give all nodes"
                " the same bytes"
            )
