"""API.md's case table on real workers: from the first commit call on, other strategies, crashes.

A request under the policy Drain keeps one replica from committing: that is how these tests hold an
update in `Committing`, until they have seen what they want and abort it.
"""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from localkube import Cluster
from tests.support.api.leaders import kill_leader, taken_over
from tests.support.cluster.fleets import Fleet
from tests.support.cluster.versions import Identity, Reply

LONG = 500
"""Tokens of a request that is to end by itself, while a commit waits for it."""

LONGEST = 1900
"""As many as the model takes, many seconds: a test does not have to hurry, it ends the request."""

PATIENT = {"policy": "Drain", "deadlineSeconds": 60}


def held(
    fleet: Fleet, replica: int, seed: str, tokens: int = LONGEST, **weights: object
) -> tuple[Identity, Future[Reply]]:
    """An update that this replica can't commit yet; returns it, and the request that keeps it."""
    reply = fleet.long_request(replica, tokens)
    new = fleet.raise_to(seed, epoch=None, **({"inFlight": PATIENT} | weights))
    fleet.wait_phase("Committing", new)
    return new, reply


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


def test_rolling_stops_at_a_failing_member(fleet_of_three: Fleet) -> None:
    fleet = fleet_of_three
    old = fleet.identity
    first = fleet.long_request(0, LONGEST)
    path = fleet.publish(other(fleet))
    new = fleet.point(path, strategy="Rolling", inFlight=PATIENT)
    fleet.wait_phase("Committing", new)
    fleet.eventually("all have staged", lambda: [fleet.staged(r) for r in (1, 2)] == [new, new])
    assert [fleet.active(r) for r in range(3)] == [old] * 3, "one at a time"
    fleet.volume.remove(path)
    fleet.control(1, "weights/discard", {"epoch": new[0], "version": new[1]})
    let_go(fleet, 0)
    assert first.result(60).identities == [old]
    fleet.eventually("Degraded", lambda: fleet.condition("Degraded") == ("True", "WeightsFailed"))
    assert "w-1-0" in fleet.status()["message"]
    fleet.eventually("the first has it", lambda: fleet.active(0) == new)
    answers = [fleet.check(fleet.generate(r)) for r in range(3)]
    assert answers == [new, old, old], "the failing one keeps the old, those after it wait"
    assert fleet.committed() == old, "the least that is served"
    assert len(fleet.endpoints()) == 3
    fleet.volume.publish(fleet.bytes_of[new], path)
    fleet.settled(new, 3)


def test_eager_goes_on_past_a_failing_member(fleet_of_three: Fleet) -> None:
    fleet = fleet_of_three
    old = fleet.identity
    with fleet.frozen(0):
        new = fleet.raise_to(other(fleet), strategy="Eager")
        fleet.eventually(
            "the others go on", lambda: [fleet.active(r) for r in (1, 2)] == [new, new]
        )
        assert fleet.committed() == old, "the least that is served"
        assert {fleet.check(fleet.generate(r)) for r in (1, 2)} == {new}
    fleet.settled(new, 3)


def test_committing_newer_target_and_epoch(fleet: Fleet) -> None:
    old, before, commits = fleet.identity, fleet.now(), fleet.weights(0)["commit_seq"]
    first, reply = held(fleet, 1, other(fleet))
    second = fleet.raise_to(other(fleet), epoch=first[0] + 1)
    fleet.eventually("replica 0 has committed", lambda: fleet.active(0) == first)
    assert fleet.phases(before)[-1] == (first, "Committing")
    assert fleet.committed() == old
    assert fleet.check(fleet.generate(0)) == first, "old and new serve, each labelled"
    let_go(fleet, 1)
    assert reply.result(60).identities == [old]
    fleet.settled(second, 2)
    seen = fleet.phases(before)
    assert seen.index((first, "Complete")) < seen.index((second, "Staging"))
    assert fleet.weights(0)["commit_seq"] == commits + 2


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


def test_committing_deadline(fleet: Fleet) -> None:
    old = fleet.identity
    new, reply = held(fleet, 1, other(fleet), deadlineSeconds=1)
    fleet.wait_phase("Complete", new)
    assert not reply.done(), "who is late is not waited for"
    assert fleet.committed() == new
    fleet.eventually("it left the Service", lambda: fleet.gate(1) == "False")
    assert fleet.condition("Degraded") == ("True", "WeightsFailed")
    assert reply.result(60).identities == [old]
    fleet.settled(new, 2)


