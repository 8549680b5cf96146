"""vLLM's ranks as actors of a real Ray: they serve and take updates as its own, and their deaths are seen."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine.engine_kinds import KINDS, engine_args, left_out
from tests.support.engine.rays import ENVIRONMENT, Ray, ray_node
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, Command
from tests.support.processes import descendants, look
from tests.support.waiting import until_sync

KIND = KINDS["vllm"]
FLAGS = ("--engine", "vllm", "--max-length", "512", "--shutdown-grace", "0")
EXECUTOR = engine_args("--distributed-executor-backend=ray")
SEEN_SECONDS = 15.0
TP2 = {"ROLLOUT_TENSOR": "2"}

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(800),
    pytest.mark.skipif(left_out(KIND) is not None, reason=str(left_out(KIND))),
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="no environment with Ray: make makes it"),
]


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    with ray_node(KIND, gpus=2) as ray:
        yield ray


def gone(pids: list[int]) -> bool:
    """Whether all of these have ended."""
    return not any((seen := look(pid)) and seen.alive for pid in pids)


def test_ranks_of_ray_serve_update_sleep_and_end_as_our_own(
    ray: Ray, tiny_models: TinyModels, tmp_path: Path, reference: Reference, reference_2: Reference
) -> None:
    worker = Command(
        tiny_models.model(1),
        tmp_path / "worker.log",
        (*FLAGS, *KIND.flags, *EXECUTOR),
        {**ray.env, **TP2},
        python=KIND.python,
    )
    try:
        worker.wait_active(KIND.start_seconds)
        ranks = ray.ranks()
        assert len(ranks) == 2, "both ranks are Ray's children"
        assert worker.sample(12)["token_ids"] == reference.greedy(PROMPT, 12)

        assert worker.stage(1, 1, tiny_models.weights(2))["phase"] == "Staged"
        running = worker.long(sampling={"max_tokens": 480, "ignore_eos": True, "temperature": 0})
        worker.commit(1, 1, in_flight="Recompute")
        [across] = running.result(120).json()["outputs"]
        assert [span["version"] for span in across["weights"]] == [0, 1]
        assert worker.sample(12)["token_ids"] == reference_2.greedy(PROMPT, 12)

        for level in (1, 2):
            assert worker.post("sleep", level=level).status_code == 200
            assert worker.post("wake").status_code == 200
            assert worker.sample(12)["token_ids"] == reference_2.greedy(PROMPT, 12)

        os.kill(ranks[1], signal.SIGKILL)
        until_sync(lambda: worker.state()["restarts"] == 1, SEEN_SECONDS, what="its death")
        until_sync(lambda: gone(ranks), what="the end of the other rank")
        worker.wait_active(KIND.start_seconds)
        assert worker.sample(12)["token_ids"] == reference_2.greedy(PROMPT, 12)

        ranks = ray.ranks()
        cores = [each.pid for each in descendants(worker.process.pid)]
        worker.process.kill()
        until_sync(lambda: gone(ranks), SEEN_SECONDS, what="the ranks to end with their worker")
        until_sync(lambda: gone(cores), 60, what="the core to end without ranks")
    finally:
        worker.process.kill()
        worker.process.wait(30)
        worker.close()
