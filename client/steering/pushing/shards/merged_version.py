"""A version that several ranks write into one shared memory, in any order: notes what has come and hashes it."""

from __future__ import annotations

import queue
import threading
from array import array
from collections.abc import Collection, Mapping

from typing_extensions import override

from rollout_client.steering.pushing.push_tensors import Dtypes
from rollout_client.steering.pushing.settings import MERGING_LOOK_SECONDS
from rollout_client.steering.pushing.stream_filling import Filling
from rollout_client.steering.pushing.tensor_copying import Copier
from rollout_common.transfer.layout import LayoutError
from rollout_common.transfer.memory.arena import Arena
from rollout_common.transfer.memory.mapped_memory import SharedMemoryError
from rollout_common.wire.root_hash import hash_leaf

from .tensor_boxes import Run


class MergedVersion(Filling):
    """A `Filling` whose bytes come from several ranks at once; a thread hashes each leaf once it is written."""

    def __init__(self, arena: Arena, copier: Copier, dtypes: Dtypes | None = None) -> None:
        super().__init__(arena, None, copier, dtypes)
        self._jobs: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        """Leaves to hash."""
        self._leaf_there = array("I")
        """By leaf: how many of its bytes are written."""
        self._blocks: Mapping[str, Run] = {}
        self._block_left: dict[str, int] = {}
        self._scattered: frozenset[str] = frozenset()
        self._due = 0
        self._is_node_done = False
        """Whether a node that has its part has got all of it: from then on no rank of it can spoil it."""
        self._unhashed = 0
        """How many leaves are written and not hashed yet."""

    def begin(self, due: int, blocks: Mapping[str, Run], scattered: Collection[str] = ()) -> None:
        """Expect bytes; tensors without bytes are there.

        Args:
            due: How many bytes the ranks of this node write.
            blocks: By name of the tensor: the run that is there once as many bytes of it are written, in any order.
            scattered: Other tensors that come in blocks, which another node hashes.
        """
        with self._news:
            self._begun = {each.name for each in self.layout.tensors}
            self._leaf_there = array("I", [0]) * self.layout.pieces.leaf_count
            self._blocks, self._scattered, self._due = blocks, frozenset(scattered), due
            self._block_left = {name: end - begin for name, (begin, end) in blocks.items()}
        threading.Thread(target=self._hash_leaves, name="weights-hash", daemon=True).start()

    def arrived(self, name: str, begin: int, end: int) -> None:
        """Note that a rank of this node has written a run of a tensor's bytes; call it once for each run, from any thread.

        Raises:
            LayoutError: The tensor does not have this run, or it was written before.
        """
        if name in self._blocks or name in self._scattered:
            return self.block(name, end - begin)
        with self._news:
            self._note_run(name, begin, end)
            self._count_due(end - begin)
        return None

    def block(self, name: str, nbytes: int) -> None:
        """Note bytes of a tensor that are not one run, wherever they come from.

        Raises:
            LayoutError: No such tensor comes in blocks, or more bytes came than it has.
        """
        with self._news:
            if name in self._scattered:
                return self._count_due(nbytes)
            if name not in self._blocks:
                raise LayoutError(f"no tensor {name!r} comes in blocks", tensor=name)
            self._count_due(nbytes)
            left = self._block_left[name] = self._block_left[name] - nbytes
            if left < 0:
                raise LayoutError(f"more bytes of tensor {name!r} came than it has", tensor=name)
            if not left:
                self._note_run(name, *self._blocks[name])
        return None

    def received(self, name: str, begin: int, end: int) -> None:
        """Note that a run of a tensor's bytes has come from another node. Raises what `arrived` raises."""
        with self._news:
            self._note_run(name, begin, end)

    def _count_due(self, nbytes: int) -> None:
        self._due -= nbytes
        if self._due <= 0:
            self._news.notify_all()

    def _note_run(self, name: str, begin: int, end: int) -> None:
        placed = self.layout[name] if name in self._begun else None
        if placed is None or not 0 <= begin < end <= placed.nbytes:
            raise LayoutError(f"tensor {name!r} has no bytes {begin} to {end}", tensor=name)
        for leaf in self.layout.pieces.leaves_in(placed, begin, end):
            first, last = self.layout.pieces.leaf_span(leaf)
            nbytes = min(placed.start + end, last) - max(placed.start + begin, first)
            self._leaf_there[leaf] += nbytes
            if self._leaf_there[leaf] > last - first:
                raise LayoutError(f"bytes {begin} to {end} of {name!r} came twice", tensor=name)
            if self._leaf_there[leaf] == last - first:
                self._unhashed += 1
                self._jobs.put(leaf)

    def all_written(self) -> bool:
        """Return once the hash of every byte is known; False: a rank has ended, so they won't come.

        Raises:
            BaseException: The reason why another rank stopped.
        """
        held = self.held
        while not held.wait_for(lambda: held.is_hashed, MERGING_LOOK_SECONDS):
            if self._has_stopped():
                return False
        return True

    def wait_node(self, seconds: float) -> bool:
        """Wait until all bytes of this node's ranks are written and hashed; return whether they are.

        Raises:
            BaseException: The reason why a rank of this node stopped.
        """
        with self._news:
            self._news.wait_for(lambda: self.given_up or self._is_node_there(), seconds)
            if not self.given_up:
                self._is_node_done = self._is_node_there()
                return self._is_node_done
        self._has_stopped()  # raises the reason
        return False

    def _is_node_there(self) -> bool:
        return self._due <= 0 and not self._unhashed

    def _has_stopped(self) -> bool:
        """Whether it has failed without a reason; raises the reason, if there is one."""
        if self.given_up and self._why is not None:
            raise self._why
        return self.given_up

    def why(self, seconds: float) -> BaseException | None:
        """Return why it failed, if that happens within these seconds."""
        with self._news:
            self._news.wait_for(lambda: self.given_up, seconds)
            return self._why

    @override
    def fail(self, why: BaseException | None = None) -> None:
        if not self._is_node_done:
            super().fail(why)
        self._jobs.put(None)

    def _hash_leaves(self) -> None:
        """Hash what was written, in a separate thread, so that no rank waits for it."""
        slot, held = self.slot, self.held
        try:
            while (
                not (self.given_up or held.is_complete) and (leaf := self._jobs.get()) is not None
            ):
                with slot.view_bytes(*held.pieces.leaf_span(leaf)) as content:
                    held.mark_leaf(leaf, hash_leaf(content))
                with self._news:
                    self._unhashed -= 1
                    if not self._unhashed:
                        self._news.notify_all()
        except SharedMemoryError as error:  # the pool was closed before all was hashed
            self.fail(error)
