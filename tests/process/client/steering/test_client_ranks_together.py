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
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rollout_client.steering.pushing.push_tensors import spec_of
from rollout_client.steering.pushing.shards.shard_plan import Offer, TensorPart, share_out
from rollout_client.steering.pushing.shards.tensor_boxes import rows_of, run_of
from rollout_common.transfer.layout import LayoutError
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
async def story(name: str, count: int, folder: Path, nodes: str = "one") -> AsyncIterator[Story]:
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
            with ranks(rank_publish.main, count, folder, name, nodes, *places) as started:
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


@pytest.mark.parametrize("nodes", ["one", "two"])
async def test_ranks_write_side_by_side_and_have_one_outcome(tmp_path: Path, nodes: str) -> None:
    async with story("together", 4, tmp_path, nodes) as trainer:
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


async def test_ranks_that_publish_on_while_one_is_late_meet_with_the_others(tmp_path: Path) -> None:
    """Late is first a rank of rank 0's node, then one of the other node."""
    async with story("late", 4, tmp_path, "two") as trainer:
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
        with ranks(rank_publish.main, 4, tmp_path, "afar", "two", *places) as started:
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


async def test_ranks_do_not_wait_for_one_that_nobody_tells_what_to_cast(tmp_path: Path) -> None:
    async with story("untold", 2, tmp_path) as trainer:
        for rank in range(2):
            told = await trainer.tells(rank, 1)
            assert "no worker describes the checkpoint" in told["error"], told
            assert told["seconds"] < 20


# Who writes what.


def parts(name: str, size: int, *runs: tuple[int, int] | None) -> dict[int, Offer]:
    """By rank: what it has of one tensor of bytes."""
    boxes = [None if run is None else (run,) for run in runs]
    return {rank: {TensorPart("U8", (size,), box): (name,)} for rank, box in enumerate(boxes)}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 3))
def test_each_byte_is_written_once_however_it_is_cut_and_replicated(
    cuts: list[int], copies: int
) -> None:
    ends = [sum(cuts[: index + 1]) for index in range(len(cuts))]
    runs = [(end - cut, end) if cut else None for cut, end in zip(cuts, ends, strict=True)]
    plan = share_out(parts("a", ends[-1], *(runs * copies)))
    [share] = plan.shares
    assert sorted(share.boxes.values()) == [(run,) for run in runs if run is not None]
    assert sum(plan.nbytes.values()) == ends[-1]


def test_replicated_tensors_are_spread_over_the_ranks() -> None:
    offer: Offer = {TensorPart("U8", (8,), ((0, 8),)): tuple(map(str, range(6)))}
    assert share_out(dict.fromkeys(range(3), offer)).nbytes == {0: 16, 1: 16, 2: 16}


@pytest.mark.parametrize(
    "runs", [[(0, 4), (5, 8)], [(0, 5), (4, 8)], [(0, 7), None], [(1, 8)], [None], [(0, 4), (2, 6)]]
)
def test_shards_that_make_no_whole_are_refused_by_name(runs: list[tuple[int, int] | None]) -> None:
    with pytest.raises(LayoutError, match="'a': the ranks' shards don't make it whole"):
        share_out(parts("a", 8, *runs))


def test_ranks_that_mean_different_tensors_are_refused_by_name() -> None:
    other: Offer = {TensorPart("U8", (9,), None): ("a",)}
    with pytest.raises(LayoutError, match=r"tensor 'a' is U8 \[9\] on rank 1 and U8 \[8\]"):
        share_out({**parts("a", 8, (0, 8)), 1: other})


def test_a_box_is_a_run_of_bytes_if_only_rows_are_cut() -> None:
    spec = ("a", "F32", (4, 3))
    assert run_of(spec, ((1, 3), (0, 3))) == (12, 36)
    assert run_of(spec, ((1, 3), (0, 2))) is None
    assert run_of(spec, ((2, 3), (1, 3))) == (28, 36)
    assert rows_of(spec, ((2, 3), (1, 3))) is None
    assert run_of(("a", "F32", ()), ()) == (0, 4)
