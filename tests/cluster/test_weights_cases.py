"""API.md's case table on real workers: at rest and while staging. One pool, from test to test.

`test_weights_commits` has the rows from the first commit call on.
"""

from __future__ import annotations

from typing import Any

from tests.support.cluster.fleets import Fleet, phases_of


def condition(status: dict[str, Any], kind: str) -> tuple[str, str]:
    """Status and reason of a condition."""
    found = [c for c in status["conditions"] if c["type"] == kind]
    return found[0]["status"], found[0]["reason"]


def test_complete(fleet: Fleet) -> None:
    status = fleet.status()
    assert fleet.update()["phase"] == "Complete"
    assert fleet.condition("WeightsSynced") == ("True", "Synced")
    active = {"epoch": fleet.identity[0], "version": fleet.identity[1]}
    assert status["weights"]["active"] == {"min": active, "max": active}
    assert status["weights"]["committed"]["rootHash"] == fleet.weights(0)["active"]["root_hash"]
    assert {(m["epoch"], m["version"]) for m in status["members"]} == {fleet.identity}


def test_target_rises_while_active(fleet: Fleet) -> None:
    old, before, gates = fleet.identity, fleet.now(), fleet.gates()
    with fleet.traffic(0, 1) as seen:
        new = fleet.raise_to("2")
        fleet.settled(new, 2)
    history = fleet.history(before)
    assert [p for p in phases_of(history) if p[0] == new] == [
        (new, "Staging"),
        (new, "Committing"),
        (new, "Complete"),
    ]
    under_way = [
        s for s in history if phases_of([s])[-1] in ((new, "Staging"), (new, "Committing"))
    ]
    assert {condition(s, "WeightsSynced") for s in under_way} == {
        ("False", "Staging"),
        ("False", "Committing"),
    }
    persisted = next(s for s in history if phases_of([s])[-1] == (new, "Committing"))
    top = persisted["weights"]["active"]["max"]
    assert (top["epoch"], top["version"]) == old, "the decision stands before the first commit"
    assert not [s for s in history if condition(s, "Degraded")[0] == "True"]
    assert seen.served == [old, new]
    assert not seen.refused
    assert not seen.failures
    assert {fleet.check(r.body) for r in seen.replies} == {old, new}
    assert fleet.gates() == gates, "a successful update flips no gate"


def test_target_rises_while_paused(fleet: Fleet) -> None:
    fleet.patch(state="Paused")
    fleet.eventually("the pool pauses", lambda: fleet.status()["phase"] == "Paused")
    new = fleet.raise_to("3")
    fleet.wait_phase("Complete", new)
    assert [fleet.active(r) for r in (0, 1)] == [new, new]
    assert fleet.condition("Ready") == ("False", "Paused")
    reply = fleet.ask(0)
    assert (reply.status, reply.body["type"]) == (503, "urn:rollout:problem:paused")
    fleet.eventually("nobody is in the Service", lambda: not fleet.endpoints())
    fleet.patch(state="Active")
    assert fleet.first_answer(0) == new
    fleet.settled(new, 2)


def test_target_rises_while_asleep(fleet: Fleet) -> None:
    old = fleet.identity
    fleet.patch(state="Asleep")
    fleet.eventually("the pool sleeps", lambda: fleet.status()["phase"] == "Asleep")
    new = fleet.raise_to("1")
    fleet.wait_phase("Complete", new)
    assert fleet.committed() == new
    assert fleet.condition("WeightsSynced") == ("False", "Asleep")
    assert [fleet.active(r) for r in (0, 1)] == [old, old], "nobody is woken for it"
    assert fleet.ask(1).body["type"] == "urn:rollout:problem:asleep"
    with fleet.traffic(0, 1) as seen:
        fleet.patch(state="Active")
        fleet.settled(new, 2)
    assert seen.served == [new], "the old weights are never served again"


def test_staging_newer_target_same_epoch(fleet: Fleet) -> None:
    before, commits, old = fleet.now(), fleet.weights(0)["commit_seq"], fleet.identity
    with fleet.frozen(1):
        first = fleet.raise_to("2")
        fleet.eventually("replica 0 has staged", lambda: fleet.staged(0) == first)
        fleet.raise_to("3")
        newest = fleet.raise_to("1")
        assert fleet.check(fleet.generate(0)) == old
        assert fleet.phases() == [(first, "Staging")]
        assert fleet.condition("WeightsSynced") in (("False", "Staging"), ("Stale", "Staging"))
    fleet.settled(newest, 2)
    done = [i for i, phase in fleet.phases(before) if phase == "Complete"]
    assert done[-2:] == [first, newest], "the current one is finished, then only the newest"
    assert fleet.weights(0)["commit_seq"] == commits + 2


