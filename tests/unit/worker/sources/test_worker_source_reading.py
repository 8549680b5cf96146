"""Versions read by several threads: the same root hash for any of them, and no thread left once it ends."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout_common.garbage_collection import without_garbage_collection
from rollout_common.wire.root_hash import LEAF_BYTES, HashedTensor, root_hash_of
from rollout_worker.engine import TensorEntry, WeightsRejected
from rollout_worker.sources.checkpoint_files import open_source, write_manifest
from rollout_worker.sources.source_reading import (
    ReadableSource,
    ReadCancelled,
    ReadLeaf,
    copy_leaf,
    read_source,
)
from rollout_worker.sources.tensor_bytes import TensorSource
from tests.support.unit.digests import tensor_digest, write_whole_manifest
from tests.support.unit.pushing import Version, kept_of

SIZES = (0, 1, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 5 * LEAF_BYTES + 77)
CONTENT = {f"t{i}": random.Random(i).randbytes(size) for i, size in enumerate(SIZES)}
LAST = f"t{len(SIZES) - 1}"
PLAIN = {name: ("U8", (len(each),), each) for name, each in CONTENT.items()}
ROOT = root_hash_of(
    {name: HashedTensor("U8", (len(each),), tensor_digest(each)) for name, each in CONTENT.items()}
)
THREADS = (1, 2, 5)


class Sink:
    """Buffers for the tensors that are wanted; checks that each is full before the next one is asked for."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.wanted = wanted
        self.held: dict[str, bytearray] = {}
        self.views: list[memoryview] = []

    def allocate(self, entry: TensorEntry) -> memoryview | None:
        for name, each in self.held.items():
            assert bytes(each) == CONTENT[name], "the next buffer is asked for before this is full"
        for view in self.views:
            with pytest.raises(ValueError, match="released"):
                len(view)
        if not self.wanted:
            return None
        self.held[entry.name] = bytearray(entry.spec.nbytes)
        self.views.append(memoryview(self.held[entry.name]))
        return self.views[-1]


