"""Reads a version from any source into the buffers of a sink, hashed by several threads leaf by leaf.

A source is read tensor by tensor. The threads take its leaves (`rollout_common.wire.root_hash`) in order; each thread
copies one leaf to its place and hashes it while it is in the processor's cache. A hash in the scheme of earlier
releases needs a tensor's bytes in order, so one thread reads everything then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rollout_common.wire.root_hash import (
    DIGEST_BYTES,
    LEAF_BYTES,
    TREE_SCHEME,
    WHOLE_SCHEME,
    TensorHasher,
    combine_leaves,
    hash_leaf,
    leaf_spans,
    scheme_of,
)
from rollout_worker.engine import TensorEntry, WeightsRejected
from rollout_worker.weights import check_tied_weights, compute_root_hash

from .settings import HASHING_THREADS

Allocate = Callable[[TensorEntry], memoryview | None]
"""As `Sink.allocate`."""

Report = Callable[[int, int], None]
"""Takes (bytes done, bytes in all); a reading thread calls it, one call at a time."""

ReadLeaf = Callable[[int, int, memoryview | None], memoryview]
"""Takes begin and end of a leaf in its tensor, and its part of the sink's buffer, if there is one. Fills that part and
returns it; without one, returns a view of the bytes. Several threads call it; each releases the view that it gets."""


class ReadCancelled(Exception):
    """The caller's `cancelled` returned True; nothing was kept."""


@dataclass(frozen=True, slots=True)
class ContentHashes:
    """The hashes of a version in one scheme: the digest of each tensor by name, and the root hash."""

    digests: Mapping[str, str]
    root_hash: str


class ReadableSource:
    """A version whose bytes can be read, from files, a sender or this process.

    Unless its class says otherwise, all of its bytes are read and hashed, and compared with no promise.
    """

    __slots__ = ()

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Its tensors, in the order of their names."""
        raise NotImplementedError

    @property
    def bytes_total(self) -> int:
        """Bytes of all tensors that are read."""
        skipped = self.skipped_names
        return sum(each.spec.nbytes for each in self.entries if each.name not in skipped)

    @property
    def skipped_names(self) -> frozenset[str]:
        """Names of the tensors whose bytes aren't read, since this worker does not need them."""
        return frozenset()

    @property
    def promised_scheme(self) -> str | None:
        """The scheme of the hashes that `check_promise` compares; None: it takes any scheme, or compares nothing."""
        return None

    def promised_hashes(self) -> Mapping[str, str]:
        """Return the hashes of the skipped tensors, as the sender reports them; wait for the report.

        The root hash includes them, so a wrong one makes a root hash that differs from all other workers'.
        """
        return {}

    def open_tensor(
        self, entry: TensorEntry, cancelled: Callable[[], bool]
    ) -> AbstractContextManager[ReadLeaf]:
        """Return what reads the tensor's leaves, in any order.

        A source that waits for its bytes stops once `cancelled` returns True.
        """
        raise NotImplementedError

    def verified_digest(self, name: str, leaf: int) -> bytes | None:
        """Return the verified hash of a tensor's leaf; None: the caller has to hash the leaf."""
        return None

    def note_digest(self, name: str, leaf: int, digest: bytes) -> None:
        """Note the hash of a leaf; several threads call it."""

    def check_promise(self, found: Mapping[str, ContentHashes]) -> None:
        """Refuse content that differs from the promised hashes, once everything is read; `found`: by scheme.

        Raises:
            WeightsRejected: names the tensor.
        """


def read_source(
    source: ReadableSource,
    tied: Mapping[str, str],
    allocate: Allocate = lambda entry: None,
    report: Report = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    expected: str | None = None,
    threads: int = HASHING_THREADS,
) -> str:
    """Read all tensors that aren't left out into the buffers of `allocate`, check ties and promises.

    Return the root hash of the whole version, in the scheme of `expected`, or else in the source's. It blocks, so call it
    in a thread. Once it has returned or raised, no thread reads or writes any more.

    Args:
        source: What to read.
        tied: As `WeightsLayout.tied`.
        allocate: As `Sink.allocate`; called by the reading threads, never by two at once.
        report: Gets the progress.
        cancelled: Called between leaves.
        expected: The root hash that the caller compares the result with, if it has one.
        threads: Most threads that read and hash.

    Raises:
        WeightsRejected: a file changed or ended early, a hash differs.
        ReadCancelled: `cancelled` returned True.
    """
    promised = source.promised_scheme
    main = scheme_of(expected) if expected is not None else promised or TREE_SCHEME
    schemes = frozenset((main, promised or main))
    read = hash_tensors(source, allocate, report, cancelled, schemes, threads)
    return _check_content(source, tied, read, main)


