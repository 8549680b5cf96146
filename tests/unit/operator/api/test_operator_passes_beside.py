"""Passes over a colocated pool: what they ask the API server for, what they make, when they stop asking."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec_colocation import TrainerSelector
from rollout_operator.cache.neighbour_informer import NeighbourObjects
from tests.support.unit.passlab import KEY, PODS, PassLab, pod
from tests.support.waiting import until

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/rl/resourceclaims"
COLOCATED = {
    "mode": "Colocated",
    "colocation": {"trainerSelector": {"matchLabels": {"job": "grpo"}}},
}


def trainer() -> Obj:
    """A pod of the trainer's that has its claim and its node."""
    uses = [{"name": "gpus", "resourceClaimName": "gpus-0"}]
    return {
        "metadata": {"namespace": "rl", "name": "t-0", "uid": "t", "labels": {"job": "grpo"}},
        "spec": {"nodeName": "n1", "resourceClaims": uses},
    }


def claim() -> Obj:
    device = {"request": "gpus", "driver": "gpu.example.com", "pool": "n1", "device": "gpu-0"}
    return {
        "metadata": {"namespace": "rl", "name": "gpus-0", "uid": "c"},
        "spec": {"devices": {"requests": [{"name": "gpus"}]}},
        "status": {"allocation": {"devices": {"results": [device]}}},
    }


async def looks_again(lab: PassLab) -> str:
    """Run a pass as soon as the lists have ended, or failed; returns what status says."""
    unknown = NeighbourObjects(unknown="")
    grpo = TrainerSelector(match_labels={"job": "grpo"})
    await until(lambda: lab.ctx.neighbours.subscribe_beside(KEY, grpo) != unknown, what="the lists")
    lab.clock.steady += 2  # progress is written once a second
    await lab.reconcile()
    message: str = lab.status["message"]
    return message


async def test_a_pool_of_its_own_accelerators_asks_for_no_trainer(lab: PassLab) -> None:
    lab.has_pool()
    lab.api.answer(
        "POST", PODS, {"metadata": {"name": "math-0-0", "uid": "p", "namespace": "rl"}}, 201
    )
    await lab.reconcile()
    assert not [path for method, path, _ in lab.api.requests if method == "GET"]


async def test_a_pod_is_made_on_the_trainers_claim_once_both_are_listed(lab: PassLab) -> None:
    made: list[Any] = []

    async def create(request: web.Request) -> web.StreamResponse:
        made.append(json.loads(await request.text()))
        meta = {**made[-1]["metadata"], "uid": "p", "resourceVersion": "12"}
        return web.json_response({**made[-1], "metadata": meta}, status=201)

    lab.api.answers["POST", PODS] = create
    lab.lists(PODS, trainer())
    lab.lists(CLAIMS, claim())
    lab.has_pool(**COLOCATED)
    await lab.reconcile()
    assert made == lab.written == [], "nothing is known yet"
    await looks_again(lab)
    (body,) = made
    (used,) = body["spec"]["resourceClaims"]
    assert used == {"name": "rollout-devices", "resourceClaimName": "gpus-0"}
    assert body["metadata"]["annotations"][names.ANNOTATION_DEVICES] == "gpu.example.com/n1/gpu-0"


async def test_what_can_not_be_listed_is_told_in_status(lab: PassLab) -> None:
    lab.lists(PODS)
    lab.api.answer("GET", CLAIMS, {"message": "no"}, 403)
    lab.has_pool(**COLOCATED)
    await lab.reconcile()
    said = await looks_again(lab)
    assert "the operator's role lacks this permission: upgrade its chart" in said
    assert lab.status["phase"] == "Pending"


async def test_what_is_waited_for_is_told_in_an_event_once(lab: PassLab) -> None:
    waits = {**trainer(), "spec": {**trainer()["spec"], "nodeName": None}}
    lab.lists(PODS, waits)
    lab.lists(CLAIMS, claim())
    lab.has_pool(**COLOCATED)
    await lab.reconcile()
    said = await looks_again(lab)
    await looks_again(lab)
    assert said == (
        "replica 0 waits for the trainer's pod 't-0' to be scheduled, which needs ResourceClaim 'gpus-0'"
    )
    assert lab.told.events == [("Normal", "WaitingForTrainer", said)]


async def test_who_is_deleted_asks_no_more(lab: PassLab) -> None:
    lab.lists(PODS)
    lab.lists(CLAIMS)
    lab.has_pool(**COLOCATED)
    await lab.reconcile()
    assert "selects 0: start more of them" in await looks_again(lab)
    assert [reason for _, reason, _ in lab.told.events] == ["TooFewTrainers"]
    await until(lambda: lab.api.at_once == 2, what="both streams")
    lab.goes()
    await lab.reconcile()
    await until(lambda: lab.api.at_once == 0, what="the end of both streams")


async def test_a_colocated_pod_of_a_deleted_pool_is_not_removed_by_force(lab: PassLab) -> None:
    """What is removed by force may run on, with the trainer's devices."""
    long_ago = "1970-01-12T13:00:00Z"
    for replica, claims in ((0, []), (1, [{"name": "rollout-devices", "resourceClaimName": "c"}])):
        going = pod(replica, deletionTimestamp=long_ago, deletionGracePeriodSeconds=1)
        lab.has_pod({**going, "spec": {"resourceClaims": claims}})
    await lab.reconcile()
    lab.clock.steady += 31
    again = await lab.reconcile()
    assert lab.pod_writes == [("DELETE", "math-0-0")]
    assert again is not None
