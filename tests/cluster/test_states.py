"""`spec.state` on real workers: paused, asleep and suspended pools; holds of others; no endpoints."""

from __future__ import annotations

import pytest

from tests.support.cluster.fleets import Fleet


def rest(fleet: Fleet, state: str, **spec: object) -> None:
    """Ask for a state and wait until status says that all replicas are there."""
    fleet.patch(state=state, **spec)
    fleet.eventually(f"the pool is {state}", lambda: fleet.status()["phase"] == state)
    assert fleet.condition("Ready") == ("False", state)
    assert fleet.condition("Degraded")[0] == "False"


def awake(fleet: Fleet) -> None:
    """Ask for Active and wait until all serve."""
    fleet.patch(state="Active")
    fleet.settled(fleet.identity, 2)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(fleet: Fleet, level: int) -> None:
    fleet.raise_to("2" if level == 1 else "3")
    fleet.settled(fleet.identity, 2)
    before = [fleet.generate(r, tokens=32, logprobs="raw") for r in (0, 1)]
    committed = fleet.committed()

    rest(fleet, "Asleep", sleep={"level": level})
    status = fleet.status()
    assert fleet.condition("Asleep") == ("True", "Asleep")
    assert (status["asleepReplicas"], status["readyReplicas"]) == (2, 0)
    assert [m["state"] for m in status["members"]] == ["Asleep", "Asleep"]
    assert fleet.gate(0) == fleet.gate(1) == "False"
    fleet.eventually("no endpoints", lambda: not fleet.endpoints())
    reply = fleet.ask(0)
    assert (reply.status, reply.body["type"]) == (503, "urn:rollout:problem:asleep")
    state = fleet.control(0, "state").body
    assert state["resident"] == {"weights": False, "kv_cache": False}
    assert fleet.status()["restarts"] == status["restarts"]

    awake(fleet)
    assert fleet.committed() == committed
    assert fleet.condition("Asleep") == ("False", "Awake")
    after = [fleet.generate(r, tokens=32, logprobs="raw") for r in (0, 1)]
    assert [a["outputs"] for a in after] == [b["outputs"] for b in before], "bit for bit"
    transition = fleet.status()["lastTransition"]
    assert (transition["from"], transition["to"]) == ("Asleep", "Active")
    assert transition["completedAt"] >= transition["startedAt"]


def test_falling_asleep_aborts_at_the_end_of_the_drain(fleet: Fleet) -> None:
    running = fleet.long_request(0, 2000)
    rest(fleet, "Asleep", drainSeconds=1)
    output = running.result(60).body["outputs"][0]
    assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "sleep")
    assert 0 < len(output["token_ids"]) < 2000
    awake(fleet)


def test_pause_and_resume(fleet: Fleet) -> None:
    boots = [fleet.control(r, "state").body["boot_id"] for r in (0, 1)]
    rest(fleet, "Paused")
    fleet.eventually("no endpoints", lambda: not fleet.endpoints())
    reply = fleet.ask(0)
    assert (reply.status, reply.body["type"]) == (503, "urn:rollout:problem:paused")
    state = fleet.control(0, "state").body
    assert state["resident"] == {"weights": True, "kv_cache": True}
    rest(fleet, "Asleep")
    rest(fleet, "Paused")
    assert fleet.control(1, "state").body["lifecycle"] == "Paused"
    awake(fleet)
    assert [fleet.control(r, "state").body["boot_id"] for r in (0, 1)] == boots


def test_a_trainers_hold_is_its_own(fleet: Fleet) -> None:
    """The pool is Active again, but one replica stays with whoever holds it."""
    assert fleet.control(1, "sleep", {"mode": "drain", "deadline_seconds": 5}).status == 200
    fleet.eventually("it is seen", lambda: "held by" in fleet.status()["message"])
    assert fleet.condition("Ready")[0] == "False"
    fleet.eventually("it is out of the Service", lambda: len(fleet.endpoints()) == 1)
    rest(fleet, "Asleep")
    fleet.patch(state="Active")
    fleet.eventually("replica 0 serves", lambda: fleet.ask(0).status == 200)
    assert fleet.control(1, "state").body["lifecycle"] == "Asleep"
    assert fleet.condition("Degraded")[0] == "False", "a hold is no fault"
    assert fleet.control(1, "wake", {}).status == 200
    fleet.settled(fleet.identity, 2)


def test_states_follow_each_other_quickly(fleet: Fleet) -> None:
    for state in ("Asleep", "Active", "Paused", "Asleep", "Active", "Asleep"):
        fleet.patch(state=state)
    last = fleet.get()["metadata"]["generation"]

    def reached() -> bool:  # it may have been asleep on the way, for an earlier one
        status = fleet.status()
        return bool(status["phase"] == "Asleep" and status["observedGeneration"] == last)

    fleet.eventually("the last one counts", reached)
    awake(fleet)
