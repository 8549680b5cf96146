"""Whole passes: what they start from, the order of what they do, what they remember and tell."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest
from aiohttp import web

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.revision import pod_revision
from rollout_operator.api.spec import parse_spec
from rollout_operator.config import OperatorConfig
from rollout_operator.passes.plan_actions import soonest_requeue
from rollout_operator.passes.pool_memory import PoolMemory
from rollout_operator.passes.reconcile import Reconciler
from rollout_worker.schemas import WeightsId
from tests.support.unit.passlab import (
    BUDGET,
    KEY,
    PODS,
    POOL,
    PassLab,
    address_of,
    condition,
    head,
    pod,
    pool,
    settled_services,
    worker_of,
)
from tests.support.unit.poolspecs import GANG, target

ONE = WeightsId(epoch=1, version=1)


async def serving(lab: PassLab, replicas: int = 1, **spec: Any) -> list[str]:
    """A pool at rest, whose heads serve; returns their uids."""
    lab.has_pool(replicas=replicas, **spec)
    uids = [
        lab.has_pod(head(n, serving=True, boot=f"b{n}"), worker_of(boot=f"b{n}"))
        for n in range(replicas)
    ]
    await lab.settled(2)
    assert condition(lab.status, "Ready")[0] == "True", lab.status
    return uids


# What a pass starts from.


@pytest.mark.parametrize("gone", [False, True], ids=["changed", "deleted"])
async def test_a_pass_whose_object_is_another_one_by_now_does_nothing_more(
    lab: PassLab, gone: bool
) -> None:
    """Its status says the same as before, is not written, and so conflicts with nothing."""
    takes = lab.api.answers["PATCH", f"{POOL}/status"]

    async def overtake(request: web.Request) -> web.StreamResponse:
        answer = await takes(request)
        now = lab.stored
        later = {**now, "metadata": now["metadata"] | {"resourceVersion": "50"}}
        if gone:
            lab.sees("pools", "DELETED", later)
        else:
            lab.sees("pools", "MODIFIED", later | {"spec": now["spec"] | {"suspend": True}})
        return answer

    lab.has_pool()
    lab.api.answers["PATCH", f"{POOL}/status"] = overtake
    assert await lab.reconcile() == 0.0
    assert lab.pod_writes == []
    lab.api.answers["PATCH", f"{POOL}/status"] = takes
    await lab.reconcile()
    assert lab.pod_writes == [], "nor the next one, which knows"


async def test_nothing_is_decided_before_each_head_was_asked_once(lab: PassLab) -> None:
    lab.has_pool(replicas=2)
    for number in range(2):
        lab.has_pod(head(number, serving=True), worker_of())
    assert await lab.reconcile() == 5.0
    lab.clock.steady += 1
    assert await lab.reconcile() == 4.0
    assert lab.written == []
    await lab.polled()
    await lab.reconcile()
    assert condition(lab.status, "Ready")[0] == "True"


async def test_a_pass_that_waits_for_first_answers_reads_nothing_again(lab: PassLab) -> None:
    lab.has_pool(replicas=2)
    lab.has_pod(head(0), worker_of())
    await lab.reconcile()
    lab.has_pod(head(1), worker_of())
    await lab.reconcile()
    assert len(lab.poller.fast) == 1, "the second head is read once the first has answered"
    await lab.polled()
    await lab.reconcile()
    assert len(lab.poller.fast) == 2


async def test_a_head_that_does_not_answer_is_waited_for_five_seconds_once(lab: PassLab) -> None:
    lab.has_pool(replicas=2)
    lab.has_pod(head())
    await lab.reconcile()
    lab.clock.steady += 5
    await lab.reconcile()
    assert len(lab.written) == 1
    lab.has_pod(head(1))
    assert await lab.reconcile() != 5.0, "a head that comes later holds nothing up"


async def test_a_finished_head_is_not_asked(lab: PassLab) -> None:
    lab.has_pool()
    lab.has_pod({**head(), "status": {**head()["status"], "phase": "Failed"}})
    lab.api.answer("POST", PODS, pod(uid="new"), 201)
    await lab.reconcile()
    assert lab.poller.fast == {}
    assert lab.written


async def test_a_pod_of_another_name_is_none_of_ours_whatever_it_is_patched_to(
    lab: PassLab,
) -> None:
    await serving(lab)
    lab.has_pod(head(uid="impostor", name="x-0-0"), worker_of())
    lab.asked.clear()
    lab.clock.steady += 2  # progress is written once a second
    await lab.settled()
    assert ("impostor" in lab.poller.fast, lab.asked) == (False, [])
    assert condition(lab.status, "Degraded") == ("True", "PodTrouble")
    assert condition(lab.status, "Ready")[0] == "True"
    assert lab.status["message"].startswith("x-0-0: it has the labels and the owner reference")
    assert not [name for _, name in lab.pod_writes if name.startswith("x-0-0")]


async def test_a_pod_of_another_account_is_none_of_ours_and_has_our_name(lab: PassLab) -> None:
    lab.has_pool()
    theirs = head(uid="impostor") | {"spec": {"serviceAccountName": "default"}}
    lab.has_pod(theirs, worker_of())
    lab.api.answer("POST", PODS, {"reason": "AlreadyExists", "message": "it exists"}, 409)
    lab.api.answer("GET", f"{PODS}/math-0-0", theirs)
    await lab.settled()
    assert (lab.poller.fast, lab.asked) == ({}, []), "no call, no token"
    assert condition(lab.status, "Degraded") == ("True", "NameConflict")
    assert "runs under service account 'default', not 'rollout-worker'" in lab.status["message"]
    assert {verb for verb, _ in lab.pod_writes} == {"POST", "GET"}, "it is left alone"


def test_a_spec_and_a_status_are_parsed_once() -> None:
    """A pool of hundreds of replicas has a long status, and a pass every second."""
    memory, first = PoolMemory(), pool()
    stored, spec = memory.read_status(first), memory.read_spec(first)
    assert memory.read_status(first) is stored
    told = {**first, "metadata": first["metadata"] | {"resourceVersion": "8"}}
    told["status"] = {"message": "new"}
    assert memory.read_status(told).message == "new"
    assert memory.read_spec(told) is spec, "of the same generation"
    # After a restore of etcd a generation may come again with another spec.
    for change in ({}, {"generation": 2}, {"uid": "another"}):
        other = {**pool(replicas=3), "metadata": first["metadata"] | change}
        assert memory.read_spec(other).replicas == 3
        assert memory.read_spec(first).replicas == 1


def test_pools_of_one_manifest_share_their_spec_as_long_as_one_of_them_has_it() -> None:
    one, other = PoolMemory(), PoolMemory()
    spec = one.read_spec(pool(replicas=5))
    assert other.read_spec(pool(replicas=5)) is spec
    assert pod_revision(spec) == pod_revision(parse_spec(pool(replicas=5)))
    known = weakref.ref(spec)
    del spec
    other.read_spec(pool(replicas=6))
    one.read_spec(pool(replicas=6))
    gc.collect()
    assert known() is None


# The order of what a pass does.


def phase(lab: PassLab) -> str:
    found: str = lab.status["weights"]["lastUpdate"]["phase"]
    return found


async def test_who_goes_leaves_the_service_first_and_who_comes_enters_it_last(lab: PassLab) -> None:
    lab.has_pool(replicas=3, updateStrategy={"maxUnavailable": 3})
    lab.has_pod(head(0), worker_of())
    outdated = head(2, serving=True)
    outdated["metadata"]["labels"][names.LABEL_REVISION] = "an old one"
    lab.has_pod(outdated, worker_of())
    lab.api.answer("POST", PODS, pod(1), 201)
    await lab.reconcile()
    await lab.polled()
    await lab.reconcile()
    assert lab.pod_writes == [
        ("PATCH", "math-2-0/status"),
        ("DELETE", "math-2-0"),
        ("POST", ""),
        ("PATCH", "math-0-0/status"),
    ]
    gates = {p["metadata"]["name"]: _gate(p) for p in lab.pods if _gate(p)}
    assert set(gates) == {"math-0-0", "math-2-0"}
    assert (gates["math-0-0"]["status"], gates["math-2-0"]["status"]) == ("True", "False")
    assert (gates["math-0-0"]["reason"], gates["math-2-0"]["reason"]) == ("Serving", "NotServing")
    assert gates["math-0-0"]["message"].startswith("boot b: ")


def _gate(found: Obj) -> Obj:
    conditions = found["status"].get("conditions", ())
    return next((c for c in conditions if c["type"] == names.GATE_SERVING), {})


async def test_an_update_is_decided_in_status_before_anybody_is_told_to_commit(
    lab: PassLab,
) -> None:
    uids = await serving(lab, 2)
    lab.change(weights=target(1, 1))
    assert await lab.reconcile() != 0.0, "calls are under way"
    assert all(lab.poller.fast[uid] for uid in uids), "they serve, and have something to say"
    lab.clock.wall += 30
    lab.clock.steady += 30
    again: float | None = None
    while phase(lab) != "Committing":
        assert phase(lab) == "Staging"
        await lab.called()
        await lab.polled()
        again = await lab.reconcile()
    assert again == 0.0
    await lab.called()
    assert [verb for _, verb in lab.asked] == ["require", "require", "stage", "stage"]
    await lab.settled()
    assert [verb for _, verb in lab.asked].count("commit") == 2
    assert phase(lab) == "Complete"
    assert {w.active for w in lab.workers.values()} == {ONE}
    notes = [reason for _, reason, _ in lab.told.events if reason.startswith("Weights")]
    assert notes == ["WeightsStaging", "WeightsCommitting", "WeightsCommitted"]
    at = 'namespace="rl",outcome="Complete",pool="math"'
    assert f"rollout_pool_weights_update_seconds_count{{{at}}} 1.0" in lab.page
    assert f"rollout_pool_weights_update_seconds_sum{{{at}}} 30.0" in lab.page


async def test_the_barrier_goes_from_pass_to_pass(lab: PassLab) -> None:
    """Who serves when an update begins stands in no status; who comes later is not of them."""
    await serving(lab, 2)
    lab.api.answer("POST", PODS, pod(2), 201)
    lab.change(replicas=3, weights=target(1, 1))
    await lab.reconcile()
    lab.has_pod(head(2, serving=True, boot="b2", resourceVersion="60"), worker_of(boot="b2"))
    for _ in range(2):
        await lab.reconcile()
        await lab.polled()
        assert lab.reconciler._memory[KEY].barrier == frozenset({"b0", "b1"})


async def test_a_pool_gets_its_services_and_its_budget(lab: PassLab) -> None:
    async def create(request: web.Request) -> web.StreamResponse:
        made = json.loads(await request.text())
        made["metadata"]["uid"] = f"uid of {made['metadata']['name']}"
        return web.json_response(made, status=201)

    lab.api.answers["POST", "/api/v1/namespaces/rl/services"] = create
    lab.api.answers["POST", BUDGET.removesuffix("/math")] = create
    lab.ctx.store.upsert_written("pools", pool(replicas=0))
    for _ in range(2):
        await lab.reconcile()
        assert [s["metadata"]["name"] for s in lab.ctx.store.pool_services(KEY)] == [
            "math",
            "math-heads",
        ]
        assert [b["metadata"]["name"] for b in lab.ctx.store.pool_budgets(KEY)] == ["math"]
    assert [method for method, *_ in lab.api.requests].count("POST") == 3


@pytest.mark.parametrize(
    ("waits", "least"), [((3.0, None, 1.0), 1.0), ((None, 0.0), 0.0), ((None, None), None)]
)
def test_the_next_look_is_at_the_earliest_time(
    waits: tuple[float | None, ...], least: float | None
) -> None:
    assert soonest_requeue(*waits) == least


async def test_a_status_that_somebody_else_wrote_meanwhile_is_tried_again_soon(
    lab: PassLab,
) -> None:
    lab.has_pool()
    lab.api.answer("PATCH", f"{POOL}/status", {"reason": "Conflict", "message": "changed"}, 409)
    assert await lab.reconcile() == 0.2
    assert lab.pod_writes == [], "status holds the decisions that everything else relies on"


async def test_a_status_is_written_over_the_one_that_was_read(lab: PassLab) -> None:
    lab.has_pool(replicas=0)
    await lab.reconcile()
    [(method, path, body)] = lab.api.requests
    assert (method, path.partition("?")[0]) == ("PATCH", f"{POOL}/status")
    meta = {"name": "math", "namespace": "rl", "uid": "ours", "resourceVersion": "7"}
    assert json.loads(body)["metadata"] == meta
    now = lab.stored
    assert now["status"] == lab.status
    await lab.reconcile(2)
    assert len(lab.written) == 1, "what says nothing new is not written"


# Who is polled often.


async def test_only_heads_that_have_something_new_to_say_are_asked_often(lab: PassLab) -> None:
    one, two = await serving(lab, 2)
    assert lab.poller.fast == {one: False, two: False}
    lab.change(replicas=3)
    three = lab.has_pod(head(2), worker_of(loading=True))
    await lab.reconcile()
    assert lab.poller.fast == {one: False, two: False, three: True}


async def test_a_head_that_serves_is_asked_seldom_until_its_gate_is_set(lab: PassLab) -> None:
    lab.has_pool(replicas=2)
    ready = lab.has_pod(head(0), worker_of())
    starting = lab.has_pod(head(1), worker_of(loading=True))
    await lab.reconcile()
    await lab.polled()
    await lab.reconcile()
    assert lab.poller.fast == {ready: False, starting: True}


async def test_a_pool_that_rests_is_asked_seldom(lab: PassLab) -> None:
    [uid] = await serving(lab)
    lab.change(state="Paused")
    await lab.reconcile()
    assert lab.poller.fast == {uid: False}, "its gate is on yet"
    await lab.called()
    await lab.polled()
    await lab.reconcile()
    await lab.reconcile()
    assert [verb for _, verb in lab.asked] == ["pause"]
    assert condition(lab.status, "Progressing")[0] == "False"
    assert _gate(lab.pods[0])["status"] == "False"
    assert lab.poller.fast == {uid: False}


async def test_a_head_that_is_gone_is_forgotten(lab: PassLab) -> None:
    one, two = await serving(lab, 2)
    gone = next(p for p in lab.pods if p["metadata"]["uid"] == two)
    lab.sees("pods", "DELETED", gone)
    lab.api.answer("POST", PODS, pod(1, uid="new"), 201)
    await lab.reconcile()
    assert set(lab.poller.fast) == {one}


# A pause of the operator.


async def test_a_paused_pool_is_told_of_and_not_touched(lab: PassLab) -> None:
    await serving(lab, 2)
    lab.asked.clear()
    lab.api.requests.clear()
    before = lab.status
    lab.change({names.ANNOTATION_PAUSED: "true"}, replicas=3, weights=target(1, 1))
    lab.workers.clear()
    lab.told.events.clear()
    assert await lab.reconcile() is None
    assert lab.pod_writes == []
    assert lab.asked == []
    assert names.ANNOTATION_PAUSED in lab.status["message"]
    assert lab.status["weights"]["committed"] == before["weights"]["committed"]
    assert "lastUpdate" not in lab.status["weights"]
    assert not [e for e in lab.told.events if e[1].startswith("Weights")]
    assert lab.reconciler._memory[KEY].barrier is None, "no update has begun"
    lab.change()
    lab.api.answer("POST", PODS, pod(2), 201)
    await lab.reconcile()
    assert ("POST", "") in lab.pod_writes
    assert names.ANNOTATION_PAUSED not in lab.status["message"]


async def test_while_it_is_paused_a_failed_replica_counts_no_restart(lab: PassLab) -> None:
    await serving(lab, 2)
    failed = {**pod(1, resourceVersion="90"), "status": {"phase": "Failed"}}
    lab.has_pod(failed)
    lab.change({names.ANNOTATION_PAUSED: "true"})
    await lab.reconcile(2)
    assert (lab.status["restarts"], lab.status.get("replacing", [])) == (0, [])
    lab.change()
    await lab.reconcile()
    assert lab.status["restarts"] == 1


# What can't be read, and what is gone.


async def test_a_spec_that_can_not_be_read_is_told_and_its_pods_are_left_alone(
    lab: PassLab,
) -> None:
    await serving(lab)
    lab.api.requests.clear()
    lab.change(engine={"type": "unknown"})
    assert await lab.reconcile() is None
    assert await lab.reconcile() is None
    assert condition(lab.status, "Degraded") == ("True", "InvalidSpec")
    assert condition(lab.status, "Ready")[0] == "True"
    assert lab.pod_writes == []
    assert lab.poller.fast == {}, "nobody notices which of them are gone"
    lab.change(engine={"type": "hf"})
    assert await lab.reconcile(), "it waits for their first answers"
    await lab.polled()
    await lab.reconcile()
    assert condition(lab.status, "Degraded")[0] == "False"


async def test_a_status_that_can_not_be_read_is_kept_and_told_once(lab: PassLab) -> None:
    found = pool()
    committed = {"epoch": 3, "version": 4, "source": {}, "rootHash": "as a newer version wrote it"}
    found["status"] = {"weights": {"committed": committed}, "replicas": 4}
    lab.ctx.store.upsert_written("pools", found)
    assert await lab.reconcile() is None
    assert await lab.reconcile() is None
    [status] = lab.written
    assert (status["weights"]["committed"], status["replicas"]) == (committed, 4)
    assert condition(status, "Degraded") == ("True", "UnreadableStatus")
    [(kind, reason, _)] = lab.told.events
    assert (kind, reason) == ("Warning", "UnreadableStatus")
    assert lab.pod_writes == []
    assert 'rollout_pool_replicas{namespace="rl",pool="math"} 4.0' in lab.page


async def test_an_unreadable_status_of_a_pool_that_is_gone_is_no_error(lab: PassLab) -> None:
    lab.ctx.store.upsert_written("pools", {**pool(), "status": {"replicas": "many"}})
    lab.api.answer("PATCH", f"{POOL}/status", {"reason": "NotFound", "message": "gone"}, 404)
    assert await lab.reconcile() is None


@pytest.mark.parametrize("goes", ["deleted", "terminating"])
async def test_a_pool_that_goes_is_let_go(lab: PassLab, goes: str) -> None:
    await serving(lab)
    if goes == "deleted":
        lab.goes()
    else:
        meta = {"deletionTimestamp": "1970-01-12T13:46:40Z", "resourceVersion": "99"}
        terminating = {**lab.stored, "metadata": lab.stored["metadata"] | meta}
        lab.ctx.store.upsert_written("pools", terminating)
    assert await lab.reconcile() is None
    assert lab.poller.fast == {}
    assert 'pool="math"' not in lab.page


async def test_the_token_of_a_pool_that_is_gone_is_forgotten(lab: PassLab) -> None:
    minted = "/api/v1/namespaces/rollout/serviceaccounts/operator/token"
    lab.api.answer("POST", minted, {"status": {"token": "t"}})
    kube = lab.ctx.kube
    kube._account = ("rollout", "operator")
    lab.has_pool()
    for _ in range(2):
        assert await kube.get_token(names.token_audience(*KEY)) == "t"
    lab.goes()
    await lab.reconcile()
    await kube.get_token(names.token_audience(*KEY))
    assert [path for _, path, _ in lab.api.requests].count(minted) == 2


async def test_a_scale_down_asks_once_more_who_has_least_to_do(lab: PassLab) -> None:
    """A load that changes wakes no pass: by the last polls both are idle."""
    await serving(lab, replicas=2)
    busy = lab.workers[address_of(head(1))]
    busy.in_flight = 3
    smaller = pool(replicas=1)
    smaller["metadata"] |= {"generation": 2, "resourceVersion": "200"}
    lab.ctx.store.upsert_written("pools", smaller)
    polls = asyncio.create_task(lab.poller.run())
    await lab.reconcile()
    polls.cancel()
    assert [name for method, name in lab.pod_writes if method == "DELETE"] == ["math-0-0"]


@pytest.mark.parametrize("left", [False, True], ids=["without a trace", "with a pod left"])
async def test_a_pool_made_again_under_the_name_is_another_one(lab: PassLab, left: bool) -> None:
    """What its predecessor met, or was found out about it, is not true of it."""
    lab.has_pool(replicas=2)
    if left:
        lab.has_pod(pod(1))
    lab.api.answer("POST", PODS, {"reason": "Forbidden", "message": "exceeded quota"}, 403)
    await lab.reconcile(2)
    assert condition(lab.status, "Degraded") == ("True", "Rejected")
    lab.goes()
    await lab.reconcile()
    lab.written.clear()
    again = pool()
    again["metadata"] |= {"uid": "another", "resourceVersion": "200"}
    lab.ctx.store.upsert_written("pools", again)
    await lab.reconcile()
    assert condition(lab.written[0], "Degraded")[0] == "False"


async def test_what_is_left_of_a_deleted_pool_is_freed_once_it_is_overdue(lab: PassLab) -> None:
    stuck = pod(deletionTimestamp="1970-01-12T13:46:40Z", deletionGracePeriodSeconds=0)
    lab.has_pod(stuck)
    lab.has_pod(pod(1))
    assert await lab.reconcile() == 30.0
    assert lab.pod_writes == []
    for _ in range(2):
        lab.clock.wall += 30
        lab.clock.steady += 30
        assert await lab.reconcile() == 30.0
        lab.clock.wall += 10
        lab.clock.steady += 10
        assert await lab.reconcile() == 20.0
        lab.clock.wall -= 10
        lab.clock.steady -= 10
    assert lab.pod_writes == [("DELETE", "math-0-0")] * 2, "that one alone, every 30 s"
    options = json.loads(lab.api.requests[0][2])
    assert (options["gracePeriodSeconds"], options["preconditions"]["uid"]) == (
        0,
        "uid of math-0-0",
    )


# What stands in the way.


async def test_an_engine_without_an_image_is_told_with_the_fix(lab: PassLab) -> None:
    lab.has_pool()
    object.__setattr__(lab.ctx, "config", OperatorConfig(engines={}))
    assert await lab.reconcile() == 0.0
    await lab.reconcile()
    assert condition(lab.status, "Degraded") == ("True", "Rejected")
    assert "set spec.engine.image, or engines.hf.image" in lab.status["message"]
    assert lab.pod_writes == []


async def test_a_name_that_gets_free_is_looked_at_again_before_long(lab: PassLab) -> None:
    """Nobody shows us the end of a stranger's pod."""
    lab.has_pool()
    going = pod(ownerReferences=[], labels={}, deletionTimestamp="1970-01-12T13:46:40Z")
    lab.api.answer("POST", PODS, {"reason": "AlreadyExists", "message": "exists"}, 409)
    lab.api.answer("GET", f"{PODS}/math-0-0", going)
    assert await lab.reconcile(2) == 10.0
    assert condition(lab.status, "Degraded")[0] == "False"


