"""Each write of a pass against each answer: what goes on all the same, what is told, how often it is tried.

The table is made of `ROWS` and `FAULTS`; the pass is the real one, its API server answers over HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_common.kube.errors import FencedError, Unavailable
from rollout_operator.api import names
from rollout_operator.api.objects import ResourceName
from rollout_operator.core.services import pool_services
from rollout_operator.passes.write_obstacles import QUIET_TRIES
from rollout_worker.schemas import WeightsId
from tests.support.unit.faults import FAULTS, ROUTINE, Fault
from tests.support.unit.passlab import (
    BUDGET,
    KEY,
    PODS,
    POOL,
    PassLab,
    condition,
    head,
    pass_lab,
    pool,
    worker_of,
)
from tests.support.unit.poolspecs import target

SERVICES = "/api/v1/namespaces/rl/services"
BUDGETS = BUDGET.removesuffix("/math")
ONE = WeightsId(epoch=1, version=1)


@pytest.fixture
async def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PassLab]:
    async with pass_lab(tmp_path, monkeypatch) as made:
        for path in (PODS, SERVICES, BUDGETS):
            made.api.answers["POST", path] = _make
        yield made


async def _make(request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.text())
    meta = {"uid": f"new {body['metadata']['name']}", "resourceVersion": "30"}
    return web.json_response({**body, "metadata": {**body["metadata"], **meta}}, status=201)


async def live(lab: PassLab, seconds: float) -> None:
    """Let so many seconds pass: a pass whenever one is due, and what workers do between them."""
    end, asked = lab.clock.steady + seconds, len(lab.asked)
    while lab.clock.steady < end:
        again = await lab.reconcile()
        await lab.called()
        await lab.polled()
        busy = len(lab.asked) > asked  # the answer to a call wakes the pool
        asked = len(lab.asked)
        due = 5.0 if again is None else max(again, 0.1)
        step = min(0.1 if busy else due, 5.0, end - lab.clock.steady)
        lab.clock.steady += step
        lab.clock.wall += step


# The rows: what is to be written beside replica 0, which is healthy.


def _serving(lab: PassLab, **spec: Any) -> None:
    lab.has_pool(**spec)
    lab.has_pod(head(serving=True, boot="b0"), worker_of(boot="b0"))


def _healthy(lab: PassLab) -> None:
    _serving(lab, replicas=2)


def _failed(lab: PassLab) -> None:
    _healthy(lab)
    lab.has_pod({**head(1), "status": {"phase": "Failed"}})


def _not_served(lab: PassLab) -> None:
    _healthy(lab)
    lab.has_pod(head(1), worker_of(boot="b1"))


def _unlabelled(lab: PassLab) -> None:
    _healthy(lab)
    found = head(1, serving=True, boot="b1")
    del found["metadata"]["labels"][names.LABEL_NAME]
    lab.has_pod(found, worker_of(boot="b1"))


def _without(resource: ResourceName) -> Callable[[PassLab], None]:
    def prepare(lab: PassLab) -> None:
        _serving(lab)
        store = lab.ctx.store
        for each in store.pool_services(KEY) + store.pool_budgets(KEY):
            if (each["kind"] == "Service") == (resource == "services"):
                lab.sees(resource, "DELETED", each)

    return prepare


def _damaged_budget(lab: PassLab) -> None:
    _serving(lab)
    [budget] = lab.ctx.store.pool_budgets(KEY)
    meta = {**budget["metadata"], "resourceVersion": "8"}
    spec = {**budget["spec"], "minAvailable": 9}
    damaged = {**budget, "metadata": meta, "spec": spec}
    lab.ctx.store.upsert_written("poddisruptionbudgets", damaged)


def _damaged_service(lab: PassLab) -> None:
    _serving(lab)
    data, _ = pool_services("math", "rl", "ours")
    meta = {**data["metadata"], "uid": "uid of math", "resourceVersion": "8"}
    lab.ctx.store.upsert_written(
        "services", {**data, "metadata": meta, "spec": {"selector": {"app": "x"}}}
    )


@dataclass(frozen=True, slots=True)
class Row:
    """A write: what calls for it, its route, and how the metric names it."""

    name: str
    prepare: Callable[[PassLab], None]
    route: tuple[str, str]
    request: tuple[str, str]
    at_once: int = 1


ROWS = (
    Row("create pod", _healthy, ("POST", PODS), ("create", "pods")),
    Row("delete pod", _failed, ("DELETE", f"{PODS}/math-1-0"), ("delete", "pods")),
    Row("gate", _not_served, ("PATCH", f"{PODS}/math-1-0/status"), ("patch", "pods")),
    Row("labels", _unlabelled, ("PATCH", f"{PODS}/math-1-0/status"), ("patch", "pods")),
    Row("create service", _without("services"), ("POST", SERVICES), ("create", "services"), 2),
    Row(
        "create budget",
        _without("poddisruptionbudgets"),
        ("POST", BUDGETS),
        ("create", "poddisruptionbudgets"),
    ),
    Row(
        "repair budget",
        _damaged_budget,
        ("PATCH", BUDGET),
        ("patch", "poddisruptionbudgets"),
    ),
    Row("repair service", _damaged_service, ("PATCH", f"{SERVICES}/math"), ("patch", "services")),
)


def tries(lab: PassLab, route: tuple[str, str]) -> int:
    """Requests of this route so far."""
    return sum((m, p.partition("?")[0]) == route for m, p, _ in lab.api.requests)


ALIKE = (0, 400, 401, 413, 422, 429, 500, 504)
"""Answers that mean what 403 or 503 does, whatever is written: 401 makes the client log in again, and a connection that breaks
is made again, both below all writes."""


CELLS = [
    # The row `create pod` has all of them.
    pytest.param(row, fault, id=f"{row.name}-{fault.name}")
    for row in ROWS
    for fault in FAULTS
    if row is ROWS[0] or fault.status not in ALIKE
]


@pytest.mark.parametrize(("row", "fault"), CELLS)
async def test_a_write_that_fails_stops_nothing_else(lab: PassLab, row: Row, fault: Fault) -> None:
    row.prepare(lab)
    lab.api.answers[row.route] = fault.answer()
    healthy = lab.workers["10.0.0.0:8001"]
    lab.change(weights=target(1, 1))
    await live(lab, 40)
    assert healthy.active == ONE, "it staged and committed"
    _is_told(lab, row, fault)
    # 10, 20 s after a refusal; 1, 2, 4, … where nobody could answer; a conflict may be routine at first.
    quiet = fault.status in ROUTINE or row.name == "repair service"
    most = (7 if fault.told == "ApiError" else 4) + quiet * QUIET_TRIES
    # Sent with a new login, too, or with a new connection (what may be repeated).
    most *= row.at_once * (2 if fault.status in (0, 401) else 1)
    assert 1 <= tries(lab, row.route) <= most, "each try waits longer"
    lab.change(state="Asleep")
    await live(lab, 10)
    assert healthy.hold == "Asleep"
    assert {"stage", "commit", "sleep"} <= {verb for _, verb in lab.asked}
    page = lab.ctx.telemetry.render_page().decode()
    ended = re.findall(r"^rollout_pool_failed_passes_total\{.*\} (\S+)$", page, re.MULTILINE)
    assert set(ended) <= {"0.0"}, "no pass ended"


def _is_told(lab: PassLab, row: Row, fault: Fault) -> None:
    reason, page = fault.told, lab.ctx.telemetry.render_page().decode()
    assert condition(lab.status, "Degraded") == ("True", reason)
    said = lab.status["message"]
    assert ("Warning", reason, said) in lab.told.events
    assert said.startswith("the API server ")
    if fault.status:
        assert said.endswith("denied by a policy")
    verb, resource = row.request
    at = f'namespace="rl",pool="math",reason="{reason}",resource="{resource}",verb="{verb}"'
    assert f"rollout_pool_failed_writes_total{{{at}}}" in page


def test_the_runbook_has_the_table() -> None:
    page = (Path(__file__).parents[4] / "docs" / "runbook.md").read_text()
    rows = re.findall(r"^\| (\d{3}[^|]*) \| ([^|]*) \|", page, re.MULTILINE)
    told = {code: text for codes, text in rows for code in re.findall(r"\d{3}|none", codes)}
    assert told.keys() == {str(fault.status or "none") for fault in FAULTS}
    for fault in FAULTS:
        assert f"`{fault.told}`" in told[str(fault.status or "none")]


# Status.


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if f.status not in (404, *ALIKE)], ids=lambda fault: fault.name
)
async def test_a_refused_status_stops_only_what_rests_on_it(lab: PassLab, fault: Fault) -> None:
    _failed(lab)
    healthy, route = lab.workers["10.0.0.0:8001"], ("PATCH", f"{POOL}/status")
    takes = lab.api.answers[route]
    lab.api.answers[route] = fault.answer()
    await live(lab, 10)
    assert tries(lab, ("DELETE", f"{PODS}/math-1-0")) >= 1
    lab.sees("pods", "DELETED", head(1, resourceVersion="6"))
    lab.change(weights=target(1, 1))
    await live(lab, 30)
    [failures] = [
        json.loads(body)["metadata"]["annotations"][names.ANNOTATION_RESTARTS]
        for method, path, body in lab.api.requests
        if (method, path.partition("?")[0]) == ("POST", PODS)
    ]
    assert failures == "1", "its back-off is known all the same"
    assert healthy.active != ONE
    assert "commit" not in {verb for _, verb in lab.asked}, (
        "nothing is committed that is not decided"
    )
    told = next(e for e in lab.told.events if e[1] == fault.told)
    assert told[2].startswith("the API server ")
    assert "the status of 'math'" in told[2]
    lab.change(state="Asleep")
    await live(lab, 10)
    assert healthy.hold == "Asleep"
    assert tries(lab, route) <= 2 * (8 + QUIET_TRIES), "each try waits longer"
    at = f'namespace="rl",pool="math",reason="{fault.told}",resource="rolloutreplicas",verb="patch"'
    assert f"rollout_pool_failed_writes_total{{{at}}}" in lab.ctx.telemetry.render_page().decode()
    assert lab.written == []
    lab.api.answers[route] = takes
    lab.change(state="Active", drainSeconds=31)  # which is a reason to try it again
    await live(lab, 20)
    assert healthy.active == ONE
    assert lab.status["weights"]["committed"]["version"] == 1
    assert lab.status["restarts"] == 1, "counted once"
    assert [e[1] for e in lab.told.events].count("ReplicaFailed") == 1


async def test_a_commit_call_follows_only_a_decision_that_is_written(lab: PassLab) -> None:
    """The API server takes every status but the one that says Committing."""
    _serving(lab)
    takes = lab.api.answers["PATCH", f"{POOL}/status"]

    async def but_committing(request: web.Request) -> web.StreamResponse:
        update = json.loads(await request.text())["status"]["weights"].get("lastUpdate", {})
        if update.get("phase") == "Committing":
            return web.json_response({"reason": "Invalid", "message": "no"}, status=422)
        return await takes(request)

    lab.api.answers["PATCH", f"{POOL}/status"] = but_committing
    lab.change(weights=target(1, 1))
    await live(lab, 60)
    assert {verb for _, verb in lab.asked} == {"require", "stage"}
    lab.api.answers["PATCH", f"{POOL}/status"] = takes
    await live(lab, 60)
    assert lab.workers["10.0.0.0:8001"].active == ONE


# What ends a pass.


async def test_the_fence_ends_a_pass(lab: PassLab) -> None:
    _failed(lab)
    await live(lab, 1)
    lab.change(replicas=3)
    lab.ctx.kube.fence_with(lambda: 0.0)
    with pytest.raises(FencedError):
        await lab.reconcile()


async def test_an_api_server_that_answers_nothing_ends_a_pass(lab: PassLab) -> None:
    _failed(lab)
    await lab.reconcile()
    await lab.polled()
    for route in lab.api.answers:
        lab.api.answers[route] = Fault(0).answer()
    with pytest.raises(Unavailable, match="answers nothing"):
        await lab.reconcile()
    assert lab.asked == []


async def test_a_write_without_an_answer_in_time_stops_nothing_else(lab: PassLab) -> None:
    """A webhook that hangs; the deadline is what is left of the Lease."""
    _healthy(lab)
    await live(lab, 0.1)
    lab.api.delay("POST", PODS, {}, 60)
    healthy = lab.workers["10.0.0.0:8001"]
    lab.change(state="Asleep")
    lab.ctx.kube.fence_with(lambda: 1.5)
    await lab.reconcile()
    await lab.called()
    assert healthy.hold == "Asleep"
    await live(lab, 0.5)
    assert condition(lab.status, "Degraded") == ("True", "ApiError")


# Many at once.


async def test_an_exhausted_quota_is_not_hammered(lab: PassLab) -> None:
    made = 0

    async def create(request: web.Request) -> web.StreamResponse:
        nonlocal made
        if made == 4:
            text = 'pods "math" is forbidden: exceeded quota: q, requested: pods=1, used: pods=4'
            return web.json_response({"reason": "Forbidden", "message": text}, status=403)
        made += 1
        return await _make(request)

    lab.api.answers["POST", PODS] = create
    lab.has_pool(replicas=60)
    await live(lab, 120)
    assert made == 4
    assert 10 <= tries(lab, ("POST", PODS)) <= 25
    assert condition(lab.status, "Degraded") == ("True", "Rejected")
    said = (
        "the API server rejected pod 'math-4-0': exceeded quota: q, requested: pods=1, used: pods=4"
    )
    assert lab.status["message"] == said
    lab.api.answers["POST", PODS] = _make
    await live(lab, 20)
    assert len(lab.pods) == 60, "all at once, as soon as there is room"


async def test_a_namespace_that_is_gone_is_not_hammered(lab: PassLab) -> None:
    """404 is routine of one pod, but not a reason to try all of them."""
    lab.api.answers["POST", PODS] = Fault(404, "NotFound").answer()
    lab.has_pool(replicas=60)
    await live(lab, 60)
    assert tries(lab, ("POST", PODS)) <= 30
    assert condition(lab.status, "Degraded") == ("True", "Rejected")


async def test_a_pod_that_is_refused_alone_holds_the_others_back_for_seconds(lab: PassLab) -> None:
    async def create(request: web.Request) -> web.StreamResponse:
        if json.loads(await request.text())["metadata"]["name"] == "math-0-0":
            return web.json_response({"reason": "Forbidden", "message": "not this one"}, status=403)
        return await _make(request)

    lab.api.answers["POST", PODS] = create
    lab.has_pool(replicas=20)
    await live(lab, 11)
    assert len(lab.pods) == 19


async def test_a_publish_is_no_reason_to_try_what_was_refused(lab: PassLab) -> None:
    _healthy(lab)
    lab.api.answers["POST", PODS] = Fault(403, "Forbidden").answer()
    await live(lab, 6)  # five of which are for the first answers
    lab.told.events.clear()
    for version in range(1, 8):
        lab.change(weights=target(1, version))
        await live(lab, 1)
        assert condition(lab.status, "Degraded") == ("True", "Rejected")
    assert tries(lab, ("POST", PODS)) == 1
    assert not [e for e in lab.told.events if e[1] in ("Recovered", "Rejected")]


async def test_a_change_of_spec_is_tried_at_once(lab: PassLab) -> None:
    lab.has_pool()
    lab.api.answers["POST", PODS] = Fault(403, "Forbidden").answer()
    await live(lab, 100)
    lab.api.answers["POST", PODS] = _make
    await lab.reconcile()
    assert lab.pods == [], "the next try is minutes away"
    lab.told.events.clear()
    lab.change(drainSeconds=31)
    await lab.reconcile(2)
    assert len(lab.pods) == 1
    assert [e[1] for e in lab.told.events] == ["Recovered"], "once it is done, not before"


async def test_who_may_not_be_deleted_goes_on_serving(lab: PassLab) -> None:
    """A rolling update under a policy that guards pods; else an update of weights waited for it for ever."""
    _serving(lab)
    await live(lab, 1)
    lab.api.answers["DELETE", f"{PODS}/math-0-0"] = Fault(403, "Forbidden").answer()
    lab.change(podTemplate={"labels": {"a": "b"}}, weights=target(1, 1))
    await live(lab, 30)
    assert lab.workers["10.0.0.0:8001"].active == ONE
    assert lab.status["readyReplicas"] == 1
    assert condition(lab.status, "Degraded") == ("True", "Rejected")
    assert "the deletion of pod 'math-0-0'" in lab.status["message"]


async def passes_in(lab: PassLab, seconds: float) -> int:
    """Count the passes of so many seconds, each when it is due and at least all 5 s."""
    end, count = lab.clock.steady + seconds, 0
    while lab.clock.steady < end:
        again = await lab.reconcile()
        count += 1
        await lab.called()
        await lab.polled()
        step = min(5.0 if again is None else max(again, 0.01), 5.0, end - lab.clock.steady)
        lab.clock.steady += step
        lab.clock.wall += step
    return count


async def test_a_refused_pod_costs_no_passes(lab: PassLab) -> None:
    _healthy(lab)
    lab.api.answers["POST", PODS] = Fault(403, "Forbidden").answer()
    await passes_in(lab, 60)
    assert await passes_in(lab, 100) < 40
    lab.change(replicas=1)
    await passes_in(lab, 30)
    assert await passes_in(lab, 100) < 40, "nor once nobody wants it"


@pytest.mark.parametrize("status", [503, 0])
async def test_all_goes_on_soon_after_an_outage(lab: PassLab, status: int) -> None:
    _not_served(lab)
    answers = dict(lab.api.answers)
    for route in [each for each in answers if each[0] != "GET"]:
        lab.api.answers[route] = Fault(status, "ServiceUnavailable").answer()
    end = lab.clock.steady + 300
    while lab.clock.steady < end:
        try:
            await live(lab, 5)
        except Unavailable:
            lab.clock.steady += 5
    lab.api.answers.update(answers)
    lab.written.clear()
    await live(lab, 40)
    assert lab.written


async def test_a_trainer_that_writes_the_object_refuses_nothing(lab: PassLab) -> None:
    _healthy(lab)
    takes, left = lab.api.answers["PATCH", f"{POOL}/status"], 8

    async def overtaken(request: web.Request) -> web.StreamResponse:
        nonlocal left
        if left:
            left -= 1
            lab.change(weights=target(1, 9 - left))
            return web.json_response({"reason": "Conflict", "message": "modified"}, status=409)
        assert callable(takes)
        return await takes(request)

    lab.api.answers["PATCH", f"{POOL}/status"] = overtaken
    await live(lab, 10)
    assert lab.written
    assert not [event for event in lab.told.events if event[:2] == ("Warning", "Rejected")]


async def test_an_object_made_anew_is_not_hindered_by_what_hindered_its_namesake(
    lab: PassLab,
) -> None:
    lab.has_pool(replicas=1)
    lab.api.answers["POST", PODS] = Fault(403, "Forbidden").answer()
    await live(lab, 700)
    lab.api.answers["POST", PODS] = _make
    before = tries(lab, ("POST", PODS))
    old = lab.ctx.store.find_pool(KEY)
    assert old is not None
    fresh = pool(replicas=1)
    fresh["metadata"] |= {"uid": "second", "resourceVersion": "900"}
    gone = {**old, "metadata": old["metadata"] | {"resourceVersion": "899"}}
    lab.sees("pools", "DELETED", gone)
    lab.sees("pools", "ADDED", fresh)
    await live(lab, 5)
    assert tries(lab, ("POST", PODS)) > before
