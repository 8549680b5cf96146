"""Root hashes that earlier releases published: staged, committed, loaded again, and refused if wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollout_worker.engine import WeightsRejected
from tests.support.unit.digests import whole_root_hash, write_whole_manifest
from tests.support.unit.pushing import Version, pushed_worker, ticket, trainer
from tests.support.unit.tiny_engine import write_weights
from tests.support.unit.tiny_worker import TinyWorker, refused

SEVEN = {"number": ("U8", (1,), b"\7"), "rest": ("U8", (1,), b"\0")}
OLD = whole_root_hash(SEVEN)


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[TinyWorker]:
    async with pushed_worker(tmp_path / "a") as made:
        yield made


async def test_what_is_expected_in_their_scheme_is_found_in_it(worker: TinyWorker) -> None:
    staged = await worker.stage(1, 7, root_hash=OLD)
    assert (staged.phase, staged.root_hash) == ("Staged", OLD)
    assert (await worker.stage(1, 7, root_hash=OLD)).phase == "Staged", "repeated"
    await worker.commit(1, root_hash=OLD)
    sink = await worker.updates.refill_active()
    sink.close()
    active = worker.updates.active
    assert active is not None
    assert active.root_hash == OLD


async def test_changed_bytes_are_not_loaded_again(worker: TinyWorker) -> None:
    await worker.stage(1, 7, root_hash=OLD)
    await worker.commit(1)
    path = worker.updates.source.path
    assert path is not None
    write_weights(Path(path), 8)
    with pytest.raises(WeightsRejected, match=f"has root_hash xxh3_128:.* they had {OLD}"):
        await worker.updates.refill_active()


async def test_a_wrong_one_is_refused(worker: TinyWorker) -> None:
    staged = await worker.stage(1, 8, root_hash=OLD)
    assert (staged.phase, staged.slug) == ("Failed", "content-mismatch")
    assert "its source has xxh3_128:" in (staged.error or "").replace("root_hash ", "")


async def test_a_push_is_compared_in_both_schemes(worker: TinyWorker) -> None:
    for number, word in ((7, "Staged"), (8, "Failed")):
        transfer = await ticket(worker, number, root_hash=OLD)
        with trainer(transfer, Version(number), "unix") as end:
            end.whole(transfer)
        slot = worker.slot
        assert slot.task is not None
        await slot.task
        assert slot.to_view().phase == word
    with refused("not-staged"):
        await worker.commit(8)


async def test_a_folder_with_their_manifest_has_their_root_hash(
    worker: TinyWorker, tmp_path: Path
) -> None:
    folder = write_weights(tmp_path / "seven", 7)
    assert write_whole_manifest(folder, SEVEN) == OLD
    staged = await worker.begin_stage(1, 7, source={"path": str(folder)})
    slot = worker.slot
    assert slot.task is not None
    await slot.task
    assert (staged.phase, slot.to_view().root_hash) == ("Staging", OLD)
