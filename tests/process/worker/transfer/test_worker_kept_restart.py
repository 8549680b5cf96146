"""A worker that starts where another one has kept pushed weights: it has them at once, and serves what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_common.wire import CHECKPOINT, KeptWeights, OfferRequest, WeightsId
from rollout_worker.sources.pushed.kept_folder import KeptFolder
from rollout_worker.sources.pushed.pushed_memory import Memory
from tests.support.unit.arrows import ROOM, serves
from tests.support.unit.pushing import Version, kept_of, publish, pushed_worker
from tests.support.unit.tiny_worker import TinyWorker, refused
from tests.support.waiting import until, until_sync

NOBODY = {"pushed": {"peers": [{"host": "127.0.0.1", "port": 1, "ticket": "0" * 32}]}}
"""A peer that gives nothing."""


@contextlib.asynccontextmanager
async def keeping_worker(home: Path, name: str, *flags: str) -> AsyncIterator[TinyWorker]:
    (home / "kept").mkdir(exist_ok=True)
    (home / name).mkdir()
    keep = ("--keep-folder", str(home / "kept"), "--served-name", "tiny")
    async with pushed_worker(home / name, *ROOM, *keep, *flags) as worker:
        yield worker


async def leave_version(home: Path, kind: str = "tcp") -> Version:
    """A worker commits (1, 1), writes it down and ends; returns the version."""
    version = Version(7)
    async with keeping_worker(home, "former") as worker:
        await publish(worker, 1, version, kind)
        await until(lambda: [*home.glob("kept/tiny/*.kept")], what="the file")
    return version


async def kept_by(worker: TinyWorker) -> KeptWeights | None:
    await until(lambda: worker.updates.pushes.restoring is None, what="the end of reading")
    return worker.updates.to_view().kept


def memory_of(worker: TinyWorker) -> Memory:
    kept = worker.updates.pushes.kept
    assert kept is not None
    return kept.memory


@pytest.mark.parametrize(("kind", "engine"), [("tcp", "hf"), ("unix", "hf"), ("tcp", "vllm")])
async def test_a_new_process_serves_what_the_former_one_kept_without_anybody_else(
    tmp_path: Path, kind: str, engine: str
) -> None:
    """Private memory for hf; that of other engines is shared with their processes."""
    version = await leave_version(tmp_path, kind)
    async with keeping_worker(tmp_path, "next", "--engine", engine) as worker:
        kept = await kept_by(worker)
        assert kept is not None
        assert (kept.epoch, kept.version, kept.root_hash) == (1, 1, version.root_hash)
        assert worker.active == CHECKPOINT, "nobody has told it to serve them"
        memory = memory_of(worker)
        assert (memory.handle is None) == (engine == "hf")
        staged = await worker.stage(1, 0, source=NOBODY, root_hash=version.root_hash)
        assert (staged.phase, staged.error) == ("Staged", None)
        await worker.commit(1)
        await serves(worker, 7)
        assert memory_of(worker) is memory, "nothing was copied"
        worker.runtime.report_crash("the test ended it")
        await worker.is_replaced()
        await serves(worker, 7)
        await publish(worker, 2, Version(8))
        await serves(worker, 8)
        await until(lambda: memory.freed.is_set(), what="that memory")


async def test_a_peer_fetches_from_it_before_it_serves(tmp_path: Path) -> None:
    version = await leave_version(tmp_path)
    (tmp_path / "other").mkdir()
    async with (
        keeping_worker(tmp_path, "next") as worker,
        pushed_worker(tmp_path / "other", *ROOM) as other,
    ):
        await kept_by(worker)
        offer = worker.updates.offer_weights("me", OfferRequest(epoch=1, version=1))
        peer = {"host": "127.0.0.1", "port": offer.port, "ticket": offer.ticket}
        source = {"pushed": {"peers": [peer]}}
        staged = await other.stage(1, 0, source=source, root_hash=version.root_hash)
        assert (staged.phase, staged.error) == ("Staged", None)
        await other.commit(1)
        await serves(other, 7)


@pytest.mark.parametrize("asked", ["other content", "later", "unknown content"])
async def test_it_never_stages_what_it_was_not_asked_for(tmp_path: Path, asked: str) -> None:
    version = await leave_version(tmp_path)
    fields = {"root_hash": version.root_hash if asked == "later" else Version(9).root_hash}
    if asked == "unknown content":
        fields = {}
    async with keeping_worker(tmp_path, "next") as worker:
        await kept_by(worker)
        staged = await worker.stage(2 if asked == "later" else 1, 0, source=NOBODY, **fields)
        assert staged.phase == "Failed"
        assert "no peer could give the weights" in str(staged.error)
        staged = await worker.stage(1, 0, source=NOBODY, root_hash=version.root_hash)
        assert staged.phase == "Staged", "that stays possible"


async def test_a_stage_of_it_that_is_discarded_leaves_it_kept(tmp_path: Path) -> None:
    version = await leave_version(tmp_path)
    async with keeping_worker(tmp_path, "next") as worker:
        await kept_by(worker)
        await worker.stage(1, 0, source=NOBODY, root_hash=version.root_hash)
        async with worker.updates.slot_lock:
            await worker.updates.clear_slot()
        staged = await worker.stage(1, 0, source=NOBODY, root_hash=version.root_hash)
        assert (staged.phase, staged.error) == ("Staged", None)
        await worker.commit(1)
        await serves(worker, 7)


async def test_another_models_file_is_refused_by_the_stage(tmp_path: Path) -> None:
    version = Version(7, {"number": ("U8", (4,)), "rest": ("U8", (1,))})
    kept = replace(kept_of(version), identity=WeightsId(epoch=1, version=1))
    (tmp_path / "kept").mkdir()
    KeptFolder(tmp_path / "kept", "tiny").write_version(kept, lambda: True)
    async with keeping_worker(tmp_path, "next") as worker:
        assert await kept_by(worker) is not None
        staged = await worker.stage(1, 0, source=NOBODY, root_hash=version.root_hash)
        assert staged.phase == "Failed"
        assert worker.updates.slot is not None


async def test_the_first_commit_of_others_ends_what_is_kept(tmp_path: Path) -> None:
    await leave_version(tmp_path)
    async with keeping_worker(tmp_path, "next") as worker:
        assert await kept_by(worker) is not None
        await worker.update(2, 5)
        assert worker.updates.to_view().kept is None
        await serves(worker, 5)


async def test_what_is_still_read_is_reported_not_offered_and_gives_way_to_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await leave_version(tmp_path)
    goes_on, read = threading.Event(), KeptFolder.read_version

    def wait_and_read(self: KeptFolder, *given: object) -> object:
        assert goes_on.wait(30)
        return read(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(KeptFolder, "read_version", wait_and_read)
    async with keeping_worker(tmp_path, "next") as worker:
        await until(lambda: worker.updates.to_view().kept is not None, what="the report")
        kept = worker.updates.to_view().kept
        assert kept is not None
        assert kept.root_hash == version.root_hash
        with refused("no-copy") as caught:
            worker.updates.offer_weights("me", OfferRequest(epoch=1, version=1))
        assert "still reads" in str(caught.value)
        await worker.update(2, 5)
        assert worker.updates.to_view().kept is None
        goes_on.set()
        await asyncio.sleep(0.1)
        assert worker.updates.pushes.kept is None


async def test_no_commit_waits_for_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, begun = threading.Event(), threading.Event()

    def hang(self: KeptFolder, *given: object) -> None:
        begun.set()
        assert goes_on.wait(30)

    monkeypatch.setattr(KeptFolder, "write_version", hang)
    async with keeping_worker(tmp_path, "hangs") as worker:
        for number in (7, 8):
            await publish(worker, number, Version(number))
            await serves(worker, number)
        await until(begun.is_set, what="the writer")
        await asyncio.wait_for(worker.updates.wait_until_freed(), 5)
        goes_on.set()


async def test_without_a_folder_that_can_be_used_it_serves_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = ("--keep-folder", str(tmp_path / "missing"))
    async with pushed_worker(tmp_path / "a", *ROOM, *missing) as worker:
        await publish(worker, 1, Version(7))
        await serves(worker, 7)
        await until(lambda: "--keep-folder" in caplog.text, what="the warning")


WRITER = """
import os, signal, sys
from pathlib import Path
from rollout_worker.sources.pushed import kept_folder
from tests.support.unit.pushing import Version, kept_of, tensors_of

looks = 0

def is_wanted():
    global looks
    looks += 1
    if looks == 3:
        print("half", flush=True)
        signal.pause()
    return True

kept_folder._RUN_BYTES = 1 << 20
kept_folder.KeptFolder(Path(sys.argv[1]), "tiny").write_version(kept_of(Version(7, tensors_of(4))), is_wanted)
"""


def test_a_writer_that_is_killed_in_the_middle_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"half\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait(30)
    writer.stdout.close()
    folder = KeptFolder(tmp_path, "tiny")
    assert [*tmp_path.glob("tiny/*.part")]
    assert folder.find_newest() is None
    folder.write_version(kept_of(Version(8)), lambda: True)
    assert not [*tmp_path.glob("tiny/*.part")]
    until_sync(lambda: folder.find_newest() is not None, what="the next one")
