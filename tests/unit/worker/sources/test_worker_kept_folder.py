"""Files of kept versions: whole and verified, or not used; never more than two, and no failure but a warning."""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_common.transfer.held_version import VersionEnd
from rollout_common.transfer.memory.slot import Slot
from rollout_common.wire import WeightsId
from rollout_common.wire.root_hash import hash_leaf
from rollout_worker.sources.pushed import kept_folder
from rollout_worker.sources.pushed.kept_folder import _HEAD, MAGIC, KeptFolder
from rollout_worker.sources.pushed.kept_version import KeptVersion
from rollout_worker.sources.pushed.pushed_memory import Memory, OwnMemory
from tests.support.unit.pushing import Version, kept_of, tensors_of


def kept_version(number: int, version: int | None = None) -> KeptVersion:
    """A version of 2 MiB and a little, as a worker keeps it."""
    kept = kept_of(Version(number, tensors_of(2)))
    return replace(kept, identity=WeightsId(epoch=1, version=version or number))


def make_memory(nbytes: int) -> Memory:
    return OwnMemory(Slot(nbytes, private=True, expected=nbytes))


def always() -> bool:
    return True


def never() -> bool:
    return False


def restore(folder: KeptFolder) -> KeptVersion | None:
    file = folder.find_newest()
    return None if file is None else folder.read_version(file, make_memory, never)


def names(home: Path) -> list[str]:
    return sorted(each.name for each in (home / "ns.pool").iterdir() if each.name != "lock")


@pytest.fixture
def folder(tmp_path: Path) -> KeptFolder:
    return KeptFolder(tmp_path, "ns.pool")


@pytest.fixture
def file(tmp_path: Path, folder: KeptFolder) -> Path:
    """The file of a version."""
    folder.write_version(kept_version(7), always)
    (name,) = names(tmp_path)
    return tmp_path / "ns.pool" / name


def test_what_is_written_comes_back_with_its_identity_and_every_byte(folder: KeptFolder) -> None:
    kept = kept_version(7, 3)
    folder.write_version(kept, always)
    found = restore(folder)
    assert found is not None
    assert (found.identity, found.end) == (kept.identity, kept.end)
    assert found.to_view() == kept.to_view()
    assert found.held.is_complete
    assert found.held.leaf_digests(0) == kept.held.leaf_digests(0)
    size = kept.layout.nbytes
    assert found.memory.view_bytes(0, size) == kept.memory.view_bytes(0, size)
    found.release()
    assert found.memory.freed.is_set()


def test_no_other_user_may_read_it(tmp_path: Path, file: Path) -> None:
    assert (tmp_path / "ns.pool").stat().st_mode & 0o077 == 0


def test_the_newest_two_stay_and_the_one_that_was_committed_last_is_read(
    tmp_path: Path, folder: KeptFolder
) -> None:
    kepts = [kept_version(number) for number in (1, 2, 3)]
    for age, each in zip((3, 2, 1), kepts, strict=True):
        folder.write_version(each, always)
        (file,) = (tmp_path / "ns.pool").glob(f"1-{each.identity.version}-*")
        os.utime(file, (0, 1000 - age))  # clocks of files are coarse
    assert [name[:4] for name in names(tmp_path)] == ["1-2-", "1-3-"]
    (second,) = (tmp_path / "ns.pool").glob("1-2-*")
    before = second.stat()
    folder.write_version(kepts[1], always)
    assert second.stat().st_ino == before.st_ino, "it is not written twice"
    found = restore(folder)
    assert found is not None
    assert found.identity == kepts[1].identity


def test_the_same_bytes_under_a_later_version_are_another_file(
    tmp_path: Path, folder: KeptFolder
) -> None:
    for version in (1, 2):
        folder.write_version(kept_version(7, version), always)
    assert len(names(tmp_path)) == 2


def test_pools_have_folders_of_their_own(tmp_path: Path, file: Path) -> None:
    assert KeptFolder(tmp_path, "ns.other").find_newest() is None


def rewrite(file: Path, change: Callable[[bytearray], bytes | bytearray]) -> None:
    file.write_bytes(change(bytearray(file.read_bytes())))


def flip(at: int) -> Callable[[bytearray], bytearray]:
    def change(content: bytearray) -> bytearray:
        content[at] ^= 1
        return content

    return change


