"""Staged weights in an engine's own process: mapped before the commit that reads them.

A thread does it while the engine steps. This runs in the processes of vLLM and SGLang; the worker calls them when a
version is staged and when its memory goes (`ranks`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rollout_common.transfer.memory.mapped_memory import map_all_pages

from .sinks import read_index, slot_path
from .tensor_views import AbsentTensor, view_tensors

logger = logging.getLogger(__name__)

_mappings: list[RankMapping] = []


def sink_path(where: Mapping[str, Any]) -> str:
    """Return the path of a sink in this process: its `path`, or that of its `slot` on this node."""
    return slot_path(where["slot"]) if where.get("slot") else str(where["path"])


def begin_mapping(where: Mapping[str, Any], size: int, tally: tuple[str, str]) -> None:
    """Begin to map a sink of `size` bytes (in a gang the head's); returns at once.

    `where`: as in its ticket. `tally`: path and first words of a file that gets one more byte once the sink is mapped.
    """
    path = sink_path(where)
    # A sink that is not current was closed without a call of `close_mappings`.
    _close_all(each for each in _mappings if each.path == path or not each.is_current)
    _mappings.append(RankMapping(path, _local_size(path, where, size), tally))


def find_mapped(where: Mapping[str, Any]) -> Tensor | None:
    """Return the bytes of a sink, [n] uint8, if they are mapped; None: map the sink now."""
    path = sink_path(where)
    found = (each.memory for each in _mappings if each.path == path and each.is_current)
    return next((memory for memory in found if memory is not None), None)


def close_mappings(where: Mapping[str, Any]) -> None:
    """Drop the mappings of a sink; a thread unmaps them once the last view is gone."""
    path = sink_path(where)
    _close_all(each for each in _mappings if each.path == path)


def _close_all(mappings: Iterable[RankMapping]) -> None:
    for each in list(mappings):
        _mappings.remove(each)
        each.close()


def read_tensors(sink: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a sink, given what its `MappedSink.make_ticket` says; maps it unless it is mapped.

    In a gang these are the tensors of this node's slot; for any other an `AbsentTensor` is yielded.
    """
    places = sink["tensors"]
    whole, starts = open_memory(sink)
    there = [(*what, starts[what[0]]) for *what, _ in places if what[0] in starts]
    found = view_tensors(whole, there)
    return (
        next(found) if name in starts else (name, AbsentTensor.stand_in_for(name, dtype, shape))
        for name, dtype, shape, _ in places
    )


def open_memory(sink: Mapping[str, Any]) -> tuple[Tensor, dict[str, int]]:
    """Return a sink's bytes ([n] uint8), and where each tensor on this node begins.

    `sink`: as in its `MappedSink.make_ticket`.
    """
    handle = os.open(sink_path(sink), os.O_RDONLY)
    try:
        in_gang = bool(sink.get("slot"))
        starts = read_index(handle) if in_gang else {name: at for name, *_, at in sink["tensors"]}
        mapped = find_mapped(sink)
        if mapped is not None:
            return mapped, starts
        memory = mmap.mmap(handle, _local_size(handle, sink, sink["size"]), flags=mmap.MAP_PRIVATE)
        return torch.frombuffer(memory, dtype=torch.uint8), starts
    finally:
        os.close(handle)


def is_partial(sink: Mapping[str, Any]) -> bool:
    """Whether this node's part of a sink lacks tensors that its ticket names."""
    if not sink.get("slot"):
        return False
    handle = os.open(sink_path(sink), os.O_RDONLY)
    try:
        return not {name for name, *_ in sink["tensors"]} <= read_index(handle).keys()
    finally:
        os.close(handle)


def _local_size(where: int | str, sink: Mapping[str, Any], size: int) -> int:
    """Return the size of a sink on this node: in a gang each node may have another part of it."""
    return os.stat(where).st_size if sink.get("slot") else size


class RankMapping:
    """One sink's memory in this process, mapped by a thread of its own.

    A page that the engine's loader writes to becomes this process's own: what other ranks read stays as it is.
    `memory`: all of its bytes, [n] uint8, once it is mapped; a view keeps them.
    """

    def __init__(self, path: str, size: int, tally: tuple[str, str]) -> None:
        self.path, self._size = path, size
        self._state = threading.Lock()
        self._closed = False
        self.memory: Tensor | None = None
        handle = os.open(path, os.O_RDONLY)
        self._identity = _file_identity(handle)
        self._thread = threading.Thread(
            target=self._map_in_thread, args=(handle, tally), name="rollout-hold", daemon=True
        )
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether its path still leads to this memory: the system uses numbers of descriptors again."""
        try:
            return _file_identity(self.path) == self._identity
        except OSError:
            return False

    def close(self) -> None:
        """Drop the memory."""
        with self._state:
            self._closed, self.memory = True, None

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
            _mark_tally(tally)

    def _map_pages(self, handle: int) -> None:
        memory = _map_memory(handle, self._size)
        map_all_pages(memory)
        with self._state:
            if not self._closed:
                self.memory = torch.frombuffer(memory, dtype=torch.uint8)


def _map_memory(handle: int, size: int) -> Any:
    """Map memory; a thread unmaps it once the last view of what is returned is gone.

    Python's own mmap unmaps under the GIL, so that gigabytes stop all other threads for long.
    """
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    address = call(None, ctypes.c_size_t(size), prot, mmap.MAP_PRIVATE, handle, ctypes.c_long(0))
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _unmap_in_thread, address, size).atexit = False
    return memory


def _unmap_in_thread(address: int, size: int) -> None:
    threading.Thread(
        target=ctypes.CDLL(None).munmap,
        args=(ctypes.c_void_p(address), ctypes.c_size_t(size)),
        name="rollout-unmap",
        daemon=True,
    ).start()


def _file_identity(where: int | str) -> tuple[int, int]:
    found = os.stat(where)
    return found.st_dev, found.st_ino


def _mark_tally(tally: tuple[str, str]) -> None:
    """Add a byte to the tally, if its path leads there: on another node it leads to something else."""
    path, words = tally
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            return
        with open(path, "rb") as file:
            if file.read(len(words)) != words.encode():
                return
        with open(path, "ab", buffering=0) as file:
            file.write(b"M")
