"""A worker of a real engine that is killed and started again serves what its node has kept, from no other replica."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from safetensors.torch import load_file

from rollout_client import AsyncRolloutPool, DirectOptions
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import Command, command, ports_of
from tests.support.waiting import until_sync


def kept_of(worker: Command) -> dict[str, object]:
    state: dict[str, object] | None = None

    def has() -> bool:
        nonlocal state
        state = worker.state()["weights"]["kept"]
        return state is not None

    until_sync(has, 30, what="kept weights")
    assert state is not None
    return state


async def test_a_killed_worker_serves_the_committed_pushed_weights_again(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    model = tiny_models.model(1)
    (tmp_path / "kept").mkdir()
    flags = ["--keep-folder", str(tmp_path / "kept"), "--weights-port", "0"]
    with command(model, tmp_path, *flags) as worker:
        direct = DirectOptions(in_flight="Abort")
        async with AsyncRolloutPool.from_urls(**ports_of([worker]), direct=direct) as pool:
            tensors = load_file(Path(tiny_models.weights(2)) / "model.safetensors")
            await pool.publish_weights(1, tensors=tensors)
        made, kept = worker.sample()["token_ids"], kept_of(worker)
        until_sync(lambda: [*tmp_path.glob("kept/*/*.kept")], 30, what="the file")
        worker.process.kill()
    with command(model, tmp_path, *flags) as worker:
        assert kept_of(worker) == kept
        assert worker.sample()["token_ids"] != made, "the checkpoint's, until it is told otherwise"
        until_sync(lambda: _stage(worker, kept) == "Staged", 30, what="the stage")
        worker.commit(int(str(kept["epoch"])), int(str(kept["version"])))
        assert worker.sample()["token_ids"] == made
        assert re.search("kept again", "".join(str(line) for line in worker.logged()))


def _stage(worker: Command, kept: dict[str, object]) -> str:
    """Stage as an operator does, with a peer that gives nothing."""
    nobody = {"host": "127.0.0.1", "port": 1, "ticket": "0" * 32}
    named = {name: kept[name] for name in ("epoch", "version", "root_hash")}
    answer: httpx.Response = worker.post(
        "weights/stage", **named, source={"pushed": {"peers": [nobody]}}
    )
    assert answer.status_code == 202, answer.text
    return str(answer.json()["phase"])