async def test_what_was_refused_is_known_while_another_pod_gets_its_labels(lab: PassLab) -> None:
    """Else a rank that runs and waits for the refused one would be taken for the rest of its gang."""
    made = lab.has_pool(replicas=2, **GANG | {"engine": {"type": "vllm", "image": "x"}})
    revision = {names.LABEL_REVISION: pod_revision(parse_spec(made))}
    mine = names.worker_labels("math", 0, 0) | revision
    lab.has_pod(pod(labels=mine))
    labels = {rank: mine | names.worker_labels("math", 1, rank) for rank in (0, 1)}
    lab.has_pod(pod(1, labels=labels[0]))
    member = pod(1, labels=labels[1], name="math-1-1", uid="member")
    lab.has_pod(member)
    lab.api.answer("POST", PODS, {"reason": "Forbidden", "message": "exceeded quota"}, 403)
    await lab.reconcile(2)
    assert ("POST", "") in lab.pod_writes
    lab.has_pod(head(labels=mine, resourceVersion="6"))
    lab.has_pod(head(1, labels=labels[0], resourceVersion="6"))
    lab.sees("pods", "DELETED", member)
    bare = {**member["metadata"], "labels": {}, "resourceVersion": "8"}
    lab.api.answer("GET", f"{PODS}/math-1-1", {**member, "metadata": bare})
    again = {**bare, "labels": labels[1], "resourceVersion": "9"}
    lab.api.answer("PATCH", f"{PODS}/math-1-1/status", {**member, "metadata": again})
    lab.api.requests.clear()
    assert await lab.reconcile() == 0.0
    assert ("PATCH", "math-1-1/status") in lab.pod_writes
    await lab.reconcile(2)
    assert ("DELETE", "math-0-0") not in lab.pod_writes


