"""vLLM over two nodes: the same tokens as on one, updates that all ranks take, and deaths seen by both.

Both nodes are this machine; tests/process/worker/gang/test_worker_gang.py has everything that needs no engine.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from rollout_client import DirectOptions, RolloutPool
from rollout_client.steering.pushing.routes import Transport
from tests.support.engine.engine_kinds import KINDS, left_out
from tests.support.engine.gangs import PP2, Gang, gang
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, ports_of
from tests.support.waiting import until_sync

KIND = KINDS["vllm"]
EXIT_GANG = 3
SEEN_SECONDS = 10
"""Within which a death is seen; ending what is left takes a few more."""
END_SECONDS = 15

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(left_out(KIND) is not None, reason=str(left_out(KIND))),
]


@pytest.fixture(scope="module")
def both(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    with gang(KIND, tiny_models.model(1), tmp_path_factory.mktemp("gang")) as both:
        yield both


@pytest.fixture
def fresh(tiny_models: TinyModels, tmp_path: Path) -> Iterator[Gang]:
    """A gang that a test may break."""
    with gang(KIND, tiny_models.model(1), tmp_path) as both:
        yield both


def greedy(both: Gang) -> list[int]:
    tokens: list[int] = both.head.sample(12)["token_ids"]
    return tokens


def test_pushed_updates_reach_all_ranks(
    both: Gang, tiny_models: TinyModels, reference: Reference, reference_2: Reference
) -> None:
    pushed(both, tiny_models, reference, reference_2)
    assert not any(line["left_alone"] for line in fetched(both)), "each rank has a slice of each"


def pushed(
    both: Gang, tiny_models: TinyModels, reference: Reference, reference_2: Reference
) -> None:
    """Publish twice, over both ways; the tokens are those of what was published."""
    ways: list[tuple[Transport, int, Reference]] = [("tcp", 1, reference), ("shm", 2, reference_2)]
    with RolloutPool.from_urls(**ports_of([both.head]), direct=DirectOptions()) as pool:
        epoch = pool.acquire()
        for version, (transport, seed, judge) in enumerate(ways, 1):
            tensors = load_file(Path(tiny_models.weights(seed)) / "model.safetensors")
            done = pool.publish_weights(version, tensors=tensors, transport=transport)
            assert done.replicas == 1
            assert greedy(both) == judge.greedy(PROMPT, 12)
            active = both.head.state()["weights"]["active"]
            assert (active["epoch"], active["version"]) == (epoch, version)
            assert active["root_hash"] == done.root_hash


def fetched(both: Gang) -> list[dict[str, Any]]:
    """What the member says of each push that it has fetched."""
    return [line for line in both.member.logged() if line["message"].startswith("fetched ")]


@pytest.mark.parametrize("level", [1, 2])
def test_both_nodes_sleep_and_wake(both: Gang, level: int) -> None:
    before = greedy(both)
    assert both.head.post("sleep", level=level).status_code == 200
    assert both.head.post("wake").status_code == 200
    assert greedy(both) == before


def test_a_pipeline_over_two_nodes_makes_the_tokens_of_one(
    tiny_models: TinyModels, tmp_path: Path, reference: Reference, reference_2: Reference
) -> None:
    with gang(KIND, tiny_models.model(1), tmp_path, env=PP2) as both:
        assert greedy(both) == reference.greedy(PROMPT, 12)
        both.head.update(1, 1, tiny_models.weights(2))
        assert greedy(both) == reference_2.greedy(PROMPT, 12)
        # What its rank read of that is all that the member takes from now on.
        pushed(both, tiny_models, reference, reference_2)
        names = load_file(Path(tiny_models.weights(1)) / "model.safetensors").keys()
        first_stage = [name for name in names if name.startswith("model.layers.0.")]
        for line in fetched(both):
            assert line["left_alone"] == len(first_stage)
            assert 0 < line["bytes_read"] < line["bytes_total"]
        for level in (1, 2):  # what the head keeps comes again, to the member in part
            assert both.head.post("sleep", level=level).status_code == 200
            assert both.head.post("wake").status_code == 200
            assert greedy(both) == reference_2.greedy(PROMPT, 12)
        both.head.update(999, 1, tiny_models.weights(1))  # from files, of which it keeps a part
        assert greedy(both) == reference.greedy(PROMPT, 12)
        # Were that wrong, the commit would fail by the tensor's name, and nobody would serve.
        missed = "model.layers.1.mlp.up_proj.weight"
        leave_alone(both, missed)
        assert both.head.stage(1000, 1, tiny_models.weights(1))["phase"] == "Staged"
        answer = both.head.in_background(
            lambda: both.head.post("weights/commit", epoch=1000, version=1)
        )
        ends(both, member=EXIT_GANG)
        assert f"the loader reads tensor {missed!r}" in reason(both)
        with suppress(httpx.HTTPError):
            assert answer.result(10).status_code == 503


def leave_alone(both: Gang, name: str) -> None:
    """Have the member believe that its ranks don't read this tensor."""
    home = Path(tempfile.gettempdir())
    (told,) = home.glob(f"rollout-slots-{both.member.process.pid}-*/rank-*.json")
    said = json.loads(told.read_text())
    told.write_text(json.dumps({**said, "unread": [*said["unread"], name]}))


def ends(both: Gang, *, member: int) -> None:
    """Wait until both workers have ended; `member` is the status of the member's."""
    assert both.head.process.wait(SEEN_SECONDS + END_SECONDS) == EXIT_GANG
    assert both.member.process.wait(SEEN_SECONDS + END_SECONDS) == member


def reason(both: Gang) -> str:
    """Why the head gave the gang up."""
    said: list[str] = [line["message"] for line in both.head.logged()]
    return next(line for line in said if line.startswith("the gang is broken"))


def test_a_stopped_rank_ends_both_in_the_middle_of_a_commit(
    fresh: Gang, tiny_models: TinyModels
) -> None:
    """A rank that stands still answers no collective call; nothing of vLLM ever says so."""
    slot = fresh.head.stage(1, 1, tiny_models.weights(2))
    assert slot["phase"] == "Staged", slot
    (rank,) = fresh.ranks()
    os.kill(rank.pid, signal.SIGSTOP)
    answer = fresh.head.in_background(lambda: fresh.head.post("weights/commit", epoch=1, version=1))
    ends(fresh, member=EXIT_GANG)
    assert "was stopped" in reason(fresh)
    with suppress(httpx.HTTPError):
        assert answer.result(10).status_code == 503


def test_a_member_without_its_head_ends(fresh: Gang) -> None:
    ranks = fresh.ranks()
    fresh.head.process.kill()
    assert fresh.member.process.wait(SEEN_SECONDS + END_SECONDS) == EXIT_GANG
    until_sync(lambda: not any(rank.alive for rank in ranks), what="the end of its ranks")
