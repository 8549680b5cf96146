"""A version that several ranks write into the one shared memory: noted here as it comes, in any order."""

from __future__ import annotations

import queue
import threading

from rollout_common.transfer.arena import Arena, ArenaError, Slot
from rollout_common.transfer.layout import LayoutError, Placed
from rollout_common.wire.root_hash import TensorHasher

from .copying import Copier
from .push_tensors import Dtypes
from .stream_filling import Filling, GivenUp

WAIT_SECONDS = 0.5


class Merging(Filling):
    """A `Filling` whose bytes come from several ranks at once; a thread hashes them in order all the same.

    Args:
        arena: As `Filling` takes it.
        copier: As `Filling` takes it.
        dtypes: As `Filling` takes them.
    """

    def __init__(self, arena: Arena, copier: Copier, dtypes: Dtypes | None = None) -> None:
        super().__init__(arena, None, copier, dtypes)
        self._hashing = _Hashing()

    def begin(self) -> None:
        """Expect all tensors of the layout; those without bytes are there."""
        self._hashing.start(self.slot, self._digests)
        with self._news:
            self._runs: dict[str, dict[int, int]] = {each.name: {} for each in self.layout.tensors}
            self._there = dict.fromkeys(self._runs, 0)
            self._blocks = dict.fromkeys(self._runs, 0)
            self._hashed, self._fed = 0, 0
            self._on()

    def arrived(self, name: str, begin: int, end: int) -> None:
        """Note that a run of a tensor's bytes is written; each comes once, from any thread.

        Raises:
            LayoutError: There is no such run.
        """
        with self._news:
            runs, there = self._runs.get(name), self._there.get(name, 0)
            if runs is None or not there <= begin < end <= self.layout[name].nbytes:
                raise LayoutError(f"there are no bytes {begin} to {end} of {name!r}", tensor=name)
            runs[begin] = end
            while there in runs:
                there = runs.pop(there)
            self._advance(name, there)
            self._on()

    def block(self, name: str, nbytes: int) -> None:
        """Note bytes of a tensor that are no run of it: it is there once all of them are.

        Raises:
            LayoutError: There is no such tensor, or it has not so many.
        """
        with self._news:
            if name not in self._blocks:
                raise LayoutError(f"there is no tensor {name!r}", tensor=name)
            self._blocks[name] += nbytes
            if self._blocks[name] >= self.layout[name].nbytes:
                self.arrived(name, 0, self._blocks[name])

    def _on(self) -> None:
        """Hash what is there without a gap from the first tensor on."""
        tensors = self.layout.tensors
        while self._hashed < len(tensors):
            placed = tensors[self._hashed]
            there = self._there[placed.name]
            if there > self._fed or not placed.nbytes:
                self._hashing.add(placed, self._fed, there)
                self._fed = there
            if there < placed.nbytes:
                return
            self._hashed, self._fed = self._hashed + 1, 0
            if not placed.nbytes:
                self._advance(placed.name, 0)

    def all_written(self) -> bool:
        """Return once every byte is there; False: they won't be, for whoever sends them has ended.

        Raises:
            BaseException: Why another rank gave up.
        """
        try:
            while self.wait_upto(self.layout.nbytes, WAIT_SECONDS) < self.layout.nbytes:
                pass
        except GivenUp:
            if self._why is not None:
                raise self._why from None
            return False
        return True

    def why(self, seconds: float) -> BaseException | None:
        """Return why it is given up, if it is within these seconds."""
        with self._news:
            self._news.wait_for(lambda: self._given_up, seconds)
            return self._why

    def fail(self, why: BaseException | None = None) -> None:
        """See `Filling.fail`."""
        super().fail(why)
        self._hashing.stop()

    def _hashes(self) -> dict[str, str]:
        """See `Filling._hashes`.

        Raises:
            ArenaError: The pool was closed before all was hashed.
        """
        self._hashing.stop(at_once=False)
        if self._hashing.why is not None and not self._given_up:
            raise self._hashing.why
        return super()._hashes()


class _Hashing:
    """Hashes what was written, in a thread of its own: no rank that writes waits for it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Placed, int, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.why: ArenaError | None = None
        """Why it ended before all was hashed: the pool was closed."""

    def start(self, slot: Slot, digests: dict[str, str]) -> None:
        """Begin, unless somebody else's thread has stopped it already; `digests` gets the hashes, by name."""

        def run() -> None:
            running = TensorHasher()
            while (job := self._jobs.get()) is not None and not self._stopped:
                placed, begin, end = job
                try:
                    running.update(slot.bytes(placed.start + begin, placed.start + end))
                except ArenaError as error:
                    self.why = error
                    return
                if end == placed.nbytes:
                    digests[placed.name] = running.hexdigest()
                    running = TensorHasher()

        with self._lock:
            if not self._stopped:
                self._thread = threading.Thread(target=run, name="weights-hash", daemon=True)
                self._thread.start()

    def add(self, placed: Placed, begin: int, end: int) -> None:
        """Hash these bytes of a tensor next; those of one tensor come in order and without a break."""
        self._jobs.put((placed, begin, end))

    def stop(self, *, at_once: bool = True) -> None:
        """End the thread, once all is hashed if not at once."""
        with self._lock:
            self._stopped |= at_once
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()