def _check_content(
    source: ReadableSource, tied: Mapping[str, str], read: dict[str, dict[str, str]], main: str
) -> str:
    """Check ties and promises; return the root hash. `read`: digests by scheme and name, `main`: the wanted scheme."""
    if left_out := source.promised_hashes():  # of one scheme, so only one root hash is possible
        main = source.promised_scheme or main
        read = {main: {**read[main], **left_out}} if main in read else {}
    check_tied_weights(tied, read.get(main, {}))
    found = {
        scheme: ContentHashes(digests, compute_root_hash(source.entries, digests, scheme))
        for scheme, digests in read.items()
    }
    source.check_promise(found)
    return found[main].root_hash


def hash_tensors(
    source: ReadableSource,
    allocate: Allocate = lambda entry: None,
    report: Report = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
    schemes: frozenset[str] = frozenset((TREE_SCHEME,)),
    threads: int = HASHING_THREADS,
) -> dict[str, dict[str, str]]:
    """Read all tensors that aren't left out; return their digests by scheme and name; arguments as for `read_source`."""
    reading = _Reading(source, allocate, report, cancelled, schemes)
    reading.run(1 if WHOLE_SCHEME in schemes else threads)
    return reading.digests


def copy_leaf(content: memoryview, part: memoryview) -> memoryview:
    """Copy bytes to `part`, release the view of `content`, and return `part`.

    The copy releases the interpreter's lock, which an assignment of views would keep.
    """
    import numpy as np

    with content:
        np.copyto(np.frombuffer(part, np.uint8), np.frombuffer(content, np.uint8))
    return part


