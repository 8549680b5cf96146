"""Versions as a trainer writes them: whole or not at all, readable, hashed as workers hash, pruned."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_client import AsyncRolloutPool, RolloutPool
from rollout_client.steering.spool import drain_blocking, spool_blocking, spool_tensors
from rollout_client.steering.version_folder import VersionFolder
from rollout_worker.schemas import WeightsId
from rollout_worker.sources.checkpoint_files import open_source, write_manifest
from rollout_worker.sources.source_reading import read_source

KINDS = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)


def tensors() -> dict[str, torch.Tensor]:
    """One of each kind, among them a scalar, an empty one, and one that is not contiguous."""
    torch.manual_seed(1)
    found = {f"layers.{i}.w": torch.rand(3, 5).to(kind) for i, kind in enumerate(KINDS)}
    square = torch.rand(4, 4)
    return {
        **found,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "turned": square.t(),
        "embed.weight": square,
        "lm_head.weight": square,
    }


def as_worker(folder: Path) -> str:
    """Read a version as workers do, with its manifest checked; return the root hash."""
    source = open_source(folder)
    assert source.manifest is not None
    return read_source(source, {})


@pytest.mark.parametrize(("shard_bytes", "shards"), [(1, 10), (70, 7), (2**30, 1)])
def test_workers_read_what_was_written(tmp_path: Path, shard_bytes: int, shards: int) -> None:
    root = spool_blocking(tensors(), tmp_path / "v", shard_bytes)
    assert as_worker(tmp_path / "v") == root
    assert write_manifest(tmp_path / "v") == root
    assert len(list((tmp_path / "v").glob("*.safetensors"))) == shards


class Model(torch.nn.Module):
    """A model whose head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 2)
        self.lm_head = torch.nn.Linear(2, 4, bias=False)
        self.lm_head.weight = self.embed.weight


async def streamed(found: dict[str, torch.Tensor]) -> AsyncIterator[tuple[str, torch.Tensor]]:
    for item in found.items():
        await asyncio.sleep(0)
        yield item


async def test_a_model_its_state_and_any_stream_of_it_are_the_same(tmp_path: Path) -> None:
    model = Model()
    state = model.state_dict()
    roots = {
        await spool_tensors(model, tmp_path / "a"),
        await spool_tensors(state, tmp_path / "b"),
        await spool_tensors(streamed(state), tmp_path / "c"),
        spool_blocking(iter(state.items()), tmp_path / "d", 1),
        spool_blocking([("embed.weight", model.embed.weight)], tmp_path / "e"),
    }
    assert len(roots) == 1, "a tied head may be left out"
    for wrong in (7, streamed(state)):
        with pytest.raises(TypeError, match=r"generator|AsyncRolloutPool"):
            spool_blocking(wrong, tmp_path / "f")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'extra' is a str, not a tensor"):
        spool_blocking({"extra": "text"}, tmp_path / "f")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pairs of a name and a tensor, and a Tensor came: give"):
        spool_blocking([torch.ones(3)], tmp_path / "f")  # type: ignore[list-item]
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "d", "e"]


def test_others_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        spool_blocking(tensors(), tmp_path / "runs" / "one" / "v")
    finally:
        os.umask(before)
    folder = tmp_path / "runs" / "one" / "v"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}
    made = (folder, folder.parent, folder.parent.parent)
    assert [stat.S_IMODE(each.stat().st_mode) for each in made] == [0o755] * 3


