"""The checkpoint's hash, made while vLLM's processes start: both take their time with a large model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rollout_worker.engines.checkpoint import hash_of
from rollout_worker.schemas import Progress

Report = Callable[[Progress], None]
T = TypeVar("T")


def beside_hash(
    folder: Path,
    report: Report,
    cancelled: Callable[[], bool],
    start: Callable[[], T],
    end: Callable[[T], object],
) -> tuple[T, str]:
    """Return what `start` returns, and the root hash of the checkpoint in `folder`.

    A start that fails is told at once, and the hash given up; without a hash what was started is
    ended.

    Raises:
        WeightsRejected: the checkpoint is not whole, or not what its manifest says.
        ReadCancelled: `cancelled` said so.
        Exception: what `start` raised.
    """
    failed = threading.Event()

    def given_up() -> bool:
        return failed.is_set() or cancelled()

    with ThreadPoolExecutor(1) as pool:
        hashing = pool.submit(_hash, folder, report, given_up)
        try:
            started = start()
        except BaseException:
            failed.set()
            raise
        try:
            return started, hashing.result()
        except BaseException:
            end(started)
            raise


def _hash(folder: Path, report: Report, cancelled: Callable[[], bool]) -> str:
    """Hash, and tell of the progress."""

    def advance(done: int, total: int) -> None:
        if done < total:
            report(Progress(message=f"checking weights {done / total:.0%}", fraction=done / total))
        else:
            report(Progress(message="starting vLLM's processes"))

    return hash_of(folder, advance, cancelled)
