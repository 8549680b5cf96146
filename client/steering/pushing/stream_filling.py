"""A version on its way from tensors into shared memory, hashed as it is copied; senders follow as it grows.

One thread fills (`plan`, `take`, `end`), any number of senders wait for bytes. Whoever gives up, says
so once (`fail`), and nobody waits any longer.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from rollout_common.transfer.arena import Arena, Release, Slot
from rollout_common.transfer.layout import LayoutError, Placed, PushLayout
from rollout_common.wire.root_hash import HashedTensor, TensorHasher, root_hash_of

from .copying import Copier
from .push_tensors import Dtypes, Spec, cast, cast_specs, check_there, spec_of

if TYPE_CHECKING:
    import torch


class GivenUp(Exception):
    """Nobody fills it any more; the cause, if there is one, is why."""


class Filling:
    """See the module.

    Args:
        arena: Where memory comes from.
        known: The layout of the version before: that of a stream isn't known before its end.
        copier: Copies tensors.
        dtypes: What floating-point tensors are cast to.
    """

    def __init__(
        self,
        arena: Arena,
        known: PushLayout | None,
        copier: Copier,
        dtypes: Dtypes | None = None,
    ) -> None:
        self._arena, self._known, self._copier = arena, known, copier
        self._dtypes = dtypes or {}
        self._news = threading.Condition()
        self._layout: PushLayout | None = None
        self._slot: Slot | None = None
        self._release: Release | None = None
        self._there: dict[str, int] = {}
        """By name of the tensors that were begun: how many of their bytes are there."""
        self._next = 0
        self._loose: dict[str, torch.Tensor] = {}
        self._awaited: list[int] = []
        """The positions that senders wait for."""
        self._digests: dict[str, str] = {}
        self._root_hash: str | None = None
        self._given_up = False
        self._why: BaseException | None = None
        self.began = time.monotonic()
        self.planned_at = self.filled_at = self.began

    # The thread that fills.

    def plan(self, specs: tuple[Spec, ...] | None) -> None:
        """Take memory, if it is known for what.

        Raises:
            LayoutError: A name came twice, or a tensor is impossible.
            ArenaError: There is no room.
        """
        import xxhash  # noqa: F401  # what is missing is told before anything is sent

        layout = self._known
        if specs is not None:
            layout = PushLayout.plan(cast_specs(specs, self._dtypes))
        if layout is None:
            return
        if not layout.tensors:
            raise LayoutError("no tensors were given")
        slot, release = self._arena.take(layout.nbytes)
        with self._news:
            self._layout, self._slot, self._release = layout, slot, release
            self.planned_at = time.monotonic()
            self._news.notify_all()

    def take(self, name: str, tensor: Any) -> None:
        """Copy a tensor; once it was given up, do nothing: a stream is taken to its end all the same.

        Raises:
            LayoutError: It came before, is not what was planned, or its memory was freed.
        """
        if self._given_up:
            return
        tensor = cast(name, tensor, self._dtypes)
        spec = spec_of(name, tensor)
        if self._layout is None:
            if name in self._loose:
                raise LayoutError(f"the tensor {name!r} came twice", tensor=name)
            check_there(name, tensor)
            self._loose[name] = tensor.detach().to("cpu", copy=True)
            return
        placed = self._place(self._layout, spec)
        assert self._slot is not None

        def done(count: int) -> None:
            self._advance(name, count)

        self._there[name] = 0
        slot, running = self._slot, TensorHasher()
        self._copier.copy(
            name, tensor, slot.view(placed), done, slot.page_locked, hashed=running.update
        )
        self._digests[name] = running.hexdigest()
        if not placed.nbytes:
            done(0)

    def _place(self, layout: PushLayout, spec: Spec) -> Placed:
        """Return where a tensor goes, which must be the one that was planned."""
        name, dtype, shape = spec
        if name in self._there:
            raise LayoutError(f"the tensor {name!r} came twice", tensor=name)
        fix = "a stream brings the same tensors in each version; make a new pool for another model"
        try:
            placed = layout[name]
        except KeyError:
            why = f"tensor {name!r} was not in the version before: {fix}"
            raise LayoutError(why, tensor=name) from None
        if (placed.dtype, placed.shape) != (dtype, shape):
            raise LayoutError(
                f"tensor {name!r} is {dtype} {list(shape)} and was {placed.dtype} "
                f"{list(placed.shape)} in the version before: {fix}",
                tensor=name,
            )
        return placed

    def _advance(self, name: str, count: int) -> None:
        """Note how many bytes of a tensor are there, and how far all of it is without a gap."""
        assert self._layout is not None
        tensors = self._layout.tensors
        with self._news:
            self._there[name] = count
            while self._next < len(tensors):
                each = tensors[self._next]
                if self._there.get(each.name, -1) < each.nbytes:
                    break
                self._next += 1
            upto = self._upto()
            # A sender waits for megabytes: woken for each piece, it would take the processor from the copy.
            if any(position <= upto for position in self._awaited):
                self._news.notify_all()

    def end(self) -> None:
        """Return once all of it is there and hashed.

        Raises:
            LayoutError: A tensor is missing.
        """
        if self._given_up:
            return
        if self._layout is None:
            loose, self._loose = self._loose, {}
            self.plan(tuple(spec_of(name, tensor) for name, tensor in loose.items()))
            for name in sorted(loose):
                self.take(name, loose.pop(name))
        assert self._layout is not None
        missing = [each.name for each in self._layout.tensors if each.name not in self._there]
        if missing and not self._given_up:  # nothing more is taken once it is
            raise LayoutError(
                f"tensor {missing[0]!r} is missing, but the previous version had it: a stream must bring "
                "the same tensors in each version",
                tensor=missing[0],
            )
        digests = self._hashes()
        if self._given_up:
            return
        root = root_hash_of(
            {t.name: HashedTensor(t.dtype, t.shape, digests[t.name]) for t in self._layout.tensors}
        )
        with self._news:
            self._root_hash = root
            self.filled_at = time.monotonic()
            self._news.notify_all()

    def _hashes(self) -> dict[str, str]:
        """Return the hash of each tensor, once all are there."""
        return self._digests

    def fail(self, why: BaseException | None = None) -> None:
        """Give it up: nobody waits for it any more. At its end nothing comes of it, nor of a second reason.

        Whoever sends gives up in turn, and may be heard before the thread that fills has seen the first one.
        """
        with self._news:
            if self._root_hash is None and not self._given_up:
                self._given_up, self._why = True, why
            self._news.notify_all()

    def close(self) -> None:
        """Let the memory go, as far as this process filled it; senders have lent it themselves."""
        self.fail()
        release, self._release = self._release, None
        if release is not None:
            release()

    # Whoever sends.

    @property
    def layout(self) -> PushLayout:
        """What is sent; known once `wait_planned` has returned True."""
        assert self._layout is not None
        return self._layout

    @property
    def slot(self) -> Slot:
        """Where it is; known as `layout` is."""
        assert self._slot is not None
        return self._slot

    @property
    def digests(self) -> dict[str, str]:
        """By name: the hash of a tensor's bytes; whole once `wait_end` has returned."""
        return self._digests

    @property
    def given_up(self) -> bool:
        """Whether nobody wants it any more."""
        return self._given_up

    @property
    def planned(self) -> bool:
        """Whether memory was taken.

        Raises:
            GivenUp: It never will be.
        """
        with self._news:
            self._check()
            return self._layout is not None

    def wait_planned(self, seconds: float) -> bool:
        """Whether memory was taken within these seconds. Raises what `planned` raises."""
        with self._news:
            self._news.wait_for(lambda: self._layout or self._given_up, seconds)
        return self.planned

    def wait_upto(self, position: int, seconds: float) -> int:
        """Return how many bytes are final; waits these seconds for so many.

        Raises:
            GivenUp: No more will come.
        """
        with self._news:
            self._awaited.append(position)
            self._news.wait_for(lambda: self._upto() >= position or self._given_up, seconds)
            self._awaited.remove(position)
            self._check()
            return self._upto()

    def wait_end(self, seconds: float) -> str | None:
        """Return the root hash; None: not within these seconds. Raises what `wait_upto` raises."""
        with self._news:
            self._news.wait_for(lambda: self._root_hash or self._given_up, seconds)
            self._check()
            return self._root_hash

    @property
    def root_hash(self) -> str | None:
        """Of all tensors; None: not known yet."""
        return self._root_hash

    def _upto(self) -> int:
        if self._layout is None:
            return 0
        if self._next == len(self._layout.tensors):
            return self._layout.nbytes
        each = self._layout.tensors[self._next]
        return each.start + self._there.get(each.name, 0)

    def _check(self) -> None:
        if self._given_up:
            raise GivenUp("the publish was given up") from self._why
