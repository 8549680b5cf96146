"""A version that several ranks write into one shared memory, in any order: notes what has come and hashes it."""

from __future__ import annotations

import queue
import threading

from typing_extensions import override

from rollout_common.transfer.arena import Arena, ArenaError
from rollout_common.transfer.layout import LayoutError, Placed

from .copying import Copier
from .push_tensors import Dtypes
from .settings import MERGING_LOOK_SECONDS
from .stream_filling import Filling, LeafMarker

HASHED_BYTES = 4 << 20
"""How many bytes are hashed between two checks whether the version is still wanted."""


class Merging(Filling):
    """A `Filling` whose bytes come from several ranks at once; a thread hashes them, tensor by tensor.

    Args:
        arena: As `Filling` takes it.
        copier: As `Filling` takes it.
        dtypes: As `Filling` takes them.
    """

    def __init__(self, arena: Arena, copier: Copier, dtypes: Dtypes | None = None) -> None:
        super().__init__(arena, None, copier, dtypes)
        self._jobs: queue.SimpleQueue[tuple[Placed, int, int] | None] = queue.SimpleQueue()
        self._runs: dict[str, dict[int, int]] = {}
        """By tensor: runs that came beyond a gap, end by begin."""
        self._there: dict[str, int] = {}
        """By tensor: how many of its first bytes are there."""
        self._blocks: dict[str, int] = {}
        """By tensor: how many bytes came in blocks that are not runs."""

    def begin(self) -> None:
        """Expect all tensors of the layout; those without bytes are there."""
        names = [each.name for each in self.layout.tensors]
        with self._news:
            self._begun = set(names)
            self._runs = {name: {} for name in names}
            self._there, self._blocks = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        threading.Thread(target=self._hash_runs, name="weights-hash", daemon=True).start()

    def arrived(self, name: str, begin: int, end: int) -> None:
        """Note that a run of a tensor's bytes is written; call it once for each run, from any thread.

        Raises:
            LayoutError: The tensor does not have this run.
        """
        with self._news:
            runs, there = self._runs.get(name), self._there.get(name, 0)
            if runs is None or not there <= begin < end <= self.layout[name].nbytes:
                raise LayoutError(f"tensor {name!r} has no bytes {begin} to {end}", tensor=name)
            runs[begin] = end
            first = there
            while there in runs:
                there = runs.pop(there)
            if there > first:
                self._there[name] = there
                self._jobs.put((self.layout[name], first, there))

    def block(self, name: str, nbytes: int) -> None:
        """Note bytes of a tensor that are not one run: the tensor is there once all of its bytes are.

        Raises:
            LayoutError: The layout has no such tensor, or the tensor has fewer bytes.
        """
        with self._news:
            if name not in self._blocks:
                raise LayoutError(f"the layout has no tensor {name!r}", tensor=name)
            self._blocks[name] += nbytes
            whole = self._blocks[name] >= self.layout[name].nbytes
        if whole:
            self.arrived(name, 0, self._blocks[name])

    def all_written(self) -> bool:
        """Return once every byte is there and hashed; False: a rank has ended, so they won't come.

        Raises:
            BaseException: The reason why another rank stopped.
        """
        held = self.held
        while not held.wait_for(lambda: held.is_complete, MERGING_LOOK_SECONDS):
            if self._given_up:
                if self._why is not None:
                    raise self._why
                return False
        return True

    def why(self, seconds: float) -> BaseException | None:
        """Return why it failed, if that happens within these seconds."""
        with self._news:
            self._news.wait_for(lambda: self._given_up, seconds)
            return self._why

    @override
    def fail(self, why: BaseException | None = None) -> None:
        super().fail(why)
        self._jobs.put(None)

    def _hash_runs(self) -> None:
        """Hash what was written, in a separate thread, so that no rank waits for it."""
        markers: dict[str, LeafMarker] = {}
        slot, held = self.slot, self.held
        try:
            while (job := self._jobs.get()) is not None and not held.is_complete:
                placed, begin, end = job
                marker = markers.setdefault(placed.name, LeafMarker(held, placed))
                for at in range(begin, end, HASHED_BYTES):
                    if self._given_up:
                        return
                    last = min(at + HASHED_BYTES, end)
                    with slot.bytes(placed.start + at, placed.start + last) as run:
                        marker.update(run)
                if end == placed.nbytes:
                    markers.pop(placed.name).finish()
                    if held.is_complete:
                        return
        except ArenaError as error:  # the pool was closed before all was hashed
            self.fail(error)
