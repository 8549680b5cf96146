"""Staged weights as an engine's own process holds them: mapped before the commit that reads them.

Where there is a GPU their pages are locked, too, so that the copy in the pause goes at the bus's speed;
that takes its time, and is done in a thread, beside the steps. Runs in the processes of vLLM and SGLang,
which the worker tells when a version is staged and when it is over (`ranks`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rollout_common.transfer.arena import to_be_read
from rollout_common.transfer.locked import current_context, lock

from .ranks import LOCKED, MAPPED
from .read_watch import AbsentTensor
from .sinks import read_index, slot_path
from .tensor_views import TensorPlace, view_memory, view_tensors

logger = logging.getLogger(__name__)

COPIED_TENSOR_BYTES = 1 << 20
"""Up to here a tensor of locked memory is copied before it is loaded.

All ranks share that memory, and loaders change small tensors in place (SGLang 0.5.23: Gemma's norms).
"""

LockPages = Callable[..., Callable[[], None] | None]
"""As `locked.lock`."""

_mappings: list[RankMapping] = []


def sink_path(where: Mapping[str, Any]) -> str:
    """Return where this process finds a sink: by its `path`, or by its `slot` on this node."""
    return slot_path(where["slot"]) if where.get("slot") else str(where["path"])


def begin_mapping(
    where: Mapping[str, Any], size: int, tally: tuple[str, str], *, borrowed: bool, gpu: bool
) -> None:
    """Begin to map a sink; returns at once.

    Args:
        where: As in its ticket.
        size: Its bytes; in a gang the head's.
        tally: Path and first words of a file that gets one byte more once it is there.
        borrowed: It is somebody else's, to be read only.
        gpu: The calling thread computes on one.
    """
    close_mappings(where)
    for each in [each for each in _mappings if not each.is_current]:
        _close_mapping(each)  # nobody has told us that it is over
    path = sink_path(where)
    _mappings.append(
        RankMapping(path, _local_size(path, where, size), tally, borrowed=borrowed, gpu=gpu)
    )


def find_mapping(where: Mapping[str, Any]) -> RankMapping | None:
    """Return a sink that is held by now; None: read it as if nobody had told us of it."""
    path = sink_path(where)
    return next(
        (each for each in _mappings if each.path == path and each.is_current and each.is_ready),
        None,
    )


def close_mappings(where: Mapping[str, Any]) -> None:
    """Hold a sink no longer; returns at once, its pages are unlocked in a thread."""
    path = sink_path(where)
    for each in [each for each in _mappings if each.path == path]:
        _close_mapping(each)


def read_tensors(ticket: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what a sink has, named by its `MappedSink.make_ticket`; mapped now, unless it is held.

    In a gang that is what this node's slot has. In the place of any other tensor comes `AbsentTensor`.
    """
    sink = json.loads(ticket)
    handle = os.open(sink_path(sink), os.O_RDONLY)
    try:
        places = sink["tensors"]
        starts = read_index(handle) if sink.get("slot") else {name: at for name, _, _, at in places}
        there = [(*what, starts[what[0]]) for *what, _ in places if what[0] in starts]
        mapping = find_mapping(sink)
        if mapping is None:
            memory = mmap.mmap(
                handle, _local_size(handle, sink, sink["size"]), flags=mmap.MAP_PRIVATE
            )
            found = view_memory(memory, there)
        else:
            found = mapping.read_views(there)
    finally:
        os.close(handle)
    return _restore_order(places, starts, found)


def open_memory(sink: Mapping[str, Any]) -> tuple[Tensor, dict[str, int], bool]:
    """Return all bytes of a sink, [n] uint8, where each tensor begins that is here, and whether pages are locked.

    Args:
        sink: What its `MappedSink.make_ticket` says.
    """
    handle = os.open(sink_path(sink), os.O_RDONLY)
    try:
        starts = (
            dict(read_index(handle))
            if sink.get("slot")
            else {name: at for name, _, _, at in sink["tensors"]}
        )
        mapping = find_mapping(sink)
        if mapping is not None:
            return mapping.whole, starts, mapping.is_locked
        memory = mmap.mmap(handle, _local_size(handle, sink, sink["size"]), flags=mmap.MAP_PRIVATE)
        return torch.frombuffer(memory, dtype=torch.uint8), starts, False
    finally:
        os.close(handle)


def _restore_order(
    places: Iterable[TensorPlace], there: Collection[str], found: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what was found in its place among all."""
    for name, dtype, shape, _ in places:
        yield (
            next(found) if name in there else (name, AbsentTensor.stand_in_for(name, dtype, shape))
        )


def is_partial(ticket: str) -> bool:
    """Whether a sink lacks tensors here that its ticket names."""
    sink = json.loads(ticket)
    if not sink.get("slot"):
        return False
    handle = os.open(sink_path(sink), os.O_RDONLY)
    try:
        return not {name for name, *_ in sink["tensors"]} <= read_index(handle).keys()
    finally:
        os.close(handle)


def _local_size(where: int | str, sink: Mapping[str, Any], told: int) -> int:
    """Return how much of a sink is here: in a gang each node may have another part of it."""
    return os.stat(where).st_size if sink.get("slot") else told


def check_unchanged(where: Mapping[str, Any]) -> None:
    """Refuse what was loaded from a sink if that was changed meanwhile; see `RankMapping.check_unchanged`."""
    mapping = find_mapping(where)
    if mapping is not None:
        mapping.check_unchanged()


def _close_mapping(mapping: RankMapping) -> None:
    _mappings.remove(mapping)
    mapping.close()


class RankMapping:
    """One sink's memory in this process; see `map_ahead`."""

    def __init__(
        self,
        path: str,
        size: int,
        tally: tuple[str, str],
        *,
        borrowed: bool,
        gpu: bool,
        locker: LockPages = lock,
        context: int | None = None,
    ) -> None:
        self.path, self._size, self._borrowed, self._locker = path, size, borrowed, locker
        self._context = (context or current_context()) if gpu else None
        self._state = threading.Lock()
        self._closed = False
        self._unlock: Callable[[], None] | None = None
        self._whole: Tensor | None = None
        self._version = 0
        self.closing: list[threading.Thread] = []
        """What still unlocks pages."""
        handle = os.open(path, os.O_RDONLY if borrowed or self._context is None else os.O_RDWR)
        self._identity = _file_identity(handle)
        self._thread = threading.Thread(
            target=self._map_in_thread, args=(handle, tally), name="rollout-hold", daemon=True
        )
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether its path still leads to this memory: numbers of descriptors are used again."""
        try:
            return _file_identity(self.path) == self._identity
        except OSError:
            return False

    @property
    def is_ready(self) -> bool:
        """Whether it is mapped, and locked where it can be."""
        return self._whole is not None

    @property
    def is_locked(self) -> bool:
        """Whether a GPU reads it by itself."""
        return self._unlock is not None

    @property
    def whole(self) -> Tensor:
        """All of its bytes, [n] uint8."""
        assert self._whole is not None, "asked for once it is ready"
        return self._whole

    def read_views(self, places: Iterable[TensorPlace]) -> Iterator[tuple[str, Tensor]]:
        """Yield what is there by name: views, which keep the memory."""
        assert self._whole is not None, "asked for once it is ready"
        with torch.inference_mode(mode=False):  # in which nobody would count changes of a view
            found = list(view_tensors(self._whole, places))
        for name, tensor in found:
            small = self.is_locked and tensor.nbytes <= COPIED_TENSOR_BYTES
            yield name, tensor.clone() if small else tensor

    def check_unchanged(self) -> None:
        """Refuse what was made of it if somebody has changed it meanwhile: other ranks read it, too.

        Raises:
            RuntimeError: somebody has.
        """
        if self.is_locked and self._whole is not None and self._whole._version != self._version:
            raise RuntimeError(
                "the model's loader changed staged weights in place, which all ranks read: this"
                " model can't be updated from page-locked memory"
            )

    def close(self) -> None:
        """Let go of it."""
        with self._state:
            self._closed = True
            whole, self._whole = self._whole, None
            unlock, self._unlock = self._unlock, None
        if unlock is not None:
            self.closing = [
                threading.Thread(target=_unlock_pages, args=(unlock, whole), daemon=True)
            ]
            self.closing[0].start()

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until it is ready, or never will be."""
        self._thread.join(seconds)

    def _map_in_thread(self, handle: int, tally: tuple[str, str]) -> None:
        try:
            self._map_pages(handle)
        except Exception:  # slower, but not wrong: the commit maps it itself
            logger.exception("staged weights could not be mapped ahead of their commit")
        finally:
            os.close(handle)
            _mark_tally(tally, LOCKED if self.is_locked else MAPPED)

    def _map_pages(self, handle: int) -> None:
        unlock = None
        if self._context is not None:
            # Its own pages, not copies of them, as those of a private mapping would become.
            memory = _map_memory(handle, self._size, mmap.MAP_SHARED, writable=not self._borrowed)
            pages = -(-self._size // mmap.PAGESIZE) * mmap.PAGESIZE
            begin = ctypes.addressof(memory)
            unlock = self._locker(begin, pages, readable=self._borrowed, context=self._context)
        if unlock is None:
            memory = _map_memory(handle, self._size, mmap.MAP_PRIVATE, writable=True)
            to_be_read(memory)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        with self._state:
            self._version = whole._version
            if not self._closed:
                self._unlock, self._whole = unlock, whole
                return
        if unlock is not None:
            _unlock_pages(unlock, whole)


def _unlock_pages(unlock: Callable[[], None], whole: Tensor | None) -> None:
    """Unlock pages; `whole` keeps them until then."""
    unlock()
    del whole


def _map_memory(handle: int, size: int, kind: int, *, writable: bool) -> Any:
    """Map memory; the mapping goes with the last view of what is returned, in a thread.

    Python's own go while all other threads stand still, which takes its time for gigabytes.
    """
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    call = _load_libc().mmap
    call.restype = ctypes.c_void_p
    address = call(None, ctypes.c_size_t(size), prot, kind, handle, ctypes.c_long(0))
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _unmap_in_thread, address, size).atexit = False
    return memory


def _unmap_in_thread(address: int, size: int) -> None:
    def work() -> None:
        _load_libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))

    threading.Thread(target=work, name="rollout-unmap", daemon=True).start()


def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _file_identity(where: int | str) -> tuple[int, int]:
    found = os.stat(where)
    return found.st_dev, found.st_ino


def _mark_tally(tally: tuple[str, str], how: bytes) -> None:
    """Add this byte to a file, if it is the one that is meant: on another node the path leads elsewhere."""
    path, words = tally
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            return
        with open(path, "rb") as file:
            if file.read(len(words)) != words.encode():
                return
        with open(path, "ab", buffering=0) as file:
            file.write(how)
