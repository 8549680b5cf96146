"""A version that several ranks write into the one shared memory: noted here as it comes, in any order."""

from __future__ import annotations

from rollout_worker.transfer.layout import LayoutError

from .filling import Filling, GivenUp

WAIT_SECONDS = 0.5


class Merging(Filling):
    """A `Filling` whose bytes come from several ranks at once; hashed in order all the same."""

    def begin(self) -> None:
        """Expect all tensors of the layout; those without bytes are there."""
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

    @property
    def given_up(self) -> bool:
        """Whether nobody wants it any more."""
        return self._given_up