async def test_a_pod_without_its_labels_gets_them_before_anything_else(lab: PassLab) -> None:
    await serving(lab)
    [mine] = lab.pods
    labels = dict(mine["metadata"]["labels"])
    del labels[names.LABEL_NAME]
    meta = mine["metadata"] | {"labels": labels, "resourceVersion": "50"}
    lab.has_pod({**mine, "metadata": meta})
    lab.api.requests.clear()
    assert await lab.reconcile() == 0.0
    assert lab.pod_writes == [("PATCH", "math-0-0/status")]
    [mended] = lab.pods
    assert mended["metadata"]["labels"][names.LABEL_NAME] == names.WORKER_APP


# What is told.


async def test_the_figures_are_those_of_the_pool(lab: PassLab) -> None:
    await serving(lab, 2)
    for figure in ("epoch", "version"):
        at = 'namespace="rl",pool="math",which="target"'
        assert f"rollout_pool_weights_{figure}{{{at}}} 0.0" in lab.page
    lab.change(replicas=3, weights=target(2, 5))
    lab.api.answer("POST", PODS, pod(2), 201)
    await lab.reconcile()
    page = lab.page
    for line in (
        'rollout_pool_replicas_desired{namespace="rl",pool="math"} 3.0',
        'rollout_pool_replicas_ready{namespace="rl",pool="math"} 2.0',
        'rollout_pool_replicas_asleep{namespace="rl",pool="math"} 0.0',
        'rollout_pool_restarts_total{namespace="rl",pool="math"} 0.0',
        'rollout_pool_weights_epoch{namespace="rl",pool="math",which="target"} 2.0',
        'rollout_pool_weights_version{namespace="rl",pool="math",which="target"} 5.0',
        'rollout_pool_weights_epoch{namespace="rl",pool="math",which="committed"} 0.0',
        'rollout_pool_weights_version{namespace="rl",pool="math",which="active_min"} 0.0',
        'rollout_pool_weights_version{namespace="rl",pool="math",which="active_max"} 0.0',
        'rollout_pool_condition{namespace="rl",pool="math",status="True",type="Progressing"} 1.0',
    ):
        assert line in page


