"""Ranks of one trainer that write their shards side by side: one memory, one outcome for all."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_client.steering.plain_tensors import spec_of
from rollout_common.wire.root_hash import HashedTensor, root_hash_of
from rollout_worker.updates import pushed_weights
from tests.support.unit import rank_publish
from tests.support.unit.digests import tensor_digest
from tests.support.unit.ranks import Rank, ranks
from tests.support.unit.receiver import Receiver
from tests.support.unit.scripted_control import scripted_controls
from tests.support.unit.served import served
from tests.support.waiting import until

Told = dict[int, dict[str, Any]]


class Story:
    """The ranks of a trainer, as processes."""

    def __init__(self, folder: Path, ranks: list[Rank]) -> None:
        self.folder, self.ranks = folder, ranks

    def told(self, rank: int) -> Told:
        """What came of each version on a rank."""
        file = self.folder / f"told-{rank}"
        lines = file.read_text().splitlines() if file.exists() else []
        return {told["version"]: told for told in map(json.loads, lines)}

    async def tells(self, rank: int, version: int) -> dict[str, Any]:
        """Wait for what a version came to on a rank."""
        await until(
            lambda: version in self.told(rank) or self.ranks[rank].status() is not None,
            120,
            what=f"version {version} on rank {rank}",
        )
        found = self.told(rank)
        assert version in found, self.ranks[rank].said
        return found[version]


@contextlib.asynccontextmanager
async def story(name: str, count: int, folder: Path) -> AsyncIterator[Story]:
    """Run ranks that publish to a scripted replica."""
    async with scripted_controls(1) as (control,):
        receiver = Receiver("w0:8000", folder)
        control.transfer, control.phase = receiver.transfer, "Staging"
        own = rank_publish.state(1, count)
        control.dtypes = {name: spec_of(name, tensor)[1] for name, tensor in own.items()}
        places = control.member.url, str(control.member.control_url)
        if name == "untold":
            places = "http://127.0.0.1:1", "http://127.0.0.1:2"
        try:
            with ranks(rank_publish.main, count, folder, name, *places) as started:
                yield Story(folder, started)
        finally:
            receiver.close()


def root_of(values: dict[str, torch.Tensor]) -> str:
    hashed = {}
    for name, value in values.items():
        whole = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        _, dtype, shape = spec_of(name, value)
        hashed[name] = HashedTensor(dtype, shape, tensor_digest(whole))
    return root_hash_of(hashed)


async def test_ranks_write_side_by_side_and_have_one_outcome(tmp_path: Path) -> None:
    async with story("together", 4, tmp_path) as trainer:
        # In the first publish each rank is on a node of its own; then two slots, used in turn; and once
        # more after failures; and in a wider dtype, which is cast.
        for version in (1, 2, 3, 4, 8, 9):
            for rank in range(4):
                told = await trainer.tells(rank, version)
                assert told.get("root") == root_of(rank_publish.state(version, 4)), told
                assert sorted(told["gathered"]) == sorted(rank_publish.GATHERED)
                assert told["bytes"]
        errors = {
            version: [trainer.told(rank)[version]["error"] for rank in range(4)]
            for version in (5, 6, 7)
        }
        assert all("'even' has no plain values" in each for each in errors[5]), errors
        assert errors[5][1].startswith("LayoutError: ")
        assert errors[5][0].startswith("PublishFailed: rank 1: ")
        assert all("tensor 'plain' is I64" in each for each in errors[6]), errors
        assert all("'even': the ranks' shards don't make it whole" in each for each in errors[7])
        for rank in range(3):
            told = await trainer.tells(rank, 10)
            assert "rank 3 is gone" in told["error"]
            assert told["seconds"] < 20


async def test_a_rank_that_stands_still_fails_all_and_is_met_anew(tmp_path: Path) -> None:
    async with story("frozen", 2, tmp_path) as trainer:
        told = await trainer.tells(0, 2)
        assert "their tensors did not all come" in told["error"], told
        assert told["seconds"] < 20, told
        trainer.ranks[1].send(signal.SIGCONT)
        late = await trainer.tells(1, 2)
        assert late["error"].startswith("PublishFailed: rank 0 of the group")
        for rank in range(2):
            told = await trainer.tells(rank, 3)
            assert told.get("root") == root_of(rank_publish.state(3, 2)), told
        told = await trainer.tells(1, 4)
        assert told["error"].startswith("PublishFailed: rank 0 of the group is gone")
        assert told["seconds"] < 20
        assert trainer.ranks[0].status(10) == -signal.SIGKILL
        told = await trainer.tells(1, 5)
        assert told["error"].startswith("PublishFailed: the ranks of the group can't meet"), told


async def test_ranks_that_publish_on_while_one_is_late_meet_with_the_others(tmp_path: Path) -> None:
    """Late is first a rank of rank 0's node, then one of the other node."""
    async with story("late", 4, tmp_path) as trainer:
        for version in (1, 2, 3):
            for rank in range(4):
                told = await trainer.tells(rank, version)
                assert told.get("root") == root_of(rank_publish.state(version, 4)), told
                assert told["seconds"] < 20


async def test_each_node_serves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushed_weights, "check_layout", lambda *_, where: None)
    ways = ("--weights-port", "0", "--weights-socket", str(tmp_path / "weights.sock"))
    async with served(tmp_path / "worker", *ways, "--weights-roots", str(tmp_path)) as worker:
        places = f"http://127.0.0.1:{worker.data}", f"http://127.0.0.1:{worker.control}"
        with ranks(rank_publish.main, 4, tmp_path, "afar", *places) as started:
            trainer = Story(tmp_path, started)
            sent: dict[int, int] = {}
            for version in (1, 2, 3, 4, 5):
                expected = root_of(rank_publish.served_state(version))
                for rank in range(4):
                    told = await trainer.tells(rank, version)
                    assert told.get("root") == expected, told
                sent[version] = told["sent"]
                assert worker.tiny.engine.active.number == version
            whole = told["bytes"]
            # Rank 0 sends the pieces of its node, and those that neither node has all of.
            assert whole * 0.4 < sent[1] < whole * 0.65, (sent, whole)
            assert sent[2] < whole * 0.1, "deltas"
            assert sent[3] == 0, "shared memory"
            written: dict[str, torch.Tensor] = {}
            for file in (tmp_path / "spool").rglob("*.safetensors"):
                written |= load_file(file)
            assert root_of(written) == root_of(rank_publish.served_state(4))
            assert told["seconds"] > 0.8 * whole / rank_publish.AFAR_RATE, "of both nodes together"
            for rank in range(3):
                told = await trainer.tells(rank, 6)
                assert "rank 3 is gone" in told["error"], told
                assert told["seconds"] < 20


async def test_shards_are_gathered_one_by_one_and_a_failure_leaves_no_rank_waiting(
    tmp_path: Path,
) -> None:
    async with story("gathered", 4, tmp_path) as trainer:
        whole = rank_publish.state(1, 4)
        del whole["last only"]
        assert (await trainer.tells(0, 1)).get("root") == root_of(whole)
        assert "LayoutError: tensor 'columns' has no plain" in (await trainer.tells(0, 2))["error"]
        for rank in range(1, 4):
            for version in (1, 2):
                assert sorted((await trainer.tells(rank, version))["taken"]) == sorted(whole)


async def test_ranks_do_not_wait_for_one_that_nobody_tells_what_to_cast(tmp_path: Path) -> None:
    async with story("untold", 2, tmp_path) as trainer:
        for rank in range(2):
            told = await trainer.tells(rank, 1)
            assert "no worker describes the checkpoint" in told["error"], told
            assert told["seconds"] < 20
