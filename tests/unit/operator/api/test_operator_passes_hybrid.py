"""Passes over a Hybrid pool: whom they call, and what they write; never a pod."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec_colocation import TrainerSelector
from rollout_operator.cache.neighbour_informer import NeighbourObjects
from tests.support.unit.faults import FAULTS, Fault
from tests.support.unit.passlab import KEY, PODS, PassLab, condition, worker_of
from tests.support.waiting import until

SLICES = "/apis/discovery.k8s.io/v1/namespaces/rl/endpointslices"
HYBRID = {
    "mode": "Hybrid",
    "colocation": {"trainerSelector": {"matchLabels": {"job": "grpo"}}},
}


def trainer(index: int = 0, account: str = "rollout-worker") -> Obj:
    """A pod of the trainer's that runs and is Ready."""
    ran = {"name": "train", "state": {"running": {"startedAt": "1970-01-12T13:00:00Z"}}}
    return {
        "metadata": {
            "namespace": "rl",
            "name": f"t-{index}",
            "uid": f"uid{index}",
            "labels": {"job": "grpo"},
        },
        "spec": {"nodeName": "n1", "serviceAccountName": account},
        "status": {
            "phase": "Running",
            "podIP": f"10.0.0.{index}",
            "containerStatuses": [ran],
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


class Inside:
    """The API server's side of a Hybrid pool."""

    def __init__(self, lab: PassLab) -> None:
        self.lab = lab
        self.stored: dict[str, Obj] = {}
        self.patched: list[Obj] = []
        lab.api.answers["POST", SLICES] = self._create
        lab.lists(PODS)

    def has(self, stored: Obj) -> None:
        """Let a slice be there that the watch has not shown."""
        name = stored["metadata"]["name"]
        self.stored[name] = stored
        self.lab.api.answers["GET", f"{SLICES}/{name}"] = self._get
        self.lab.api.answers["PATCH", f"{SLICES}/{name}"] = self._patch

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        name = body["metadata"]["name"]
        if name in self.stored:
            return web.json_response(
                {"reason": "AlreadyExists", "message": "it exists"}, status=409
            )
        meta = {**body["metadata"], "uid": f"uid of {name}", "resourceVersion": "20"}
        self.has({**body, "metadata": meta})
        return web.json_response(self.stored[name], status=201)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.stored[request.path.rpartition("/")[2]])

    async def _patch(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        name = request.path.rpartition("/")[2]
        self.patched.append({"name": name, **body})
        now = self.stored[name]
        assert body["metadata"].pop("resourceVersion") == now["metadata"]["resourceVersion"]
        version = str(int(now["metadata"]["resourceVersion"]) + 1)
        labels = {**now["metadata"].get("labels", {}), **body["metadata"].pop("labels", {})}
        meta = {
            **now["metadata"],
            **body["metadata"],
            "labels": labels,
            "resourceVersion": version,
        }
        self.stored[name] = {**now, **body, "metadata": meta}
        return web.json_response(self.stored[name])

    async def listed(self) -> None:
        """Look once, and wait until the trainer's pods are known."""
        await self.lab.reconcile()
        unknown, grpo = NeighbourObjects(unknown=""), TrainerSelector(match_labels={"job": "grpo"})
        await until(
            lambda: self.lab.ctx.neighbours.subscribe_inside(KEY, grpo) != unknown, what="the list"
        )

    async def settled(self) -> None:
        """Run passes until nothing is left to do."""
        await self.listed()
        for _ in range(4):
            self.lab.clock.steady += 2  # progress is written once a second
            await self.lab.settled(2)

    def ready(self) -> list[str]:
        """Pods to which the data Service leads."""
        endpoints = self.stored["math-ipv4-0"]["endpoints"]
        return [e["targetRef"]["name"] for e in endpoints if e["conditions"]["ready"]]


def with_trainer(lab: PassLab) -> Inside:
    """A pool in one pod of the trainer's, whose worker serves."""
    inside = Inside(lab)
    lab.lists(PODS, trainer(0))
    lab.has_pool(**HYBRID)
    lab.workers = {"10.0.0.0:8001": worker_of()}
    return inside


def writes(lab: PassLab) -> list[tuple[str, str]]:
    return [(method, path) for method, path, _ in lab.api.requests if method != "GET"]


async def test_members_are_fenced_called_and_served_and_no_pod_is_written(lab: PassLab) -> None:
    inside = Inside(lab)
    lab.lists(PODS, trainer(1), trainer(0))
    lab.has_pool(**HYBRID)
    lab.workers = {f"10.0.0.{i}:8001": worker_of(required=None, boot=f"b{i}") for i in range(2)}
    await inside.settled()
    assert {verb for _, verb in lab.asked} == {"require"}
    assert inside.ready() == ["t-0", "t-1"]
    assert condition(lab.status, "Ready") == ("True", "Serving")
    assert (lab.status["desiredReplicas"], lab.status["readyReplicas"]) == (2, 2)
    page = lab.page
    assert 'rollout_pool_replicas_desired{namespace="rl",pool="math"} 2.0' in page
    heads = inside.stored["math-heads-ipv4-0"]["endpoints"]
    assert [e["hostname"] for e in heads] == ["math-0-0", "math-1-0"]
    assert not [path for method, path in writes(lab) if "/pods" in path]
    lab.api.requests.clear()
    await lab.settled(2)
    assert writes(lab) == [], "what does not differ is not written"


async def test_a_pod_of_another_account_is_told_and_never_called(lab: PassLab) -> None:
    inside = Inside(lab)
    lab.lists(PODS, trainer(0, account="default"))
    lab.has_pool(**HYBRID)
    await inside.settled()
    assert not lab.poller.fast, "nobody is polled"
    assert condition(lab.status, "Degraded") == ("True", "PodTrouble")
    assert lab.status["message"].startswith("t-0: it runs under service account 'default'")
    assert not inside.stored


async def test_while_the_trainers_pods_are_not_known_nothing_is_said_or_written(
    lab: PassLab,
) -> None:
    inside = Inside(lab)
    lab.api.answer("GET", PODS, {"message": "no"}, 403)
    lab.has_pool(**HYBRID)
    await inside.listed()
    await lab.reconcile()
    assert writes(lab) == []
    ((kind, reason, text),) = lab.told.events
    assert (kind, reason) == ("Warning", "TrainerUnknown")
    assert text.startswith("can't list the trainer's pods: ")


async def test_a_slice_of_somebody_else_is_told_and_not_touched(lab: PassLab) -> None:
    inside = with_trainer(lab)
    foreign: Obj = {"metadata": {"name": "math-ipv4-0", "namespace": "rl", "uid": "x"}}
    inside.has(foreign)
    await inside.settled()
    assert inside.stored["math-ipv4-0"] == foreign
    assert condition(lab.status, "Degraded") == ("True", "NameConflict")
    assert "endpointslice/math-ipv4-0 exists but is not ours" in lab.status["message"]


async def test_a_slice_that_lost_its_labels_gets_them_back(lab: PassLab) -> None:
    """Without them no watch shows it."""
    inside = with_trainer(lab)
    await inside.settled()
    lost = inside.stored["math-ipv4-0"]
    bare: dict[str, Any] = {**lost["metadata"], "labels": {}, "resourceVersion": "90"}
    inside.stored["math-ipv4-0"] = {**lost, "metadata": bare, "endpoints": []}
    gone = {**lost, "metadata": {**lost["metadata"], "resourceVersion": "91"}}
    lab.sees("endpointslices", "DELETED", gone)
    await inside.settled()
    labels = inside.stored["math-ipv4-0"]["metadata"]["labels"]
    assert labels[names.LABEL_POOL] == "math"
    assert labels[names.LABEL_SLICE_MANAGER] == "rollout-operator"
    assert inside.ready() == ["t-0"]


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if f.status in (0, 403, 404, 503)], ids=lambda fault: fault.name
)
@pytest.mark.parametrize("verb", ["create", "patch"])
async def test_a_slice_that_is_refused_stops_nothing_else(
    lab: PassLab, verb: str, fault: Fault
) -> None:
    """The slices of a Hybrid pool are its gates; `test_operator_faults` has all answers to other writes."""
    inside = with_trainer(lab)
    if verb == "patch":
        await inside.settled()
        lost = inside.stored["math-ipv4-0"]
        inside.has({**lost, "endpoints": [], "metadata": {**lost["metadata"], "annotations": {}}})
        meta = {**inside.stored["math-ipv4-0"]["metadata"], "resourceVersion": "90"}
        lab.ctx.store.upsert_written(
            "endpointslices", {**inside.stored["math-ipv4-0"], "metadata": meta}
        )
    route = ("POST", SLICES) if verb == "create" else ("PATCH", f"{SLICES}/math-ipv4-0")
    lab.api.answers[route] = fault.answer()
    if verb == "create":
        await inside.listed()
    for _ in range(8):
        lab.clock.steady += 2
        await lab.settled(1)
        if condition(lab.status, "Degraded")[1] == fault.told:
            break
    assert condition(lab.status, "Degraded") == ("True", fault.told)
    assert lab.status["message"].startswith("the API server ")
    at = f'namespace="rl",pool="math",reason="{fault.told}",resource="endpointslices",verb="{verb}"'
    assert f"rollout_pool_failed_writes_total{{{at}}}" in lab.page
    lab.change(state="Asleep")
    await lab.settled(1)
    assert lab.workers["10.0.0.0:8001"].hold == "Asleep"
