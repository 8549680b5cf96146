"""Lent weights on every engine: a trainer's tensors, read from device to device in its own turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout_client.turn import HeldTurn, local_turn
from rollout_common.turn.lock_files import holders
from tests.support.engine.contracts import GPU, Served
from tests.support.engine.engine_kinds import EMBEDDED
from tests.support.engine.lending_trainer import read_tensors
from tests.support.engine.reference import Reference
from tests.support.engine.workers import PROMPT
from tests.support.waiting import until_sync

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def worker(worker: Served) -> Iterator[Served]:
    if worker.kind in EMBEDDED:
        pytest.skip("an embedded worker takes no turns of its own: it is handed the tensors")
    yield worker
    worker.load(1)  # other tests know weights by labels, which lent ones have not


def fall_asleep(worker: Served) -> None:
    worker.load(1)
    worker.post("sleep", level=2)
    until_sync(lambda: not holders(worker.turn_directory)[GPU], what="the worker's turn to end")


def lend(worker: Served, turn: HeldTurn, seed: int, bucket: int = 64 << 10) -> tuple[int, int]:
    """Hand the weights of a seed over to a sleeping worker; return their identity."""
    epoch, version = worker.next_version()
    given = read_tensors(worker.models.weights(seed))
    done = turn.hand_over(version, given.items(), epoch=epoch, seconds=120, bucket_bytes=bucket)
    staged = worker.state()["weights"]["staged"]
    assert (staged["phase"], staged["root_hash"]) == ("Staged", done.root_hash)
    return epoch, version


def test_lent_weights_serve_once_the_trainer_has_left_the_turn(
    worker: Served, reference: dict[int, Reference]
) -> None:
    fall_asleep(worker)
    with local_turn([GPU], worker.turn_directory, seconds=10) as turn:
        identity = lend(worker, turn, 2)
        state = worker.state()
        assert state["lifecycle"] == "Asleep"
        assert state["resident"] == {"weights": True, "kv_cache": False}
        assert holders(worker.turn_directory)[GPU] is not None
    worker.commit(*identity, in_flight="Abort")
    assert worker.post("wake").json()["lifecycle"] == "Active"
    [output] = worker.outputs(GREEDY)
    assert output["token_ids"] == reference[2].greedy(PROMPT, 8)
    # The worker has the turn now, and gives it back as any other.
    fall_asleep(worker)
    with local_turn([GPU], worker.turn_directory, seconds=10):
        pass
    worker.post("wake")


def test_a_worker_that_wakes_waits_for_the_trainer_that_lends(
    worker: Served, reference: dict[int, Reference]
) -> None:
    fall_asleep(worker)
    with local_turn([GPU], worker.turn_directory, seconds=10) as turn:
        identity = lend(worker, turn, 2)
        waking = worker.in_background(lambda: worker.post("wake", load=False))
        until_sync(lambda: worker.state()["progress"], what="it says that it waits")
        assert "lends its turn" in worker.state()["progress"]["message"]
        assert worker.state()["resident"]["kv_cache"] is False
    worker.commit(*identity, in_flight="Abort")
    assert waking.result(60).status_code == 200
    until_sync(lambda: worker.state()["lifecycle"] == "Active", what="the worker to serve")
    [output] = worker.outputs(GREEDY)
    assert output["token_ids"] == reference[2].greedy(PROMPT, 8)