def test_committing_then_asleep(fleet: Fleet) -> None:
    old, before = fleet.identity, fleet.now()
    new, reply = held(fleet, 1, other(fleet), LONG)
    fleet.patch(state="Asleep")
    fleet.eventually("the pool sleeps", lambda: fleet.status()["phase"] == "Asleep")
    done = reply.result(60)
    assert (done.identities, done.body["outputs"][0]["stop_reason"]) == ([old], "length")
    assert fleet.phases(before)[-1] == (new, "Complete")
    assert [fleet.active(r) for r in (0, 1)] == [new, new], "finished first"
    assert fleet.ask(0).body["type"] == "urn:rollout:problem:asleep"
    fleet.patch(state="Active")
    fleet.settled(new, 2)


def test_a_worker_is_ahead_of_the_target(fleet: Fleet) -> None:
    old, path = fleet.identity, fleet.publish(other(fleet))
    epoch, version = new = fleet.identity
    body = {"epoch": epoch, "version": version, "source": {"path": path}}
    assert fleet.control(1, "weights/stage", body).status == 202
    fleet.eventually("it is staged", lambda: fleet.staged(1) == new)
    commit = {"epoch": epoch, "version": version, "in_flight": "Drain", "deadline_seconds": 5}
    assert fleet.control(1, "weights/commit", commit).status == 200
    ahead = ("False", "AheadOfTarget")
    fleet.eventually("it is seen", lambda: fleet.condition("WeightsSynced") == ahead)
    assert [fleet.check(fleet.generate(r)) for r in (0, 1)] == [old, new], "as is, labelled"
    assert fleet.gate(1) == "True"
    assert fleet.committed() == old
    fleet.point(path)
    fleet.settled(new, 2)


@pytest.mark.soak
def test_the_operator_dies_while_staging(fleet: Fleet, cluster: Cluster) -> None:
    """Every day it dies while committing, below, and in each phase in `test_operator_decide`."""
    old = fleet.identity
    path = fleet.publish(other(fleet), late=True)
    new = fleet.point(path)
    fleet.wait_phase("Staging", new)
    dead = kill_leader(cluster)
    fleet.volume.publish(fleet.bytes_of[new], path)
    with fleet.traffic(0, 1) as seen:
        taken_over(cluster, dead)
        fleet.settled(new, 2)
    assert seen.served == [old, new]
    assert not seen.refused
    assert not seen.failures


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
    taken_over(cluster, dead)
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


def test_committing_then_suspend(fleet: Fleet) -> None:
    new, reply = held(fleet, 1, other(fleet), LONG)
    fleet.patch(suspend=True)
    fleet.wait_phase("Complete", new)
    assert fleet.committed() == new
    fleet.eventually("no pods run", lambda: not fleet.pods(), 40)
    fleet.wait("Suspended")
    assert fleet.status()["phase"] == "Suspended"
    assert "service/w" in fleet.left(), "the rest is kept"
    assert reply.result(60).status == 200, "drained, or a partial answer"
    newer = fleet.raise_to(other(fleet))
    fleet.wait_phase("Complete", newer)
    assert fleet.committed() == newer, "target rises while suspended"
    assert fleet.condition("WeightsSynced") == ("False", "Suspended")


def test_nobody_serves_and_a_fresh_process_is_fenced(shared_fleet: Fleet) -> None:
    """Begins with a suspended pool, as the test before leaves it."""
    fleet = shared_fleet
    fleet.patch(suspend=True)
    fleet.eventually("no pods run", lambda: not fleet.pods(), 40)
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


def test_staging_then_suspend(fleet: Fleet) -> None:
    path = fleet.publish("3", late=True)
    new = fleet.point(path)
    fleet.wait_phase("Staging", new)
    fleet.patch(suspend=True)
    fleet.wait_phase("Superseded", new)
    assert fleet.committed() == new, "what they load when they come back"
    fleet.eventually("no pods run", lambda: not fleet.pods(), 40)
    fleet.eventually("status says so", lambda: fleet.condition("Suspended")[0] == "True", 10)
