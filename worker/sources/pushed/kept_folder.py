"""Kept versions in a folder that outlives this process: a file for each, written whole or not at all, verified when read.

A file is a head, a description (JSON: identity, root hash, layout), and from the next multiple of `ALIGN` on the bytes
of the layout. Nothing in it is trusted: what was read must have the root hash that it says, and serves only if a
stage asks for that hash.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rollout_common.transfer.held_version import HeldVersion, VersionEnd
from rollout_common.transfer.layout import LayoutError, PushLayout
from rollout_common.transfer.memory.mapped_memory import SharedMemoryError
from rollout_common.transfer.memory.memory_limits import MARGIN_BYTES, memory_left
from rollout_common.wire import KeptWeights
from rollout_common.wire.root_hash import (
    TREE_SCHEME,
    HashedTensor,
    hash_leaf,
    root_hash_of,
    scheme_of,
)
from rollout_worker.engine import EngineError
from rollout_worker.settings import WorkerSettings
from rollout_worker.sources.settings import KEEP_LOOK_SECONDS, KEEP_WAIT_SECONDS

from .kept_version import KeptVersion
from .pushed_memory import Memory, TransferFailed

logger = logging.getLogger(__name__)

MAGIC = b"rollout kept 1\n\0"
ALIGN = mmap.PAGESIZE
_HEAD = struct.Struct("<16sQ16s")
"""`MAGIC`, the size of the description, and its hash."""
_RUN_BYTES = 8 << 20
_MOST_DESCRIPTION = 1 << 30
_READERS = min(8, max(2, (os.cpu_count() or 2) // 2))


class UnusableFile(Exception):
    """The file is damaged, or is not a kept version; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file that a worker has written, as its description says: nothing of that is verified."""

    path: Path
    weights: KeptWeights
    layout: object
    """As `PushLayout.from_json` takes it: for many tensors that takes a second."""
    start: int
    """Where the bytes of the layout begin."""


class KeptFolder:
    """The files of one pool on one node, the newest two at most; all of its workers there share them.

    Args:
        folder: The folder that outlives the process.
        owner: Name of the folder inside it: that of the pool.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder = folder / re.sub(r"[^\w.-]", "-", owner)
        self._has_warned = False

    @classmethod
    def of(cls, settings: WorkerSettings) -> KeptFolder | None:
        """Return the folder in which a worker keeps weights for the next one; None: it has none."""
        if settings.keep_folder is None:
            return None
        pool = f"{settings.namespace}.{settings.pool}"
        return cls(settings.keep_folder, settings.served_name if settings.pool is None else pool)

    def start_writing(self, kept: KeptVersion, is_wanted: Callable[[], bool]) -> None:
        """Write a version in a thread, unless it is there; once it is no longer wanted, that ends."""
        work = threading.Thread(
            target=self.write_version, args=(kept, is_wanted), name="weights-keep", daemon=True
        )
        work.start()

    def write_version(self, kept: KeptVersion, is_wanted: Callable[[], bool]) -> None:
        """Write a version, unless it is there or there is no room; a failure is only logged."""
        if scheme_of(kept.end.root_hash) != TREE_SCHEME:
            return  # of a trainer of an early release: no leaf of it can be verified
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with self._lock_folder(is_wanted) as is_mine, contextlib.ExitStack() as held:
                if is_mine:
                    held.callback(kept.memory.add_hold())  # not before: others may write for long
                    self._write_locked(kept, is_wanted)
        except TransferFailed:
            logger.debug("weights %s were given up before they were written", kept.identity)
        except OSError as error:
            log = logger.debug if self._has_warned else logger.warning
            self._has_warned = True
            log(
                "weights %s are not kept for the next worker: %s; give --keep-folder a folder with"
                " room for two versions that this user can write",
                kept.identity,
                error,
            )

    @contextlib.contextmanager
    def _lock_folder(self, is_wanted: Callable[[], bool]) -> Iterator[bool]:
        """Be the only writer for the block; yield False if it is no longer wanted."""
        until = time.monotonic() + KEEP_WAIT_SECONDS
        with (self._folder / "lock").open("wb") as lock:
            while not (is_mine := _try_lock(lock.fileno())) and is_wanted():
                if time.monotonic() > until:
                    raise OSError("other workers have written there for too long")
                time.sleep(KEEP_LOOK_SECONDS)
            yield is_mine

    def _write_locked(self, kept: KeptVersion, is_wanted: Callable[[], bool]) -> None:
        name = re.sub(
            r"\W", "-", f"{kept.identity.epoch}-{kept.identity.version}-{kept.end.root_hash}"
        )
        path = self._folder / f"{name}.kept"
        for part in self._folder.glob("*.part"):
            part.unlink()  # its writer is dead: it would have the lock
        if path.exists():
            os.utime(path)  # so that it is the newest
            return
        for former in self._newest_first()[1:]:
            former.unlink(missing_ok=True)
        head = _describe_version(kept)
        self._check_room(len(head) + kept.layout.nbytes, kept.layout.nbytes)
        part = path.with_suffix(".part")
        try:
            with part.open("xb", buffering=0) as file:
                if _write_whole(file.fileno(), head, kept, is_wanted):
                    part.rename(path)
        finally:
            part.unlink(missing_ok=True)

    def _check_room(self, nbytes: int, staged: int) -> None:
        """Refuse what the folder has no room for, or what would take the memory of the next version."""
        found = os.statvfs(self._folder)
        if nbytes > (free := found.f_bavail * found.f_frsize):
            raise OSError(f"{nbytes} bytes don't fit into the {free} that are free there")
        left, what = memory_left() or (nbytes + staged + MARGIN_BYTES, "")
        if nbytes + staged + MARGIN_BYTES > left:
            raise OSError(f"{left} bytes of {what} are left for a copy and the next version")

    def _newest_first(self) -> list[Path]:
        found = []
        for path in self._folder.glob("*.kept"):
            with contextlib.suppress(FileNotFoundError):  # another worker has just removed it
                found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found, reverse=True)]

    def find_newest(self) -> KeptFile | None:
        """Return the version that a worker of this pool committed last on this node, as far as one can be read."""
        try:
            for path in self._newest_first():
                try:
                    return _open_file(path)
                except UnusableFile as error:
                    _remove_file(path, error)
                except OSError as error:
                    logger.warning("%s is not used: %s", path, error)
        except OSError as error:
            logger.warning("no weights of a former worker are read: %s", error)
        return None

    def read_version(
        self,
        file: KeptFile,
        make_memory: Callable[[int], Memory],
        cancelled: Callable[[], bool],
    ) -> KeptVersion | None:
        """Copy a version into memory of this process and verify it; None, with a warning, if that fails."""
        try:
            layout = PushLayout.from_json(file.layout)
            return _read_version(file, layout, make_memory(layout.nbytes), cancelled)
        except (UnusableFile, LayoutError) as error:
            _remove_file(file.path, error)
        except (OSError, EngineError, SharedMemoryError) as error:
            logger.warning("%s is not used: %s", file.path, error)
        except Exception:  # the worker goes on without it: there may be other copies
            logger.exception("%s is not used", file.path)
        return None


