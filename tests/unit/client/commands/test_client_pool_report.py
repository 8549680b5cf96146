"""What `rollout status` and `rollout why` make of a pool's objects."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rollout_client.commands.pool_command import add_pool_verbs, is_as_wanted
from rollout_client.commands.pool_facts import PoolFacts
from rollout_client.commands.pool_report import (
    describe_causes,
    describe_seconds,
    describe_status,
    explain_pool,
    known_fixes,
)

NOW = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)


def ago(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def facts(*conditions: tuple[str, str, str, str], **status: Any) -> PoolFacts:
    meta = {"name": "math", "namespace": "rl", "generation": 3, "creationTimestamp": ago(9000)}
    found = {
        "observedGeneration": 3,
        "phase": "Degraded",
        "message": "something",
        "conditions": [
            {"type": kind, "status": on, "reason": reason, "message": says, "lastTransitionTime": ago(90)}
            for kind, on, reason, says in conditions
        ],
    } | status  # fmt: skip
    pods = {
        f"math-{n}-0": {
            "metadata": {"name": f"math-{n}-0", "uid": f"u{n}"},
            "spec": {"nodeName": f"node-{n}"},
            "status": {"phase": "Running"},
        }
        for n in (0, 1, 10)
    }
    return PoolFacts(
        {"metadata": meta, "spec": {"engine": {"type": "hf"}}, "status": found}, pods, (), NOW
    )


CRASH = "replica 0 failed 3 times in a row; last cause: OOMKilled"


def test_a_cause_has_the_operators_sentence_and_the_runbooks_fix_once() -> None:
    found = explain_pool(
        facts(
            ("Ready", "False", "NotServing", "1 of 2 replicas serve"),
            ("Progressing", "True", "Starting", "waiting for 1 of 2 replicas"),
            ("Degraded", "True", "CrashLooping", CRASH),
            ("WeightsSynced", "True", "Synced", "every replica has the target"),
        )
    )
    assert [(c.reason, c.says) for c in found] == [
        ("Degraded/CrashLooping", CRASH),
        ("Progressing/Starting", "waiting for 1 of 2 replicas"),
    ]
    assert "docs/runbook.md#a-replica-fails-again-and-again" in found[0].fix
    assert found[0].seconds == 90


def test_every_reason_of_trouble_has_a_fix() -> None:
    known = known_fixes()
    assert set(known) >= {"Degraded=True", "Progressing=False", "WeightsSynced=False"}
    assert all(entry["fix"] for entry in known["Degraded=True"].values())
    assert known["Degraded=True"]["Unsupported"] == known["Progressing=False"]["Unsupported"]


@pytest.mark.parametrize(
    ("status", "created", "says"),
    [
        ({}, 9000, "no operator has looked at this pool"),
        ({}, 5, None),
        ({"observedGeneration": 2}, 9000, "no operator has seen its latest change"),
    ],
    ids=["no status", "just made", "an older generation"],
)
def test_a_pool_that_no_operator_sees_says_so(
    status: dict[str, Any], created: float, says: str | None
) -> None:
    found = facts()
    found.pool["status"] = status
    found.pool["metadata"]["creationTimestamp"] = ago(created)
    causes = explain_pool(found)
    assert [cause.reason for cause in causes] == ([] if says is None else ["Unseen"])
    assert [cause.says for cause in causes] == ([] if says is None else [says])
    assert says is None or "the-operator-is-down" in causes[0].fix


def test_a_healthy_pool_has_no_cause() -> None:
    found = facts(
        ("Ready", "True", "Serving", "fine"),
        ("Degraded", "False", "AsExpected", "fine"),
        ("Progressing", "False", "Complete", "fine"),
    )
    assert explain_pool(found) == []
    assert list(describe_causes(found)) == ["math: nothing is wrong: something"]


def test_status_shows_the_update_and_each_pod_in_order() -> None:
    member = {"name": "math-1-0", "state": "Loading", "ready": False, "epoch": 1, "version": 7}
    weights = {
        "committed": {"epoch": 1, "version": 7},
        "stagedReplicas": 1,
        "lastUpdate": {"epoch": 1, "version": 8, "phase": "Staging", "startedAt": ago(200)},
    }
    lines = list(
        describe_status(
            facts(
                weights=weights,
                members=[{**member, "message": "reading"}],
                readyReplicas=2,
                desiredReplicas=3,
            )
        )
    )
    assert lines[0] == "math (Standalone, hf): Degraded, 2 of 3 replicas serve"
    assert lines[2] == "  weights: (1, 7) committed; (1, 8) Staging for 3m, 1 staged"
    assert [line.split()[0] for line in lines[3:]] == [
        "math-0", "math-0-0", "math-1", "math-1-0", "math-10", "math-10-0",
    ]  # fmt: skip
    assert lines[6].strip() == (
        "math-1-0  Running  node-1  Loading  does not serve (1, 7)  reading"
    )


def test_errors_come_with_the_end_of_their_logs_and_warnings_last() -> None:
    degraded = ("Degraded", "True", "Rejected", "no quota")
    found = facts(degraded, lastErrors=[{"time": ago(60), "message": "it died", "log": "one\ntwo"}])
    event = {"type": "Warning", "reason": "ReplicaFailed", "note": "exit 137", "eventTime": ago(5)}
    events = [{**event, "metadata": {}, "regarding": {"name": "math"}}]
    lines = list(describe_causes(PoolFacts(found.pool, found.pods, events, NOW)))
    assert lines[3:6] == [f"error of {ago(60)}: it died", "   | one", "   | two"]
    assert lines[6] == f"warning of {ago(5)}, math: ReplicaFailed: exit 137"


@pytest.mark.parametrize(
    ("wanted", "holds"),
    [
        ("Ready", True), ("Asleep", False), ("phase=Degraded", True), ("phase=Ready", False),
        ("weights=1,7", True), ("weights=1,8", False), ("weights=0,900", True),
    ],
)  # fmt: skip
def test_what_is_waited_for(wanted: str, holds: bool) -> None:
    found = facts(
        ("Ready", "True", "Serving", "fine"), weights={"committed": {"epoch": 1, "version": 7}}
    )
    assert is_as_wanted(found, wanted) is holds
    found.pool["metadata"]["generation"] = 4
    assert not is_as_wanted(found, wanted), "that status is of an older spec"


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (200_000, "2d")])  # fmt: skip
def test_durations_are_short(seconds: float, text: str) -> None:
    assert describe_seconds(seconds) == text


@pytest.mark.parametrize("wish", ["ready", "weights=1", "weights=a,b", "phase="])
def test_a_wish_that_can_not_be_is_refused(wish: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_pool_verbs(parser.add_subparsers(dest="verb"))
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["wait", "math", "--for", wish])
    assert ended.value.code == 2
    assert "weights=EPOCH,VERSION" in capsys.readouterr().err