def test_staging_fails_and_a_newer_target_follows(fleet: Fleet) -> None:
    old, before = fleet.identity, fleet.now()
    bad = fleet.raise_to("bad")
    fleet.eventually("Degraded", lambda: fleet.condition("Degraded") == ("True", "WeightsFailed"))
    message = fleet.status()["message"]
    assert "w-0-0" in message or "w-1-0" in message
    assert "tensor" in message
    assert fleet.condition("WeightsSynced") == ("False", "Staging")
    fleet.eventually("it is tried again", lambda: fleet.update()["attempts"] >= 3)
    for replica in (0, 1):
        fleet.check(fleet.generate(replica), old)
    assert len(fleet.endpoints()) == 2

    path = fleet.publish("3")
    fleet.volume.cut_off(path)
    cut = fleet.point(path)
    fleet.eventually("the file is named", lambda: "truncated" in fleet.status()["message"])
    assert fleet.update()["version"] == cut[1]
    fleet.check(fleet.generate(0), old)

    good = fleet.raise_to("2")
    fleet.settled(good, 2)
    assert fleet.condition("Degraded")[0] == "False"
    seen = fleet.phases(before)
    assert (bad, "Superseded") in seen or (cut, "Staging") in seen
    assert not [p for p in seen if p[0] in (bad, cut) and p[1] in ("Committing", "Complete")]


def test_staging_deadline(fleet: Fleet) -> None:
    old = fleet.identity
    path = fleet.publish("3", late=True)
    new = fleet.point(path, deadlineSeconds=2)
    fleet.wait_phase("Failed", new)
    assert fleet.condition("Progressing") == ("False", "DeadlineExceeded")
    assert fleet.condition("WeightsSynced") == ("False", "DeadlineExceeded")
    assert fleet.condition("Ready")[0] == "True"
    fleet.check(fleet.generate(), old)
    before = fleet.now()
    fleet.volume.publish("3", path)
    fleet.settled(new, 2)
    assert [p for p in fleet.phases(before) if p[1] != "Failed"] == [
        (new, "Committing"),
        (new, "Complete"),
    ]


def test_staging_higher_epoch(fleet: Fleet) -> None:
    before, commits, old = fleet.now(), fleet.weights(0)["commit_seq"], fleet.identity
    with fleet.frozen(1):
        first = fleet.raise_to("1")
        fleet.eventually("replica 0 has staged", lambda: fleet.staged(0) == first)
        second = fleet.raise_to("2", epoch=first[0] + 1)
        fleet.eventually("fenced", lambda: fleet.weights(0)["fence_epoch"] == second[0])
        assert fleet.check(fleet.generate(0)) == old
        body = {"epoch": first[0], "version": 999, "source": {"path": "w-1"}}
        late = fleet.control(0, "weights/stage", body)
        assert (late.status, late.body["type"]) == (409, "urn:rollout:problem:stale-epoch")
    fleet.settled(second, 2)
    seen = fleet.phases(before)
    assert not [p for p in seen if p[0] == first and p[1] in ("Committing", "Complete")]
    assert fleet.weights(0)["commit_seq"] == commits + 1


def test_staging_then_asleep(fleet: Fleet) -> None:
    with fleet.frozen(1):
        new = fleet.raise_to("3")
        fleet.eventually("replica 0 has staged", lambda: fleet.staged(0) == new)
        fleet.patch(state="Asleep")
        fleet.eventually("it is superseded", lambda: fleet.update()["phase"] != "Staging")
    fleet.eventually("the pool sleeps", lambda: fleet.status()["phase"] == "Asleep")
    update = fleet.update()
    assert ((update["epoch"], update["version"]), update["phase"]) == (new, "Superseded")
    fleet.eventually(
        "both have discarded it", lambda: not any(fleet.weights(r)["staged"] for r in (0, 1))
    )
    fleet.eventually("nobody is in the Service", lambda: not fleet.endpoints())
    with fleet.traffic(0, 1) as seen:
        fleet.patch(state="Active")
        fleet.settled(new, 2)
    assert seen.served == [new]


def test_generations_over_an_update(fleet: Fleet) -> None:
    """What every policy does to every engine's outputs is in tests/contract."""
    old, tokens = fleet.identity, 1000  # seconds: they still run when the commit comes
    running = [fleet.long_request(r, tokens) for r in (0, 1, None)]
    keep = {"policy": "Keep", "deadlineSeconds": 60}
    new = fleet.raise_to("1" if fleet.bytes_of[old] == "2" else "2", inFlight=keep)
    outputs = [reply.result(60).body["outputs"][0] for reply in running]
    fleet.settled(new, 2)
    for output in outputs:
        edges = [edge for s in output["weights"] for edge in (s["start"], s["end"])]
        assert (edges[0], edges[-1]) == (0, tokens)
        assert edges[1:-1:2] == edges[2::2], "the spans are contiguous"
        spans = [((s["epoch"], s["version"]), s["stale_kv"]) for s in output["weights"]]
        assert spans == [(old, False), (new, True)]


def test_staging_restart_and_scale_up_stay_outside_the_barrier(fleet: Fleet) -> None:
    old, restarts = fleet.identity, fleet.status()["restarts"]
    path = fleet.publish("1", late=True)
    new = fleet.point(path)
    fleet.wait_phase("Staging", new)
    fleet.kill(1)
    fleet.patch(replicas=3)
    assert [fleet.first_answer(r) for r in (1, 2)] == [old, old], "nothing below what is committed"
    fleet.eventually("all serve", lambda: fleet.status().get("readyReplicas") == 3)
    assert fleet.status()["restarts"] == restarts + 1
    assert fleet.phases() == [(new, "Staging")]
    assert [fleet.weights(r)["staged"] for r in (1, 2)] == [None, None], "joiners do not stage"
    newest = fleet.raise_to("2")
    fleet.settled(newest, 3)