def describe(change: Callable[[dict[str, Any]], object]) -> Callable[[bytearray], bytes]:
    """Change the description, and its hash with it."""

    def rewritten(content: bytearray) -> bytes:
        _, size, _ = _HEAD.unpack(content[: _HEAD.size])
        body = json.loads(content[_HEAD.size : _HEAD.size + size])
        text = json.dumps(change(body) or body).encode()
        head = _HEAD.pack(MAGIC, len(text), hash_leaf(text)) + text
        start = -(-(_HEAD.size + size) // kept_folder.ALIGN) * kept_folder.ALIGN
        return head + bytes(-len(head) % kept_folder.ALIGN) + content[start:]

    return rewritten


def other_hash(body: dict[str, Any]) -> None:
    body["weights"]["root_hash"] = "xxh3_128_tree:" + "0" * 32


DAMAGES: dict[str, Callable[[bytearray], bytes | bytearray]] = {
    "empty": lambda content: b"",
    "cut in the head": lambda content: content[:20],
    "cut in the description": lambda content: content[:100],
    "cut in the bytes": lambda content: content[:-1000],
    "another kind of file": lambda content: b"safetensors" + content,
    "a bit of the head": flip(20),
    "a bit of the description": flip(60),
    "a bit of the first tensor": flip(kept_folder.ALIGN + 5),
    "a bit of the last tensor": flip(-256),
    "a huge description": lambda content: _HEAD.pack(MAGIC, 1 << 62, bytes(16)) + content,
    "a description that is no object": describe(lambda body: ["x"]),
    "no layout": describe(lambda body: {"weights": body["weights"], "layout": 3}),
    "another root hash": describe(other_hash),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_used_and_can_be_written_again(
    folder: KeptFolder, file: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(file, DAMAGES[damage])
    assert restore(folder) is None
    assert str(file) in caplog.text
    folder.write_version(kept_version(7), always)
    found = restore(folder)
    assert found is not None


def test_a_file_that_is_cut_while_it_is_read_is_not_used(folder: KeptFolder, file: Path) -> None:
    found = folder.find_newest()
    assert found is not None

    def make(nbytes: int) -> Memory:
        os.truncate(file, 1 << 20)
        return make_memory(nbytes)

    assert folder.read_version(found, make, never) is None


def test_a_version_without_memory_for_it_stays_in_its_file(folder: KeptFolder, file: Path) -> None:
    found = folder.find_newest()
    assert found is not None

    def refuse(nbytes: int) -> Memory:
        raise OSError("no room")

    assert folder.read_version(found, refuse, never) is None
    assert file.exists()


def test_a_restoring_that_is_ended_leaves_no_memory(folder: KeptFolder, file: Path) -> None:
    found = folder.find_newest()
    assert found is not None
    made: list[Memory] = []

    def make(nbytes: int) -> Memory:
        made.append(make_memory(nbytes))
        return made[0]

    assert folder.read_version(found, make, always) is None
    assert made[0].freed.is_set()


def test_writing_ends_once_a_later_version_is_kept(
    tmp_path: Path, folder: KeptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_folder, "_RUN_BYTES", 1 << 20)
    looks = itertools.count()
    folder.write_version(kept_version(7), lambda: next(looks) == 0)
    assert names(tmp_path) == []


def test_what_a_dead_writer_left_is_removed_and_a_living_one_is_waited_for(
    tmp_path: Path, folder: KeptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ns.pool").mkdir()
    (tmp_path / "ns.pool" / "1-1-x.part").write_bytes(b"half")
    monkeypatch.setattr(kept_folder, "KEEP_LOOK_SECONDS", 0.01)
    with (tmp_path / "ns.pool" / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        looks = itertools.count()
        folder.write_version(kept_version(7), lambda: next(looks) < 3)
        assert names(tmp_path) == ["1-1-x.part"]
    folder.write_version(kept_version(7), always)
    assert [name[-5:] for name in names(tmp_path)] == [".kept"]


def no_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> KeptFolder:
    return KeptFolder(home / "missing", "ns.pool")


def full_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> KeptFolder:
    full = os.statvfs_result((4096, 4096, 100, 3, 3, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    return KeptFolder(home, "ns.pool")


def no_memory(home: Path, monkeypatch: pytest.MonkeyPatch) -> KeptFolder:
    monkeypatch.setattr(kept_folder, "memory_left", lambda: (3 << 20, "the memory limit"))
    return KeptFolder(home, "ns.pool")


def full_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> KeptFolder:
    def refuse(file: int, run: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_folder, "_write_run", refuse)
    return KeptFolder(home, "ns.pool")


@pytest.mark.parametrize("make", [no_folder, full_folder, no_memory, full_disk])
def test_where_nothing_can_be_written_one_warning_says_so(
    make: Callable[[Path, pytest.MonkeyPatch], KeptFolder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = make(tmp_path, monkeypatch)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            folder.write_version(kept_version(number), always)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "--keep-folder" in caplog.text
    assert not [*tmp_path.glob("ns.pool/*.part"), *tmp_path.glob("ns.pool/*.kept")]
    assert folder.find_newest() is None


def test_hashes_of_an_early_release_are_not_kept(tmp_path: Path, folder: KeptFolder) -> None:
    kept = replace(kept_version(7), end=VersionEnd("xxh3_128:" + "0" * 32, {}))
    folder.write_version(kept, always)
    assert not (tmp_path / "ns.pool").exists()


def test_what_is_given_up_meanwhile_is_not_written(tmp_path: Path, folder: KeptFolder) -> None:
    kept = kept_version(7)
    kept.release()
    folder.write_version(kept, always)
    assert names(tmp_path) == []
