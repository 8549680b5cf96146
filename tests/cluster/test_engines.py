"""`examples/<engine>.yaml` on the real cluster: what a trainer sees is the same for every engine.

`hf` is what all other tests of this tier run. vLLM starts, answers, is updated, sleeps and wakes in pods every
day, too: those of a gang (`test_gangs`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import rollout_local
from localkube import Cluster
from localkube.home import REPOSITORY
from tests.support.cluster.pools import PROMPT, Pool
from tests.support.engine.reference import Reference

pytestmark = pytest.mark.timeout(600)
TOKENS = 8
ENGINE_SECONDS = 300.0
"""Three processes import torch one after the other, on busy cores."""
TOLD = re.compile(r" is (Starting|Loading): \w+")
"""What a pool's message says while a worker starts, with the worker's own words at the end."""


@pytest.fixture(params=[pytest.param("vllm", marks=pytest.mark.soak), "sglang"])
def engine(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Pool]:
    """The example of an engine with one replica; Ready."""
    body = yaml.safe_load((REPOSITORY / "examples" / f"{request.param}.yaml").read_text())
    pool = Pool(cluster, "pools", body["metadata"]["name"])
    try:
        pool.apply(**{**body["spec"], "replicas": 1})
        pool.eventually(
            "progress is told", lambda: TOLD.search(pool.status().get("message", "")), 120
        )
        pool.wait("Ready", seconds=ENGINE_SECONDS)
        yield pool
    finally:
        pool.delete()


def test_an_engine_lives_as_any_other(engine: Pool) -> None:
    folder = rollout_local.make_models()
    assert tokens(engine) == greedy(folder / "models" / "tiny")
    assert engine.generate()["outputs"][0]["weights"][0]["version"] == 0

    engine.target(1, 1, "/rollout/weights/1")  # absolute, as the pods see it
    engine.wait("WeightsSynced")
    updated = greedy(folder / "weights" / "1")
    assert tokens(engine) == updated
    assert engine.identities(engine.generate()) == [(1, 1)]

    awake = engine.metric("rollout_worker_memory_resident_bytes")
    engine.patch(state="Asleep", sleep={"level": 2})
    engine.wait("Asleep", seconds=90)
    engine.eventually("no endpoints", lambda: not engine.endpoints())
    assert engine.metric("rollout_worker_memory_resident_bytes") < awake
    engine.patch(state="Active")
    engine.wait("Ready", seconds=90)
    assert tokens(engine) == updated


def tokens(pool: Pool) -> list[int]:
    """Greedy tokens through the Service."""
    found: list[int] = pool.generate(tokens=TOKENS)["outputs"][0]["token_ids"]
    return found


def greedy(folder: Path) -> list[int]:
    """What plain transformers says."""
    return Reference(folder).greedy(PROMPT, TOKENS)
