"""Fills a sink from a source: checks the path, opens the source, takes memory, reads, verifies and seals.

Only this module confines paths; `checkpoint_files` checks single files against the same roots, since the
content of a folder may change until it is read. A caller that stops halfway releases the memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_common.wire import WeightsSource
from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import (
    ContentMismatch,
    EngineError,
    MappedWeights,
    Sink,
    TrainerTensors,
    WeightsLayout,
)
from rollout_worker.settings import WorkerSettings
from rollout_worker.threads import run_in_thread
from rollout_worker.weights import check_layout

from .checkpoint_files import FileSource, open_source
from .source_reading import ReadableSource, ReadCancelled, Report, read_source

Located = tuple[Path, tuple[Path, ...]]
"""The path of a source and its roots, as `locate_source` returns them."""

OpenSlot = Callable[..., Awaitable[Sink]]
"""As `Engine.open_slot`."""

Elsewhere = Callable[[str], Coroutine[Any, Any, Mapping[str, str]]]
"""Fills the slot with this id on other nodes; returns the root hash that each found, by the node's name."""

_THREADS = ThreadPoolExecutor(4, "paths")
"""Four lookups of links may hang, on a volume that does not answer, before further ones wait."""


async def resolve_within(
    source: WeightsSource, settings: WorkerSettings, seconds: float
) -> WeightsSource:
    """Run `resolve_source` in a thread, with a deadline: a network volume may take long, or never answer.

    Raises:
        ProblemError: 422, as `resolve_source`; 504.
    """
    if source.path is None:  # it has no path, and a thread might hang
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
    so none leads outside. The engine checks whether the path exists.

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
        names = ", ".join(dict.fromkeys(map(str, allowed)))
        raise _refused_path(source.path, f"it must lie below one of {names}")
    return WeightsSource(path=str(path))


def locate_source(
    source: WeightsSource, settings: WorkerSettings, model: Path
) -> tuple[Path, tuple[Path, ...]]:
    """Return the path of a resolved source, and the roots below which all of its files must lie.

    Args:
        source: What `resolve_source` returned.
        settings: The worker's.
        model: The folder of the model, whose own weights are the checkpoint.
    """
    if source.path is None:
        return model, ()  # the worker's settings name the model, which may link files from anywhere
    roots = settings.weights_roots
    return Path(source.path), (model, *roots) if roots else ()


def _real_path(given: str, path: Path) -> Path:
    """Return the path without links. For a circle of links Python raises, or returns a path with links."""
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


@dataclass(slots=True)
class SinkFilling:
    """Fills one sink, whatever the source.

    Attributes:
        open_slot: Gives the memory.
        layout: What the source must hold.
        verify: Raises unless the root hash is the right one; called in the loop.
        report: Gets the progress, in a thread.
        elsewhere: Fills the other nodes of a gang: all nodes must find the same root hash.
        expected: The root hash that `verify` compares with, if there is one: the hashes use its scheme.
        root_hash: What `verify` was called with, once the bytes are there.
    """

    open_slot: OpenSlot
    layout: WeightsLayout
    verify: Callable[[str], None]
    report: Report = lambda done, total: None
    elsewhere: Elsewhere | None = None
    expected: str | None = None
    root_hash: str = field(default="", init=False)

    async def fill_from_files(self, located: Located) -> Sink:
        """Return a sealed sink with everything that a source of files holds.

        Raises:
            WeightsRejected: a missing, unexpected or ill-shaped tensor.
            ContentMismatch: the hash is wrong, or another node found other bytes.
            EngineError: the engine has no room, or another node failed.
        """
        return await self.fill_from_source(
            await run_in_thread(lambda _: self._open_located(located), threading.Event())
        )

    async def fill_from_source(
        self, source: ReadableSource, given: MappedWeights | TrainerTensors | None = None
    ) -> Sink:
        """Return a sealed sink with everything that an opened source holds; errors as for files.

        `given`: memory with these bytes. The sink takes it, or it is released once they are copied; an error leaves it.
        """
        cancel = threading.Event()
        offered = {} if given is None else {"given": given}
        sink = await self.open_slot(source.entries, **offered)
        others = None
        if self.elsewhere is not None:
            others = asyncio.ensure_future(self.elsewhere(sink.slot))
            others.add_done_callback(lambda done: cancel.set() if _has_failed(done) else None)
        try:
            if sink.memory != "host":
                raise EngineError(f"files can't be read into {sink.memory} memory: use a transport")

            def bring(cancelled: Callable[[], bool]) -> str:
                tied, take = self.layout.tied, sink.allocate
                return read_source(
                    source, tied, take, self.report, cancelled, expected=self.expected
                )

            self.root_hash = await _read_into_sink(bring, cancel, others)
            self.verify(self.root_hash)
            if others is not None:
                _check_votes(self.root_hash, await others)
            await run_in_thread(lambda _: sink.seal(), cancel)
        except BaseException:
            try:
                if others is not None:
                    others.cancel()
                    await asyncio.wait([others])
            finally:  # also on a cancellation: nothing else would close it
                await run_in_thread(lambda _: sink.close(), cancel)
            raise
        if given is not None and not sink.took:
            given.release()
        return sink

    def _open_located(self, located: Located) -> FileSource:
        path, roots = located
        source = open_source(path, roots=roots)
        check_layout(self.layout, source.entries, str(path))
        return source


async def _read_into_sink(
    bring: Callable[[Callable[[], bool]], str],
    cancel: threading.Event,
    others: asyncio.Future[Mapping[str, str]] | None,
) -> str:
    """Read everything; if another node failed first, raise its error, not this node's cancellation."""
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
