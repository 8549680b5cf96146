"""Rows of API.md's case table on real workers, those in which the world has a say: one pool, from test to test.

What a pool does in each row is decided by `core/updates`, row by row in tests/unit/operator/core/test_operator_updates.py; what a
worker makes of the calls is in tests/contract, and both together, with accidents, in test_operator_accidents.py.
"""

from __future__ import annotations

from typing import Any

from localkube import Cluster
from tests.support.cluster.fleets import Fleet, phases_of
from tests.support.cluster.pools import await_takeover, kill_leader
from tests.support.cluster.versions import Identity

PATIENT = {"policy": "Drain", "deadlineSeconds": 60}
"""A request under way keeps a replica from committing: so an update stays in `Committing` until a test ends it."""


def condition(status: dict[str, Any], kind: str) -> tuple[str, str]:
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


def lost_between_stage_and_commit(fleet: Fleet) -> tuple[Identity, str]:
    """An update that replica 0 has committed; replica 1 drops it as soon as it goes on.

    Replica 1 stands still when the commit call comes, and the trainer's discard came before.
    """
    old = fleet.identity
    with fleet.frozen(0):
        path = fleet.publish(other(fleet))
        new = fleet.point(path)
        fleet.eventually(
            "the operator saw that replica 1 has staged", lambda: fleet.staged_seen() == 1
        )
        # The worker knows the trainer's right to discard from here on, and has its connection: the
        # next such call is not overtaken by the commit call while the API server reviews it.
        unchanged = fleet.control(1, "weights/discard", {"epoch": old[0], "version": old[1]})
        assert unchanged.body["outcome"] == "unchanged"
        fleet.stop(1)
        # It lies in the worker's socket before the commit call, which comes on another one.
        fleet.control_soon(1, "weights/discard", {"epoch": new[0], "version": new[1]})
    fleet.eventually("replica 0 has committed", lambda: fleet.active(0) == new)
    return new, path


def let_go(fleet: Fleet, replica: int) -> None:
    """End the request that holds the replica's commit."""
    assert fleet.control(replica, "abort", {"all": True}).status == 200


def other(fleet: Fleet) -> str:
    """Bytes that the pool does not serve now."""
    return "1" if fleet.bytes_of[fleet.identity] != "1" else "2"


def test_committing_a_member_fails(fleet: Fleet) -> None:
    """Replica 1 loses what it staged just before it is told to commit; the bytes are gone."""
    new, path = lost_between_stage_and_commit(fleet)
    fleet.volume.remove(path)
    fleet.go_on(1)
    fleet.wait_phase("Complete", new)
    assert fleet.committed() == new, "all that serve are new"
    fleet.eventually("it leaves the Service", lambda: fleet.gate(1) == "False", 10)
    degraded = ("True", "WeightsFailed")
    fleet.eventually("status says why", lambda: fleet.condition("Degraded") == degraded, 10)
    assert "w-1-0" in fleet.status()["message"]
    assert fleet.check(fleet.generate()) == new
    fleet.eventually("it is shut out", lambda: fleet.ask(1).status == 503)
    fleet.eventually("it is out of the Service", lambda: len(fleet.endpoints()) == 1)
    fleet.volume.publish(fleet.bytes_of[new], path)
    fleet.settled(new, 2)
    assert fleet.condition("Degraded")[0] == "False"


def test_the_operator_dies_while_committing(fleet: Fleet, cluster: Cluster) -> None:
    """Replica 0 has committed, replica 1 lost what it staged: the next leader rolls forward."""
    old = fleet.identity
    new, _ = lost_between_stage_and_commit(fleet)
    assert fleet.phases()[-1] == (new, "Committing")
    dead = kill_leader(cluster)
    fleet.go_on(1)
    fleet.eventually("replica 1 lost it", lambda: fleet.weights(1)["staged"] is None)
    assert [fleet.check(fleet.generate(r)) for r in (0, 1)] == [new, old], "each labelled"
    assert fleet.committed() == old
    await_takeover(cluster, dead)
    fleet.settled(new, 2)
    assert fleet.phases()[-1] == (new, "Complete")


def test_committing_restart_and_scale_up(fleet: Fleet) -> None:
    old = fleet.identity
    replies = [fleet.long_request(0, 2000) for _ in range(4)]
    new = fleet.raise_to(other(fleet), inFlight=PATIENT)
    fleet.wait_phase("Committing", new)
    fleet.kill(1)
    fleet.patch(replicas=3)
    joined = [fleet.first_answer(r) for r in (1, 2)]
    assert joined == [new, new], "neither the checkpoint nor the old weights"
    let_go(fleet, 0)
    assert {tuple(r.result(60).identities) for r in replies} == {(old,)}
    fleet.settled(new, 3)


def test_nobody_serves_and_a_fresh_process_is_fenced(shared_fleet: Fleet) -> None:
    fleet = shared_fleet
    fleet.patch(suspend=True, replicas=2)
    fleet.eventually("no pods run", lambda: not fleet.pods(), 40)
    fleet.wait("Suspended")
    assert "service/w" in fleet.left(), "the rest is kept"
    fleet.patch(suspend=False)
    fleet.eventually("pods are made", lambda: len(fleet.pods()) == 2)
    new = fleet.raise_to(other(fleet))
    fleet.wait_phase("Complete", new)
    assert fleet.committed() == new, "nobody serves: at once"
    fleet.pause_operator(True)  # nobody calls require now
    try:
        fleet.eventually("the worker has loaded", lambda: fleet.loaded(0), 120)
        assert fleet.weights(0)["required"] is None
        reply = fleet.ask(0)
        assert (reply.status, reply.body["type"]) == (503, "urn:rollout:problem:fenced")
        assert not fleet.endpoints()
        assert fleet.gate(0) != "True"
    finally:
        fleet.pause_operator(False)
    assert fleet.first_answer(0) == new, "never the checkpoint"
    fleet.settled(new, 2)
    assert fleet.weights(0)["required"] == {"epoch": new[0], "version": new[1]}
    assert len(fleet.endpoints()) == 2
