"""Reads what a former worker of the same pool and node has left in the folder of kept versions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

from rollout_common.wire import KeptWeights
from rollout_worker.settings import WorkerSettings
from rollout_worker.sources.pushed.kept_folder import KeptFolder
from rollout_worker.sources.pushed.kept_version import KeptVersion
from rollout_worker.sources.pushed.pushed_memory import Memory
from rollout_worker.threads import run_in_thread


def keep_folder_of(settings: WorkerSettings) -> KeptFolder | None:
    """Return the folder in which a worker keeps weights for the next one; None: it has none."""
    if settings.keep_folder is None:
        return None
    pool = f"{settings.namespace}.{settings.pool}"
    return KeptFolder(settings.keep_folder, settings.served_name if settings.pool is None else pool)


class RestoringKept:
    """What is being read from the folder of kept versions; it ends with the first commit.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: KeptFolder) -> None:
        self._folder = folder
        self.found: KeptWeights | None = None
        """The version that is being read."""
        self._over = threading.Event()

    def end(self) -> None:
        """Read no more of it; may be called from any thread."""
        self._over.set()

    async def read_newest(
        self, make_memory: Callable[[int], Memory], note_found: Callable[[], None]
    ) -> KeptVersion | None:
        """Return the newest version of the folder, verified; None if there is none, or it was ended.

        Args:
            make_memory: Returns memory of this size.
            note_found: Called once `found` is set.
        """
        file = await asyncio.to_thread(self._folder.find_newest)
        if file is None or self._over.is_set():
            return None
        self.found = file.weights
        note_found()
        work = partial(self._folder.read_version, file, make_memory)
        kept = await run_in_thread(work, self._over)
        if kept is not None and self._over.is_set():
            kept.release()
            return None
        return kept