def test_all_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each flush, whether the folder has its final name, and what was flushed."""
    flushed: list[tuple[str, bool]] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{handle}"), (tmp_path / "v").exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    spool_blocking(tensors(), tmp_path / "v", 100)
    before = {Path(path).name for path, named in flushed if not named}
    assert {"manifest.json", "model.safetensors.index.json", ".v.partial"} <= before
    assert sum(name.endswith(".safetensors") for name in before) > 1
    assert [path for path, named in flushed if named] == [str(tmp_path)]


def failing(count: int, error: Exception | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    for i in range(count):
        yield f"t{i}", torch.zeros(4)
    if error is not None:
        raise error


@pytest.mark.parametrize(
    "stream",
    [
        lambda: failing(3, OSError(errno.EIO, "a rank died")),
        lambda: iter([("t", torch.zeros(1)), ("t", torch.ones(1))]),
        lambda: iter(()),
    ],
    ids=["a stream that fails", "a name that comes twice", "no tensor"],
)
def test_what_fails_leaves_nothing(
    tmp_path: Path, stream: Callable[[], Iterator[tuple[str, torch.Tensor]]]
) -> None:
    with pytest.raises((OSError, ValueError)):
        spool_blocking(stream(), tmp_path / "v", 1)
    assert os.listdir(tmp_path) == []


def test_the_other_ranks_are_never_left_waiting(tmp_path: Path) -> None:
    """A folder that can't be made: the stream is taken to its end all the same."""
    (tmp_path / "file").touch()
    stream = failing(5)
    with pytest.raises(OSError, match="file"):
        spool_blocking(stream, tmp_path / "file" / "v")
    assert list(stream) == []
    drain_blocking(stream := failing(3))
    assert list(stream) == []


@pytest.mark.parametrize(
    ("there", "keep", "why"),
    [((), 0, "keep must be 1 or more"), (("epoch-1-version-5",), 2, "has version 5 of epoch 1")],
    ids=["a setting", "a later version"],
)
async def test_nor_are_they_by_what_is_refused(
    tmp_path: Path, there: tuple[str, ...], keep: int, why: str
) -> None:
    for name in there:
        (tmp_path / name).mkdir()
    one, other = failing(5), failing(5)
    async with AsyncRolloutPool.from_urls(["http://127.0.0.1:9"]) as pool:
        pool.epoch = 1
        with pytest.raises((ValueError, FileExistsError), match=why):
            await pool.save_and_publish(one, 4, tmp_path, keep=keep)
    waits = RolloutPool.from_urls(["http://127.0.0.1:9"])
    waits.asynchronous.epoch = 1
    with waits, pytest.raises((ValueError, FileExistsError), match=why):
        waits.save_and_publish(other, 4, tmp_path, keep=keep)
    assert [*one, *other] == []
    assert tuple(os.listdir(tmp_path)) == there


BAD_SECONDS = (None, "10", 0, -1.0, math.nan, math.inf, 86401)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"transport": "mail"}, "transport must be one of"),
        ({"rate": "500M"}, "rate must be a number of bytes a second above 0, not '500M'"),
        ({"spool": ""}, "the folder of versions must have a name"),
        ({"spool": "/w", "keep": "2"}, "keep must be 1 or more, not '2'"),
        *(({"seconds": each}, "seconds must be a number above 0, at most") for each in BAD_SECONDS),
        ({"keep": 3}, "give spool, too"),
        ({"spol": "/w"}, "do you mean 'spool'"),
        ({"path": "/w"}, "only one of them"),
        ({"adapters": {}}, "adapters alone"),
        ({"version": True}, "version must be a whole number"),
    ],
)
async def test_nor_are_they_by_options_that_are_refused(options: dict[str, Any], why: str) -> None:
    one, together = failing(5), failing(5)
    async with AsyncRolloutPool.from_urls(["http://127.0.0.1:9"]) as pool:
        with pytest.raises((TypeError, ValueError), match=why):
            await pool.publish_weights(**{"version": 4, "tensors": one, **options})
        assert [*one] == []
        with pytest.raises((TypeError, ValueError), match=why):
            await pool.publish_weights(
                **{"version": 4, "tensors": together, "ranks": object(), **options}
            )
        assert len([*together]) == 5, "several ranks have not met yet"


