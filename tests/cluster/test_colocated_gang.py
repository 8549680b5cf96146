"""A replica on two nodes that shares the devices of both with a trainer: it has all of them, or none.

The trainer's two pods take their turns each for itself, so the nodes are free at different times. The tests tell
one story, in order.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

import rollout_local
from demo.judge import Judge
from localkube import Cluster
from localkube.home import cache
from localkube.processes import process_in
from tests.support.api.apiclient import ApiError
from tests.support.cluster.pools import PROMPT, Pool
from tests.support.cluster.sharing import DONE, Sharing, claim_template, surroundings, trainer
from tests.support.engine.reference import Reference
from tests.support.waiting import eventually

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

NAMESPACE, TRAINER, LABELS = "colocated", "pair", {"app": "pair"}
START_SECONDS = 600.0
"""Two pods with two processes that import torch each, on busy cores."""

ROLLOUT_SECONDS = 15.0
"""An engine of two nodes takes seconds to wake on these cores, and is to serve then."""

TOKENS = 8
JUDGED = float("inf")
"""Memory that no worker has: only the trainer's pods are looked for."""


@pytest.fixture(scope="module")
def sharing(cluster: Cluster) -> Iterator[Sharing]:
    folder = cache() / "models" / NAMESPACE
    rollout_local.make_model(folder / "models" / "pair", "--seed", "1")
    (folder / "weights").mkdir(exist_ok=True)
    rollout_local.claims(cluster, NAMESPACE, folder)
    with Judge(cluster.state) as judge:
        made = Sharing(cluster, NAMESPACE, judge)
        made.idle_mib = JUDGED
        made.apply(*surroundings(NAMESPACE))
        yield made


@pytest.fixture(scope="module")
def pool(sharing: Sharing) -> Iterator[Pool]:
    """The pool beside its trainer; both begin at once."""
    made = Pool(sharing.cluster, NAMESPACE, "wide")
    claim = {"resourceClaimTemplateName": "pair"}
    theirs = trainer(
        made.name, claim, name=TRAINER, labels=LABELS, pods=2, rollout_seconds=ROLLOUT_SECONDS
    )
    sharing.apply(claim_template("pair"), theirs)
    made.apply(
        mode="Colocated",
        colocation={"trainerSelector": {"matchLabels": LABELS}},
        engine={"type": "vllm", "args": ["--max-num-seqs=16"]},
        model={"source": {"claim": {"name": "models", "subPath": "pair"}}, "maxLength": 2048},
        parallelism={"tensor": 2, "nodes": 2},
    )
    yield made
    sharing.cluster.kubectl("-n", NAMESPACE, "delete", "statefulset", TRAINER, "--ignore-not-found")
    made.delete()


def answered(pool: Pool, seconds: float = START_SECONDS) -> list[int]:
    """Wait for an answer, which comes between two turns of the trainer's; returns its tokens."""

    def ask() -> list[int]:
        with suppress(AssertionError, httpx.HTTPError, ApiError, KeyError):
            tokens: list[int] = pool.generate(tokens=TOKENS)["outputs"][0]["token_ids"]
            return tokens
        return []

    return pool.eventually("it answers", ask, seconds)


def log_of(sharing: Sharing, pod: str) -> str:
    """What a pod of the trainer's has told so far."""
    return sharing.cluster.kubectl("-n", NAMESPACE, "logs", "--timestamps", pod)


def trained(sharing: Sharing, pod: str) -> int:
    """How often it had the devices, whether the pool served after that or not."""
    return log_of(sharing, pod).count(DONE)


def test_it_runs_on_both_nodes_beside_the_trainer_and_answers(sharing: Sharing, pool: Pool) -> None:
    expected = Reference(cache() / "models" / NAMESPACE / "models" / "pair").greedy(PROMPT, TOKENS)
    assert answered(pool) == expected
    ours = sorted(pool.pods(), key=lambda pod: pod["metadata"]["name"])
    theirs = [sharing.trainer_pod(f"{TRAINER}-{index}") for index in range(2)]
    nodes = [pod["spec"]["nodeName"] for pod in theirs]
    assert len(set(nodes)) == 2
    assert [pod["spec"]["nodeName"] for pod in ours] == nodes
    assert [sharing.claim_of(pod) for pod in ours] == [sharing.claim_of(pod) for pod in theirs]


def test_while_one_pod_of_the_trainer_stands_still_the_other_one_has_its_turns(
    sharing: Sharing, pool: Pool
) -> None:
    first, second = (f"{TRAINER}-{index}" for index in range(2))
    sharing.until_had_by(sharing.trainer_pod(second)["metadata"]["uid"])
    with sharing.frozen_trainer(second):
        # The pod that stands still has put the pool to sleep, and others leave it so.
        pool.patch(state="Active")

        def told() -> bool:
            [member] = pool.status()["members"]
            whom = (member.get("turn"), member.get("message") or "")
            return whom[0] == "Waiting" and "rank 1" in whom[1] and second in whom[1]

        pool.eventually("it waits for the second node's device", told, 90)
        # Each turn puts the pool to sleep, whose worker waits for the other pod.
        due = trained(sharing, first) + 2
        eventually(
            "the first pod has turns",
            lambda: trained(sharing, first) >= due,
            150,
            1,
            seen=lambda: log_of(sharing, first),
        )
    answered(pool, 180)


def test_a_worker_that_is_killed_on_the_second_node_comes_back(
    sharing: Sharing, pool: Pool
) -> None:
    before = {pod["metadata"]["uid"] for pod in pool.pods()}
    member = next(pod for pod in pool.pods() if pod["metadata"]["name"].endswith("-1"))
    os.kill(process_in(member["metadata"]["uid"], "rollout-worker"), signal.SIGKILL)
    pool.eventually(
        "the gang is replaced",
        lambda: not before & {pod["metadata"]["uid"] for pod in pool.pods()},
        60,
    )
    answered(pool)
