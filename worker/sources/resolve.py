"""Where the bytes of weights may lie: which paths of a stage request are allowed, and what below.

Every path is confined here and nowhere else; `files` holds single files to the same roots, since
what a folder holds may change until it is read.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollout_worker.schemas import WeightsSource
from rollout_worker.settings import Settings
from rollout_worker.wire.problems import ProblemError

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