def _remove_file(path: Path, why: Exception) -> None:
    """Remove a damaged file, so that the next commit of its version writes it again."""
    logger.warning("%s is removed: %s", path, why)
    with contextlib.suppress(OSError):
        path.unlink()


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _describe_version(kept: KeptVersion) -> bytes:
    """Return all that comes before the bytes of the layout."""
    body = {"weights": kept.to_view().model_dump(), "layout": kept.layout.to_json()}
    text = json.dumps(body).encode()
    head = _HEAD.pack(MAGIC, len(text), hash_leaf(text)) + text
    return head + bytes(-len(head) % ALIGN)


def _write_whole(file: int, head: bytes, kept: KeptVersion, is_wanted: Callable[[], bool]) -> bool:
    """Write a file; return False if it is no longer wanted."""
    _write_run(file, memoryview(head))
    for begin in range(0, kept.layout.nbytes, _RUN_BYTES):
        if not is_wanted():
            return False
        end = min(begin + _RUN_BYTES, kept.layout.nbytes)
        with kept.memory.view_bytes(begin, end) as run:
            _write_run(file, run)
    return True


def _write_run(file: int, run: memoryview) -> None:
    done = 0
    while done < len(run):
        with run[done:] as rest:
            done += os.write(file, rest)


def _open_file(path: Path) -> KeptFile:
    """Return what a file says of itself."""
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise UnusableFile("it has no head")
        magic, size, digest = _HEAD.unpack(head)
        if magic != MAGIC or size > _MOST_DESCRIPTION:
            raise UnusableFile("it was not written by this release")
        text = file.read(size)
    if hash_leaf(text) != digest:
        raise UnusableFile("its description is damaged")
    try:
        body = json.loads(text)
        weights, layout = KeptWeights(**body["weights"]), body["layout"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableFile(f"its description is not valid: {error}") from error
    return KeptFile(path, weights, layout, -(-(_HEAD.size + size) // ALIGN) * ALIGN)


def _read_version(
    file: KeptFile, layout: PushLayout, memory: Memory, cancelled: Callable[[], bool]
) -> KeptVersion | None:
    release, held = memory.add_hold(), HeldVersion(layout, memory.view_bytes)
    try:
        with (
            file.path.open("rb") as opened,
            ThreadPoolExecutor(_READERS, "weights-keep") as threads,
        ):

            def read_piece(piece: int) -> None:
                if not cancelled():
                    _read_piece(opened.fileno(), file.start, held, piece)

            for _ in threads.map(read_piece, range(len(held.pieces))):
                pass
        if cancelled():
            release()
            return None
        digests, tensors = held.tensor_digests(), layout.tensors
        hashed = {t.name: HashedTensor(t.dtype, t.shape, digests[t.name]) for t in tensors}
        if (root := root_hash_of(hashed)) != file.weights.root_hash:
            raise UnusableFile(f"its bytes have root_hash {root}, it says {file.weights.root_hash}")
        held.finish(VersionEnd(root, digests))
        memory.note_verified(root)
    except BaseException:
        release()
        raise
    assert held.end is not None
    return KeptVersion(file.weights.identity, held, memory, held.end, release)


def _read_piece(file: int, start: int, held: HeldVersion, piece: int) -> None:
    """Read one piece to its place, which is not mapped from the file: another process may cut that off."""
    begin, end = held.pieces.span(piece)
    with held.read_bytes(begin, end) as place:
        done = 0
        while done < len(place):
            with place[done:] as rest:
                count = os.preadv(file, [rest], start + begin + done)
            if not count:
                raise UnusableFile("it ends too early")
            done += count
        held.mark_piece(piece, held.pieces.hash_leaves(piece, place))