class _OpenTensor:
    """A tensor that is being read: its reader, its buffer, and the hashes of its leaves."""

    def __init__(
        self,
        source: ReadableSource,
        entry: TensorEntry,
        read: ReadLeaf,
        view: memoryview | None,
        schemes: frozenset[str],
        held: contextlib.ExitStack,
    ) -> None:
        self._source = source
        self.entry, self.read, self.view, self.held = entry, read, view, held
        self.spans: Iterator[tuple[int, int]] = leaf_spans(entry.spec.nbytes)
        self.left = entry.spec.nbytes
        """Bytes that are not hashed yet."""
        count = -(-entry.spec.nbytes // LEAF_BYTES) if TREE_SCHEME in schemes else 0
        self._leaves = bytearray(DIGEST_BYTES * count)
        self._whole = TensorHasher(WHOLE_SCHEME) if WHOLE_SCHEME in schemes else None

    def bring_leaf(self, begin: int, end: int) -> None:
        """Read a leaf and hash it. Views of it are released at once: a traceback would hold on to them."""
        with contextlib.ExitStack() as parts:
            place = None if self.view is None else parts.enter_context(self.view[begin:end])
            content = parts.enter_context(self.read(begin, end, place))
            if self._leaves:
                leaf = begin // LEAF_BYTES
                self._leaves[leaf * DIGEST_BYTES : (leaf + 1) * DIGEST_BYTES] = self._hash(
                    leaf, content
                )
            if self._whole is not None:
                self._whole.update(content)

    def _hash(self, leaf: int, content: memoryview) -> bytes:
        name = self.entry.name
        # Bytes that were copied are hashed in their new place, which is in the cache.
        known = self._source.verified_digest(name, leaf) if self.view is None else None
        if known is not None:
            return known
        digest = hash_leaf(content)
        self._source.note_digest(name, leaf, digest)
        return digest

    def digest(self, scheme: str) -> str:
        """Return the tensor's digest, once all of its leaves are hashed."""
        if scheme == WHOLE_SCHEME and self._whole is not None:
            return self._whole.hexdigest()
        return combine_leaves(self._leaves)


class _Reading:
    """One pass over a source by several threads; the first error ends all of them."""

    def __init__(
        self,
        source: ReadableSource,
        allocate: Allocate,
        report: Report,
        cancelled: Callable[[], bool],
        schemes: frozenset[str],
    ) -> None:
        self._source, self._allocate, self._report = source, allocate, report
        self._cancelled, self._schemes = cancelled, schemes
        self._failed = failed = threading.Event()
        # Sources keep this function, so it must not refer to this object, which holds the sink.
        self._given_up = lambda: failed.is_set() or cancelled()
        self.digests: dict[str, dict[str, str]] = {scheme: {} for scheme in schemes}
        self._state = threading.Condition()
        self._entries = iter(source.entries)
        self._current: _OpenTensor | None = None
        """The tensor whose leaves are taken."""
        self._open: set[_OpenTensor] = set()
        self._error: BaseException | None = None
        self._done, self._total = 0, source.bytes_total

    def run(self, threads: int) -> None:
        """Read everything with this thread and `threads - 1` others; return once all of them have ended."""
        self._report(0, self._total)
        helpers: list[threading.Thread] = []
        try:
            for _ in range(min(threads, -(-self._total // LEAF_BYTES)) - 1):
                helper = threading.Thread(
                    target=self._take_leaves, name="weights-hash", daemon=True
                )
                helper.start()
                helpers.append(helper)
            self._take_leaves()
        except BaseException as error:  # noqa: BLE001 - raised below
            self._fail(error)
        finally:
            for helper in helpers:
                helper.join()  # each checks between leaves whether another one failed
            for tensor in self._open:
                tensor.held.close()
        why, self._error = self._error, None
        if why is not None:
            try:
                raise why
            finally:
                del why  # its traceback has this frame: the cycle would keep the sink's memory

    def _take_leaves(self) -> None:
        try:
            while (taken := self._next_leaf()) is not None:
                tensor, begin, end = taken
                tensor.bring_leaf(begin, end)
                self._note_leaf(tensor, end - begin)
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._state:
            self._error = self._error or error
            self._failed.set()
            self._state.notify_all()

    def _next_leaf(self) -> tuple[_OpenTensor, int, int] | None:
        """Return the next leaf in order; None: there is none, or another thread failed."""
        with self._state:
            while self._error is None:
                if self._cancelled():
                    raise ReadCancelled
                if self._current is not None:
                    if (span := next(self._current.spans, None)) is not None:
                        return self._current, *span
                    if self._current.view is not None and self._current.left:
                        # A sink gives the next buffer once this one is filled. The thread that fills it notifies, or fails.
                        self._state.wait()
                        continue
                if (entry := next(self._entries, None)) is None:
                    return None
                self._current = self._open_tensor(entry)
            return None

    def _open_tensor(self, entry: TensorEntry) -> _OpenTensor | None:
        """Allocate a tensor's buffer and open it; None: its bytes are left out."""
        held = contextlib.ExitStack()
        with held:
            if (view := self._allocate(entry)) is not None:
                held.enter_context(view)
            if entry.name in self._source.skipped_names:
                if view is not None:  # never serve bytes that no thread has written
                    why = f"the bytes of tensor {entry.name!r} are left out, but the engine needs them"
                    raise WeightsRejected(why, tensor=entry.name)
                return None
            read = held.enter_context(self._source.open_tensor(entry, self._given_up))
            tensor = _OpenTensor(self._source, entry, read, view, self._schemes, held.pop_all())
        self._open.add(tensor)
        if not entry.spec.nbytes:
            self._close_tensor(tensor)
        return tensor

    def _note_leaf(self, tensor: _OpenTensor, count: int) -> None:
        with self._state:
            tensor.left -= count
            self._done += count
            if not tensor.left:
                self._close_tensor(tensor)
                self._state.notify_all()
            self._report(self._done, self._total)

    def _close_tensor(self, tensor: _OpenTensor) -> None:
        self._open.discard(tensor)
        tensor.held.close()
        for scheme, digests in self.digests.items():
            digests[tensor.entry.name] = tensor.digest(scheme)
