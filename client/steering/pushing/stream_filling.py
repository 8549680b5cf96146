"""Copies a version from tensors to shared memory, and hashes it leaf by leaf.

One thread fills (`plan`, `take`, `end`); senders serve what `held` has. Once it has failed (`fail`), no thread waits
for it any longer.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rollout_client.errors import PublishFailed
from rollout_client.steering.plain_tensors import Spec, check_readable, spec_of
from rollout_common.transfer.held_version import HeldVersion, VersionEnd
from rollout_common.transfer.layout import LayoutError, Placed, PushLayout
from rollout_common.transfer.memory.arena import Arena
from rollout_common.transfer.memory.slot import Release, Slot
from rollout_common.wire.root_hash import DIGEST_BYTES, HashedTensor, TensorHasher, root_hash_of

from .push_tensors import Dtypes, cast, cast_specs
from .tensor_copying import Copier

if TYPE_CHECKING:
    import torch


_NO_TENSORS = (
    "no tensors were given: a generator can be read only once, so each call needs a new one"
)


class Filling:
    """A version that one thread copies to shared memory, and that senders serve from there.

    Args:
        arena: Gives the memory.
        known: The layout of the previous version, since that of a stream is unknown before its end.
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
        self.dtypes = dtypes or {}
        """What floating-point tensors are cast to."""
        self._news = threading.Condition()
        self._held: HeldVersion | None = None
        self._slot: Slot | None = None
        self._release: Release | None = None
        self._begun: set[str] = set()
        """The names of the tensors that came."""
        self._loose: dict[str, torch.Tensor] = {}
        self.root_hash: str | None = None
        """Of all tensors; None: unknown so far."""
        self.given_up = False
        """Whether it has failed."""
        self._why: BaseException | None = None
        self.planned: Future[None] = Future()
        """Done once memory was taken, so that the layout is known; or `PublishFailed`."""
        self.ended: Future[str] = Future()
        """The root hash of all tensors, once they are hashed; or `PublishFailed`."""
        self.began = self.filled_at = time.monotonic()

    # For the thread that fills.

    def plan(self, specs: tuple[Spec, ...] | None) -> None:
        """Take memory, if the layout is known.

        Raises:
            LayoutError: A name came twice, or a tensor is impossible.
            SharedMemoryError: There is no room.
        """
        import xxhash  # noqa: F401  # raise before anything is sent if it is missing

        layout: PushLayout | None = self._known
        if specs is not None:
            layout = PushLayout.plan(cast_specs(specs, self.dtypes))
        if layout is None:
            return
        if not layout.tensors:
            raise LayoutError(_NO_TENSORS)
        self.take_memory(layout)

    def take_memory(self, layout: PushLayout, expected: int | None = None) -> None:
        """Take memory for this layout; `expected`: how many of its bytes come here, if not all.

        Raises:
            SharedMemoryError: There is no room.
        """
        slot, release = self._arena.take_slot(layout.nbytes, expected)
        with self._news:
            self._held = HeldVersion(layout, slot.view_bytes)
            self._slot, self._release = slot, release
            if not self.given_up:
                self.planned.set_result(None)

    def take(self, name: str, tensor: Any) -> None:
        """Copy a tensor; do nothing once the version has failed, since a stream is read to its end all the same.

        Raises:
            LayoutError: It came before, differs from the plan, has no plain values, or its memory was freed.
        """
        if self.given_up:
            return
        [spec] = cast_specs([spec_of(name, tensor)], self.dtypes)
        tensor = cast(name, tensor, self.dtypes)
        if self._held is None:
            if name in self._loose:
                raise LayoutError(f"the tensor {name!r} came twice", tensor=name)
            check_readable(name, tensor)
            self._loose[name] = tensor.detach().to("cpu", copy=True)
            return
        placed = self._place(self._held.layout, spec)
        assert self._slot is not None
        self._begun.add(name)
        marker = LeafMarker(self._held, placed)
        self._copier.copy(
            name,
            tensor,
            self._slot.view_tensor(placed),
            lambda _: None,  # the marker notes the progress as it hashes
            self._slot.lock_pages,
            marker.update,
        )
        marker.finish()

    def _place(self, layout: PushLayout, spec: Spec) -> Placed:
        """Return the place of a tensor; refuse one that differs from the plan."""
        name, dtype, shape = spec
        if name in self._begun:
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

    def end(self) -> None:
        """Return once all of it is there and hashed.

        Raises:
            LayoutError: A tensor is missing.
        """
        if self.given_up:
            return
        if self._held is None:
            loose, self._loose = self._loose, {}
            self.plan(tuple(spec_of(name, tensor) for name, tensor in loose.items()))
            for name in list(loose):
                self.take(name, loose.pop(name))
        assert self._held is not None
        layout = self._held.layout
        if not self._begun and not self.given_up:
            raise LayoutError(_NO_TENSORS)
        missing = [each.name for each in layout.tensors if each.name not in self._begun]
        if missing and not self.given_up:  # after a failure nothing more is copied
            raise LayoutError(
                f"tensor {missing[0]!r} is missing, but the previous version had it: a stream must bring "
                "the same tensors in each version",
                tensor=missing[0],
            )
        self._finish()

    def _finish(self) -> None:
        """Note the hashes of the complete version."""
        held = self._held
        if held is None or self.given_up or not held.is_hashed:
            return
        digests = held.tensor_digests()
        root = root_hash_of(
            {t.name: HashedTensor(t.dtype, t.shape, digests[t.name]) for t in held.layout.tensors}
        )
        with self._news:
            if self.given_up:
                return
            self.root_hash = root
            self.filled_at = time.monotonic()
            self.ended.set_result(root)
        held.finish(VersionEnd(root, digests))

    def fail(self, why: BaseException | None = None) -> None:
        """End it with a failure, which wakes all that wait. It has no effect after the end or after a first failure.

        Senders fail in turn, and may report that before the thread that fills has seen the first reason.
        """
        with self._news:
            if self.root_hash is None and not self.given_up:
                self.given_up, self._why = True, why
                for waited_for in (self.planned, self.ended):
                    if not waited_for.done():
                        waited_for.set_exception(_given_up_error(why))
            self._news.notify_all()
            held = self._held if self.given_up else None
        if held is not None:
            held.fail("the publish was given up")

    def close(self) -> None:
        """End this thread's use of the memory; senders have lent it separately."""
        self.fail()
        release, self._release = self._release, None
        if release is not None:
            release()

    # For senders.

    @property
    def layout(self) -> PushLayout:
        """The layout of the version; known once `planned` is done."""
        return self.held.layout

    @property
    def held(self) -> HeldVersion:
        """The pieces that are there; known as soon as `layout` is."""
        assert self._held is not None
        return self._held

    @property
    def slot(self) -> Slot:
        """The memory of the version; known as soon as `layout` is."""
        assert self._slot is not None
        return self._slot


def _given_up_error(why: BaseException | None) -> PublishFailed:
    """Return the error of those that wait for a filling that failed for this reason."""
    if isinstance(why, PublishFailed):
        return why
    error = PublishFailed("the publish was given up" + ("" if why is None else f": {why}"))
    error.__cause__ = why
    return error


class LeafMarker:
    """Hashes one tensor of a version, whose bytes come in order, and notes each leaf that is there."""

    def __init__(self, held: HeldVersion, placed: Placed) -> None:
        self._held, self._hasher = held, TensorHasher()
        self._first, self._marked = held.pieces.first_leaf.get(placed.name, 0), 0

    def update(self, run: memoryview) -> None:
        """Hash the next bytes, which are in their place already."""
        self._hasher.update(run)
        self._mark_leaves()

    def finish(self) -> None:
        """Note the last leaf, once all bytes have come."""
        self._hasher.hexdigest()
        self._mark_leaves()

    def _mark_leaves(self) -> None:
        leaves = self._hasher.leaves
        for at in range(self._marked, len(leaves) // DIGEST_BYTES):
            digest = leaves[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
            self._held.mark_leaf(self._first + at, digest)
            self._marked = at + 1