async def test_who_is_cancelled_leaves_a_version_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while a thread is about to give the folder its name."""
    about, go_on = threading.Event(), threading.Event()
    real = os.fsync

    def fsync(handle: int) -> None:
        real(handle)
        if os.readlink(f"/proc/self/fd/{handle}").endswith(".v.partial"):
            about.set()
            assert go_on.wait(60)

    monkeypatch.setattr(os, "fsync", fsync)
    writing = asyncio.create_task(spool_tensors(tensors(), tmp_path / "v"))
    assert await asyncio.to_thread(about.wait, 60)
    writing.cancel()
    for _ in range(50):
        await asyncio.sleep(0)
    assert (tmp_path / ".v.partial" / "manifest.json").exists(), "nothing is taken from the thread"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert names(tmp_path) == {"v"}
    assert as_worker(tmp_path / "v")


def test_only_the_same_content_may_be_written_again(tmp_path: Path) -> None:
    values = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    root = spool_blocking(values, tmp_path / "v")
    written = (tmp_path / "v" / "manifest.json").read_text()
    assert spool_blocking(dict(reversed(values.items())), tmp_path / "v") == root
    for other in ({**values, "a": torch.ones(3)}, {**values, "c": torch.ones(1)}):
        with pytest.raises(FileExistsError, match="v exists with other content: publish under a "):
            spool_blocking(other, tmp_path / "v")
    assert names(tmp_path) == {"v"}
    assert (tmp_path / "v" / "manifest.json").read_text() == written


# Which versions may come, and which may go.


def version(epoch: int, number: int) -> WeightsId:
    return WeightsId(epoch=epoch, version=number)


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


@pytest.mark.parametrize(
    ("keep", "stay"),
    [
        (1, set()),
        (2, {"epoch-2-version-9"}),
        (3, {"epoch-2-version-9", "epoch-1-version-100"}),
        (9, {f"epoch-{e}-version-{v}" for e, v in ((2, 9), (1, 100), (1, 2))}),
    ],
)
def test_versions_before_the_committed_one_go(tmp_path: Path, keep: int, stay: set[str]) -> None:
    """By epoch, then version; never the committed one, a newer one, or what is not ours."""
    for e, v in ((1, 2), (1, 100), (2, 9), (2, 10), (2, 11), (3, 1)):
        (tmp_path / f"epoch-{e}-version-{v}").mkdir()
    (tmp_path / ".epoch-2-version-8.partial").mkdir()
    (tmp_path / ".epoch-2-version-12.partial").mkdir()
    foreign = {"checkpoints", "epoch-1", "epoch-1-version-2.bak", "notes.txt"}
    for name in foreign:
        (tmp_path / name).mkdir()
    VersionFolder(tmp_path, keep=keep).prune_versions(version(2, 10))
    kept = {"epoch-2-version-10", "epoch-2-version-11", "epoch-3-version-1"}
    assert names(tmp_path) == foreign | kept | {".epoch-2-version-12.partial"} | stay


def test_nobody_writes_among_the_versions_of_another_pool(tmp_path: Path) -> None:
    """Epochs begin anew with a pool: told at its first version, not at the one that both have."""
    versions = VersionFolder(tmp_path / "runs")
    versions.check_folder(version(1, 1))
    for name in ("epoch-1-version-99", ".epoch-2-version-7.partial", "epoch-2-version-5", "notes"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for fine in (version(1, 100), version(2, 6), version(3, 1)):
        versions.check_folder(fine)
    versions.check_folder(version(1, 99))  # perhaps again, with the same content
    for taken in (version(1, 1), version(1, 98), version(2, 4)):
        with pytest.raises(FileExistsError, match="publish under a new version"):
            versions.check_folder(taken)


def test_one_that_can_not_be_deleted_keeps_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2, 3, 10**20):
        (tmp_path / f"epoch-1-version-{number}").mkdir()
    (tmp_path / "epoch-1-version-4").symlink_to(tmp_path / "elsewhere")
    for folder in (tmp_path, tmp_path / "none"):
        VersionFolder(folder, keep=1).prune_versions(version(2, 1))
        assert f"old versions in {folder} were not all deleted" in caplog.text
    assert names(tmp_path) == {"epoch-1-version-4"}


def test_workers_see_a_version_where_they_mount_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "epoch-1-version-2"
    monkeypatch.chdir(tmp_path)
    assert VersionFolder("weights").mounted_path(version(1, 2)) == f"{tmp_path}/weights/{name}"
    for mount, seen in (("/rollout/weights/", f"/rollout/weights/{name}"), ("", name)):
        assert VersionFolder(tmp_path, mount).mounted_path(version(1, 2)) == seen
    assert VersionFolder(tmp_path).local_path(version(1, 2)) == tmp_path / name