def torch_tensors() -> dict[str, torch.Tensor]:
    return {
        name: torch.frombuffer(bytearray(each), dtype=torch.uint8)
        if each
        else torch.zeros(0).byte()
        for name, each in CONTENT.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("weights")
    save_file(torch_tensors(), made / "model.safetensors")
    return made


def read(
    source: ReadableSource,
    sink: Sink | None = None,
    *,
    threads: int = 3,
    expected: str | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> str:
    allocate = (sink or Sink(wanted=False)).allocate
    return read_source(source, {}, allocate, report, cancelled, expected=expected, threads=threads)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("wanted", [True, False], ids=["copied", "hashed only"])
@pytest.mark.parametrize("kind", ["files", "tensors", "pushed"])
def test_files_tensors_and_pushed_bytes_have_one_root_hash_for_any_number_of_threads(
    folder: Path, kind: str, threads: int, *, wanted: bool
) -> None:
    kept = kept_of(Version.of(PLAIN))
    sources: dict[str, ReadableSource] = {
        "files": open_source(folder),
        "tensors": TensorSource(torch_tensors()),
        "pushed": kept,
    }
    sink, seen = Sink(wanted=wanted), list[tuple[int, int]]()

    def report(done: int, total: int) -> None:
        seen.append((done, total))

    assert read(sources[kind], sink, threads=threads, report=report) == ROOT
    assert sink.held == (CONTENT if wanted else {})
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == ((0, sum(SIZES)), (sum(SIZES), sum(SIZES)))
    kept.release()


def test_leaves_that_come_in_another_order_change_nothing(folder: Path) -> None:
    class Shuffled(TensorSource):
        def open_tensor(
            self, entry: TensorEntry, cancelled: Callable[[], bool]
        ) -> contextlib.AbstractContextManager[ReadLeaf]:
            def read_leaf(begin: int, end: int, part: memoryview | None) -> memoryview:
                time.sleep(random.Random(begin).random() / 100)
                content = memoryview(CONTENT[entry.name])[begin:end]
                return content if part is None else copy_leaf(content, part)

            return contextlib.nullcontext(read_leaf)

    sink = Sink()
    assert read(Shuffled(torch_tensors()), sink, threads=4) == ROOT
    assert sink.held == CONTENT


@pytest.mark.parametrize("of_manifest", [True, False], ids=["manifest", "none"])
def test_what_an_earlier_release_published_is_read_in_its_scheme(
    tmp_path: Path, *, of_manifest: bool
) -> None:
    save_file(torch_tensors(), tmp_path / "model.safetensors")
    old = write_whole_manifest(tmp_path, PLAIN)
    if not of_manifest:
        (tmp_path / "manifest.json").unlink()
    source, sink = open_source(tmp_path), Sink()
    assert read(source) == (old if of_manifest else ROOT)
    assert read(source, expected=old) == old
    assert read(source, sink, expected=ROOT) == ROOT, "both are computed"
    assert sink.held == CONTENT
    assert read(source, expected=old[:-1] + "x") == old, "the caller compares it"
    assert write_manifest(tmp_path) == read(open_source(tmp_path)) == ROOT
    assert read(open_source(tmp_path), expected=old) == old
    assert json.loads((tmp_path / "manifest.json").read_text())["tensors"][LAST] == {
        "xxh3_128_tree": tensor_digest(CONTENT[LAST])
    }


@pytest.mark.parametrize("scheme", ["xxh3_128", "xxh3_128_tree"])
@pytest.mark.parametrize("expected", [None, "xxh3_128:0", "xxh3_128_tree:0"])
def test_a_bit_flipped_in_the_last_leaf_is_found_and_the_tensor_named(
    tmp_path: Path, scheme: str, expected: str | None
) -> None:
    save_file(torch_tensors(), tmp_path / "model.safetensors")
    root = write_whole_manifest(tmp_path, PLAIN)
    if scheme == "xxh3_128_tree":
        root = write_manifest(tmp_path)
    assert root.startswith(f"{scheme}:")
    file = tmp_path / "model.safetensors"
    content = bytearray(file.read_bytes())
    place = open_source(tmp_path).places[LAST]
    content[place.offset + SIZES[-1] - 1] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        WeightsRejected, match=f"{LAST!r} .* has {scheme} .* manifest says"
    ) as caught:
        read(open_source(tmp_path), expected=expected)
    assert caught.value.tensor == LAST


class Faulty(TensorSource):
    """A source one of whose leaves fails while other threads read; notes who reads when it has ended."""

    def __init__(self, fail: Callable[[int], None]) -> None:
        super().__init__({"t5": torch_tensors()[LAST]})
        self.__dict__.update(fail=fail, reading=0, lock=threading.Lock())

    def open_tensor(
        self, entry: TensorEntry, cancelled: Callable[[], bool]
    ) -> contextlib.AbstractContextManager[ReadLeaf]:
        this = self.__dict__

        def read_leaf(begin: int, end: int, part: memoryview | None) -> memoryview:
            with this["lock"]:
                this["reading"] += 1
            try:
                this["fail"](begin // LEAF_BYTES)
                assert part is not None
                time.sleep(0.05)
                return copy_leaf(memoryview(CONTENT[entry.name])[begin:end], part)
            finally:
                with this["lock"]:
                    this["reading"] -= 1

        return contextlib.nullcontext(read_leaf)


@pytest.mark.parametrize("threads", THREADS)
def test_an_error_in_one_thread_ends_the_others_before_it_is_raised(threads: int) -> None:
    begun: list[int] = []

    def fail(leaf: int) -> None:
        begun.append(leaf)
        if leaf == 1:
            raise WeightsRejected("the disk is gone", tensor="t5")

    sink, source, before = Sink(), Faulty(fail), threading.active_count()
    with pytest.raises(WeightsRejected, match="the disk is gone"):
        read(source, sink, threads=threads)
    assert source.__dict__["reading"] == 0
    assert threading.active_count() == before
    assert len(begun) <= threads + 1, "nobody begins another leaf"
    with pytest.raises(ValueError, match="released"):
        len(sink.views[0])


@pytest.mark.parametrize("threads", THREADS)
def test_a_cancelled_read_ends_with_all_its_threads(threads: int) -> None:
    cancel = threading.Event()

    def fail(leaf: int) -> None:
        if leaf == 1:
            cancel.set()

    sink, source, before = Sink(), Faulty(fail), threading.active_count()
    with pytest.raises(ReadCancelled):
        read(source, sink, threads=threads, cancelled=cancel.is_set)
    assert (source.__dict__["reading"], threading.active_count()) == (0, before)


def test_a_copy_lets_go_of_where_it_came_from() -> None:
    source, target = b"123456789", bytearray(9)
    content, part = memoryview(source), memoryview(target)
    assert copy_leaf(content, part) is part
    assert target == source
    with pytest.raises(ValueError, match="released"):
        len(content)


@pytest.mark.parametrize("fails", [False, True], ids=["read", "failed"])
def test_nothing_keeps_the_sink_without_the_garbage_collector(*, fails: bool) -> None:
    """Gigabytes would wait for it."""

    class Keeping(Faulty):
        def open_tensor(
            self, entry: TensorEntry, cancelled: Callable[[], bool]
        ) -> contextlib.AbstractContextManager[ReadLeaf]:
            self.__dict__["cancelled"] = cancelled
            return super().open_tensor(entry, cancelled)

    def fail(leaf: int) -> None:
        if fails and leaf == 2:
            raise WeightsRejected("the disk is gone")

    sink, source = Sink(), Keeping(fail)
    kept = weakref.ref(sink)
    with without_garbage_collection():
        with pytest.raises(WeightsRejected) if fails else contextlib.nullcontext():
            read(source, sink)
        del sink
        assert kept() is None