async def test_what_changes_is_an_event_once(lab: PassLab) -> None:
    await serving(lab)
    assert [e[:2] for e in lab.told.events] == [("Normal", "Ready")]
    await lab.reconcile()
    assert len(lab.told.events) == 1
    lab.told.events.clear()
    lab.change(suspend=True)
    await lab.reconcile()
    assert [e[:2] for e in lab.told.events] == [("Normal", "NotReady")]
    [gone] = lab.pods
    lab.sees("pods", "DELETED", gone)
    await lab.reconcile()
    assert [e[:2] for e in lab.told.events][1:] == [("Normal", "Suspended")]


async def test_a_pool_whose_spec_leaves_replicas_out_has_one(lab: PassLab) -> None:
    found = pool()
    del found["spec"]["replicas"]
    lab.ctx.store.upsert_written("pools", found)
    settled_services(lab.ctx)
    lab.api.answer("POST", PODS, pod(), 201)
    await lab.reconcile()
    assert lab.pod_writes == [("POST", "")]
    assert 'rollout_pool_replicas_desired{namespace="rl",pool="math"} 1.0' in lab.page


async def test_a_new_process_does_not_tell_the_same_again(lab: PassLab) -> None:
    await serving(lab)
    lab.told.events.clear()
    count = len(lab.written)
    lab.reconciler = Reconciler(lab.ctx)
    await lab.settled(2)
    assert (lab.told.events, len(lab.written)) == ([], count)


async def test_a_sentence_is_logged_when_it_is_new(
    lab: PassLab, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="rollout_operator.passes.pass_reporting")
    await serving(lab)
    told = [r.getMessage() for r in caplog.records if r.name.endswith("pass_reporting")]
    assert told[-1] == lab.status["message"]
    assert len(told) == len(set(told))
    await lab.reconcile(3)
    assert len([r for r in caplog.records if r.name.endswith("pass_reporting")]) == len(told)
    lab.change({names.ANNOTATION_PAUSED: "true"})
    await lab.reconcile()
    assert names.ANNOTATION_PAUSED in caplog.messages[-1]


async def test_calls_to_a_pool_of_the_same_name_before_are_forgotten(lab: PassLab) -> None:
    [uid] = await serving(lab)
    lab.refusals["sleep"] = {"type": "urn:rollout:problem:held", "detail": "no", "status": 409}
    lab.change(state="Asleep")
    await lab.reconcile()
    await lab.called()
    assert lab.calls.call_failures(uid)
    again = pool()
    again["metadata"] |= {"uid": "another", "resourceVersion": "900"}
    lab.ctx.store.upsert_written("pools", again)
    await lab.reconcile()
    assert not lab.calls.call_failures(uid)
