"""A replica of two pods on two nodes: one real gang, which lives through the whole story.

Each start costs a minute of a core and two gigabytes, so the tests take the gang over from each other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

import rollout_local
from localkube import Cluster
from localkube.processes import process_in
from tests.support.api.apiclient import PODS, Obj
from tests.support.cluster.fleets import Fleet
from tests.support.cluster.pools import PROMPT
from tests.support.engine.reference import Reference

pytestmark = pytest.mark.timeout(1200)

START_SECONDS = 600.0
"""Two pods with two processes that import torch each, on busy cores."""

NOTICED_SECONDS = 40.0
"""A gang breaks within ten seconds of the end of a rank; the rest is the kubelet's and the operator's."""

LONGEST = 1900
PATIENT = {"policy": "Drain", "deadlineSeconds": 60}
TOKENS = 8
ENGINE_ARGS = {"vllm": ["--max-num-seqs=16"], "sglang": []}


@pytest.fixture(scope="module", params=["vllm", pytest.param("sglang", marks=pytest.mark.soak)])
def gang(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Fleet]:
    """A pool of one replica on two nodes, each of which has one accelerator; it serves (1, 1)."""
    fleet = Fleet(cluster, "weights", f"gang-{request.param}")
    try:
        fleet.create(
            replicas=1,
            engine={"type": request.param, "args": ENGINE_ARGS[request.param]},
            model={
                "source": {"claim": {"name": "models", "subPath": "tiny"}},
                "maxLength": 2048,
            },
            parallelism={"tensor": 2, "nodes": 2},
            accelerator={"resource": "example.org/gpu"},  # of NVIDIA's the engine wants CUDA
        )
        fleet.settled((1, 1), replicas=1, seconds=START_SECONDS)
        yield fleet
    finally:
        fleet.close()


def ranks(fleet: Fleet) -> list[Obj]:
    """The pods of the gang, head first."""
    return sorted(fleet.pods(), key=lambda pod: pod["metadata"]["name"])


def uids(fleet: Fleet) -> set[str]:
    return {pod["metadata"]["uid"] for pod in fleet.pods()}


def replaced(fleet: Fleet, before: set[str]) -> None:
    """Wait until none of these pods is left and the new ones are there."""

    def look() -> bool:
        now = uids(fleet)
        return len(now) == 2 and not now & before

    fleet.eventually("the gang is replaced", look, NOTICED_SECONDS)


def serves(gang: Fleet) -> None:
    """Wait until it serves what it was told last, however it was left."""
    gang.settled(gang.identity, replicas=1, seconds=START_SECONDS)


def test_a_gang_answers_as_one_pod_does(gang: Fleet) -> None:
    head, member = ranks(gang)
    assert head["spec"]["nodeName"] != member["spec"]["nodeName"]
    assert gang.endpoints() == [head["status"]["podIP"]], "requests go to the head alone"
    gang.eventually("the member is Ready", lambda: is_ready(ranks(gang)[1]))
    status = gang.status()
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (1, 1, 1)
    assert [m["name"] for m in status["members"]] == [head["metadata"]["name"]]
    folder = rollout_local.make_models() / "weights" / "1"
    answer = gang.generate(tokens=TOKENS)
    assert answer["outputs"][0]["token_ids"] == Reference(folder).greedy(PROMPT, TOKENS)


def is_ready(pod: Obj) -> bool:
    """Whether the kubelet calls a pod Ready."""
    conditions = pod["status"].get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def test_a_gang_is_updated_under_load(gang: Fleet) -> None:
    old, before = gang.identity, uids(gang)
    with gang.traffic() as seen:
        gang.eventually("requests are answered", lambda: seen.replies)
        new = gang.raise_to("2")
        gang.wait_phase("Complete", new, seconds=60)
        answered = len(seen.replies)
        gang.eventually("more are", lambda: len(seen.replies) > answered + 2)
    assert not seen.failures
    assert not seen.refused
    assert seen.served == [old, new]
    for reply in seen.replies:
        gang.check(reply.body)
    gang.settled(new, replicas=1)
    assert uids(gang) == before


def test_a_gang_that_loses_a_rank_is_replaced_once(gang: Fleet) -> None:
    """The commit waits for a request when rank 1 dies.

    That the new gang comes to serve is a minute of two cores: every day one without processes does, in
    `tests/scale/test_fleet.py`.
    """
    serves(gang)
    before, restarts = uids(gang), gang.status()["restarts"]
    gang.long_request(0, LONGEST)
    gang.wait_phase("Committing", gang.raise_to("1", inFlight=PATIENT))
    member = gang.api.get(f"{PODS.format(gang.namespace)}/{gang.name}-0-1")
    os.kill(process_in(member["metadata"]["uid"], "rollout-worker"), signal.SIGKILL)
    replaced(gang, before)
    gang.eventually(
        "one failure, whoever follows", lambda: gang.status()["restarts"] == restarts + 1
    )
    told = [error["message"] for error in gang.status()["lastErrors"]]
    # Which of the two ends the operator sees first is the kubelets' doing.
    first = (f"{gang.name}-0-1: ", "the gang is broken: ")
    assert any(words in message for message in told for words in first), told
    assert not uids(gang) & before


def test_a_gang_is_rolled_as_a_whole(gang: Fleet) -> None:
    """The gang that has just lost a rank still starts; the one that takes its place starts in vain."""
    before, restarts = uids(gang), gang.status()["restarts"]
    gang.patch(podTemplate={"labels": {"team": "blue"}})
    replaced(gang, before)
    assert {pod["metadata"]["labels"]["team"] for pod in gang.pods()} == {"blue"}
    assert gang.status()["restarts"] == restarts, "a rolling update is no failure"
