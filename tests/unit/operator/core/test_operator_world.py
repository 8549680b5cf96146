"""What a pass makes of raw pods: the sentence about a container that ended."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_operator.api.names import GANG_EXIT_CODE, worker_labels
from rollout_operator.api.objects import Obj
from rollout_operator.api.revision import pod_revision
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.core.observed_pool import ObservedWorker, Pod
from rollout_operator.core.pods.pod_reader import (
    PoolPods,
    parse_boot_id,
    parse_pod,
    read_pod,
    sort_pods,
)
from rollout_worker.schemas import Lifecycle
from tests.support.unit.poolspecs import spec_of
from tests.support.unit.simworker import SimWorker


def read(raw: Obj) -> Pod:
    """The pod as it is read; its labels must be ours."""
    found = parse_pod(raw)
    assert found is not None
    return found


def line(level: str, message: str) -> str:
    return json.dumps({"level": level, "message": message})


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", ""),
        (f"{line('info', 'serving')}\n{line('info', 'loading')}\n", ""),
        (f"{line('error', 'no model')}\n{line('info', 'bye')}\n", ": no model"),
        (f'", "message": "cut"}}\n{line("info", "serving")}', ""),
        (
            "Traceback (most recent call last):\n  File x\nMemoryError: 3 GiB\n",
            ": MemoryError: 3 GiB",
        ),
    ],
    ids=["empty", "killed while it served", "its own error", "cut", "traceback"],
)
def test_an_end_is_told_in_one_line(log: str, said: str) -> None:
    assert trouble(log) == f"container 'worker' ended: Error, exit code 137{said}"


@pytest.mark.parametrize("bracket", ["[", '{"a":'])
def test_an_end_in_brackets_is_told_as_it_is(bracket: str) -> None:
    """Any program may end with it, and JSON of such depth can't be read."""
    assert bracket in trouble(bracket * 2000)


def test_a_long_end_is_cut() -> None:
    assert len(trouble("x" * 5000)) < 400


OWNER: dict[str, Any] = {
    "controller": True,
    "kind": "RolloutReplica",
    "name": "p",
    "uid": "owner",
}
RAW: dict[str, Any] = {
    "metadata": {
        "name": "p-3-1",
        "uid": "u",
        "creationTimestamp": "2026-01-01T00:00:10Z",
        "deletionTimestamp": "2026-01-01T00:01:00Z",
        "deletionGracePeriodSeconds": 45,
        "labels": {**worker_labels("p", 3, 1), "rollout.dev/revision": "abc"},
        "annotations": {"rollout.dev/restarts": "2", "rollout.dev/retry": "again"},
        "ownerReferences": [{"kind": "Other", "uid": "stranger"}, OWNER],
    },
    "spec": {"nodeName": "n1", "terminationGracePeriodSeconds": 40},
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.7",
        "conditions": [
            {"type": "Ready", "status": "True"},
            {
                "type": "rollout.dev/serving",
                "status": "True",
                "message": "boot b7: Serving",
                "lastTransitionTime": "2026-01-01T00:00:50Z",
            },
            {
                "type": "rollout.dev/proven",
                "status": "True",
                "lastTransitionTime": "2026-01-01T00:00:30Z",
            },
        ],
        "containerStatuses": [
            {
                "name": "worker",
                "state": {"running": {"startedAt": "2026-01-01T00:00:25Z"}},
                "lastState": {
                    "terminated": {
                        "startedAt": "2026-01-01T00:00:15Z",
                        "finishedAt": "2026-01-01T00:00:20Z",
                    }
                },
            }
        ],
    },
}
MIDNIGHT = 1767225600.0
AT = "2026-01-01T00:00:55Z"


def trouble(log: str) -> str:
    ended = {"exitCode": 137, "reason": "Error", "message": log}
    container = {"name": "worker", "state": {"terminated": ended}}
    return read({**RAW, "status": {"phase": "Failed", "containerStatuses": [container]}}).trouble


def test_a_pod_is_read_whole() -> None:
    assert parse_pod(RAW) == Pod(
        name="p-3-1",
        uid="u",
        replica=3,
        rank=1,
        revision="abc",
        phase="Running",
        owned=True,
        deletion_at=MIDNIGHT + 60,
        grace=45,
        started=True,
        ready=True,
        gate=True,
        gate_boot="b7",
        own_grace=40,
        gate_since=MIDNIGHT + 50,
        proven_since=MIDNIGHT + 30,
        ip="10.0.0.7",
        node="n1",
        restarts=2,
        retry="again",
        finished_at=MIDNIGHT + 20,
        trouble="",
    )


def test_a_bare_pod_is_read_too() -> None:
    labels = {"rollout.dev/replica": "0", "rollout.dev/rank": "0"}
    found = parse_pod({"metadata": {"name": "p-0-0", "uid": "u", "labels": labels}})
    assert found == Pod("p-0-0", "u", 0, 0, "", "Pending", owned=False, mislabelled=True)
    assert not found.is_deleting
    assert not found.is_finished


@pytest.mark.parametrize(
    "labels",
    [{}, {"rollout.dev/replica": "0"}, {"rollout.dev/rank": "0"},
     {"rollout.dev/replica": "x", "rollout.dev/rank": "0"},
     {"rollout.dev/replica": "1", "rollout.dev/rank": "0"}],
)  # fmt: skip
def test_a_pod_without_our_labels_is_not_ours(labels: dict[str, str]) -> None:
    assert parse_pod({"metadata": {"name": "p-0-0", "uid": "u", "labels": labels}}) is None


@pytest.mark.parametrize("label", sorted(worker_labels("p", 3, 1)))
def test_a_pod_that_lost_a_label_is_told(label: str) -> None:
    meta = {**RAW["metadata"], "labels": {**RAW["metadata"]["labels"], label: "odd"}}
    found = parse_pod({**RAW, "metadata": meta})
    assert found is None or found.mislabelled


POD_TIMES: dict[str, Any] = {
    "startTime": "2026-01-01T00:00:12Z",
    "conditions": [
        {"type": "PodScheduled", "lastTransitionTime": "2026-01-01T00:00:11Z"},
        {"type": "rollout.dev/serving", "lastTransitionTime": "2026-01-01T00:00:50Z"},
        {"type": "rollout.dev/proven", "lastTransitionTime": "2026-01-01T00:00:50Z"},
    ],
}


@pytest.mark.parametrize(
    ("status", "after"),
    [
        ({}, 10),
        (POD_TIMES, 12),
        ({"conditions": [{"type": "Ready", "lastTransitionTime": "2026-01-01T00:00:40Z"}]}, 40),
        ({**POD_TIMES, "initContainerStatuses": [
            {"name": "i", "state": {"terminated": {"finishedAt": "2026-01-01T00:00:20Z"}}}]}, 20),
    ],
    ids=["refused unseen", "refused by the kubelet", "lost node", "init container"],
)  # fmt: skip
def test_a_pod_without_a_container_that_says_so_ended_when_it_was_last_known(
    status: dict[str, Any], after: float
) -> None:
    found = read({**RAW, "status": {"phase": "Failed", **status}})
    assert found.ended_at == MIDNIGHT + after
    assert not found.started, "nothing of it can be asked"


def test_conditions_that_no_pass_reads_change_nothing() -> None:
    """A kubelet sets four of them, one after the other, while a pod starts."""
    told = {"type": "PodReadyToStartContainers", "status": "True", "lastTransitionTime": AT}
    status = {**RAW["status"], "conditions": [*RAW["status"]["conditions"], told]}
    assert read_pod({**RAW, "status": status}) == read_pod(RAW)


def tell_apart(raw: Obj, spec: RolloutReplicaSpec | None = None) -> PoolPods:
    return sort_pods([read_pod(raw)], "p", "owner", spec)


@pytest.mark.parametrize(
    ("refs", "owned"),
    [
        ([OWNER], True),
        ([{**OWNER, "controller": False}], False),
        ([{**OWNER, "uid": "another"}], False),
        ([], False),
    ],
)
def test_only_its_controller_owns_a_pod(refs: list[dict[str, Any]], owned: bool) -> None:
    raw = {**RAW, "metadata": {**RAW["metadata"], "ownerReferences": refs}}
    assert tell_apart(raw).ours == ((read(raw),) if owned else ())


@pytest.mark.parametrize(
    ("change", "left_over"),
    [
        ({"uid": "another"}, True),
        ({"uid": "another", "name": "q"}, False),
        ({"uid": "another", "kind": "ReplicaSet"}, False),
        ({"uid": "another", "controller": False}, False),
        ({}, False),
    ],
)
def test_pods_of_a_deleted_pool_of_that_name_are_known(
    change: dict[str, Any], left_over: bool
) -> None:
    raw = {**RAW, "metadata": {**RAW["metadata"], "ownerReferences": [{**OWNER, **change}]}}
    predecessors = tell_apart(raw).predecessors
    assert [p.name for p in predecessors] == (["p-3-1"] if left_over else [])
    assert all(p.owned for p in predecessors), "somebody may be freed of them"


@pytest.mark.parametrize(
    ("worker", "phase", "lingers"),
    [
        ({"terminated": {"exitCode": 1}}, "Failed", True),
        ({"terminated": {"exitCode": 0}}, "Succeeded", True),
        ({"running": {}}, "Running", False),
    ],
)
def test_a_container_that_runs_on_hides_no_end_of_its_worker(
    worker: dict[str, Any], phase: str, lingers: bool
) -> None:
    """As a mesh's webhook injects one: the kubelet calls the pod Running until it ends, too."""
    containers = [
        {"name": "istio-proxy", "state": {"running": {}}},
        {"name": "worker", "state": worker},
    ]
    found = read({**RAW, "status": {"phase": "Running", "containerStatuses": containers}})
    assert (found.phase, found.lingers, found.is_finished) == (phase, lingers, lingers)


@pytest.mark.parametrize(
    ("policy", "started", "named"),
    [("Always", True, ""), ("Always", False, "'proxy'"), (None, True, "'proxy'")],
    ids=["sidecar", "sidecar that is not up yet", "init container"],
)
def test_nothing_waits_for_a_sidecar_that_has_started(
    policy: str | None, started: bool, named: str
) -> None:
    proxy = {"name": "proxy", "started": started, "state": {"running": {}}}
    spec = {**RAW["spec"], "initContainers": [{"name": "proxy", "restartPolicy": policy}]}
    status = {"phase": "Pending", "initContainerStatuses": [proxy]}
    found = read({**RAW, "spec": spec, "status": status})
    assert named in found.waits_on
    assert bool(found.waits_on) is bool(named)


@pytest.mark.parametrize(
    ("name", "code", "followed"),
    [("worker", GANG_EXIT_CODE, True), ("worker", 1, False), ("logs", GANG_EXIT_CODE, False)],
)
def test_a_worker_that_gave_its_gang_up_says_so(name: str, code: int, followed: bool) -> None:
    ended = {"name": name, "state": {"terminated": {"exitCode": code}}}
    status = {"phase": "Failed", "containerStatuses": [ended]}
    assert read({**RAW, "status": status}).followed is followed


@pytest.mark.parametrize(
    ("message", "boot"),
    [("boot b1: it is going", "b1"), ("boot b1", "b1"), ("", None), ("re boot b1: x", None)],
)
def test_a_gate_names_its_process(message: str, boot: str | None) -> None:
    assert parse_boot_id(message) == boot


def waiting(reason: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": "so it is"}}
    return {"containerStatuses": [{"name": "worker", "state": state}]}


def test_a_pod_with_a_node_is_scheduled_whatever_was_written_about_its_name() -> None:
    """A scheduler writes by name that it could not bind a pod, which may be another one by then."""
    failure = {"reason": "SchedulerError", "message": "pods 'p-3-1' not found"}
    written = {"type": "PodScheduled", "status": "False", **failure}
    status = {**RAW["status"], "conditions": [*RAW["status"]["conditions"], written]}
    assert parse_pod({**RAW, "status": status}) == parse_pod(RAW)
    assert (
        read({**RAW, "spec": {}, "status": status}).trouble
        == "SchedulerError: pods 'p-3-1' not found"
    )


NO_ROOM = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            waiting("ImagePullBackOff"),
            "container 'worker' can't get its image: ImagePullBackOff so it is; check "
            "spec.engine.image and spec.podTemplate.imagePullSecrets",
        ),
        (
            waiting("CreateContainerConfigError"),
            "container 'worker': CreateContainerConfigError so it is; create what it names, or change "
            "spec.engine.env and spec.podTemplate",
        ),
        (waiting("ContainerCreating"), ""),
        (waiting("PodInitializing"), ""),
        ({"reason": "Evicted", "message": "no disk"}, "Evicted: no disk"),
        ({"reason": "NodeLost"}, "NodeLost"),
        ({"conditions": [NO_ROOM]}, "Unschedulable: full"),
        ({"conditions": [{**NO_ROOM, "status": "True"}]}, ""),
        (
            {"initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 3}}}]},
            "container 'i' ended: Error, exit code 3",
        ),
        (
            {"initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 0}}}]},
            "",
        ),
        (
            {
                "phase": "Failed",
                "containerStatuses": [
                    {"name": "w", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
                ],
            },
            "container 'w' ended: Completed, exit code 0",
        ),
        (
            {
                "phase": "Failed",
                "initContainerStatuses": [
                    {"name": "fill", "state": {"terminated": {"exitCode": 0}}},
                    {"name": "logs", "state": {"terminated": {"exitCode": 137}}},
                ],
                "containerStatuses": [{"name": "w", "state": {"terminated": {"exitCode": 1}}}],
            },
            "container 'w' ended: Error, exit code 1",
        ),
    ],
)
def test_what_stands_in_a_pods_way(status: dict[str, Any], said: str) -> None:
    assert read({**RAW, "spec": {}, "status": status}).trouble == said


def made_by_us(**changes: Any) -> dict[str, Any]:
    """A pod as the operator makes it, for the present spec."""
    spec = spec_of()
    labels = {**worker_labels("p", 3, 1), "rollout.dev/revision": pod_revision(spec)}
    meta = {**RAW["metadata"], "labels": labels, **changes.pop("metadata", {})}
    own = {"serviceAccountName": "rollout-worker", "hostname": "p-3-1", "subdomain": "p-heads"}
    return {**RAW, "metadata": meta, "spec": {**own, **changes}}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"metadata": {"name": "x-3-1"}}, "is not called 'p-3-1'"),
        ({"serviceAccountName": "default"}, "runs under service account 'default', not 'rollout-w"),
        ({"serviceAccountName": None}, "runs under service account 'default'"),
        (
            {"serviceAccountName": "default", "subdomain": "other",
             "metadata": {"labels": {**worker_labels("p", 3, 1), "rollout.dev/revision": "v1-old"}}},
            "runs under service account 'default'",
        ),
    ],
    ids=["another name", "another account", "no account", "patched to look old"],
)  # fmt: skip
def test_a_pod_that_is_patched_to_look_like_ours_is_told_and_left_alone(
    changes: dict[str, Any], why: str
) -> None:
    ours, predecessors, (told,) = tell_apart(made_by_us(**changes), spec_of())
    assert (ours, predecessors) == ((), ())
    assert why in told
    assert told.endswith("so it gets no calls: delete it, or take both off it")


def test_a_change_of_the_account_makes_no_strangers_of_the_pods_that_are_there() -> None:
    """They are replaced one after the other, as for any change of the template."""
    found = tell_apart(made_by_us(), spec_of(serviceAccountName="other"))
    assert (len(found.ours), found.strangers) == (1, ())


def test_weights_count_as_loaded_only_where_an_engine_lives() -> None:
    sim = SimWorker("b", loading=False)
    assert ObservedWorker(sim.state()).is_loaded
    for lifecycle in ("Starting", "Loading", "Failed"):
        told = sim.state().model_copy(update={"lifecycle": Lifecycle(lifecycle)})
        assert not ObservedWorker(told).is_loaded
    assert not ObservedWorker().is_loaded
    empty = sim.state().weights.model_copy(update={"active": None})
    assert not ObservedWorker(sim.state().model_copy(update={"weights": empty})).is_loaded


def test_a_pod_lacks_a_node_only_if_nothing_else_is_wrong_with_it() -> None:
    def lacks_node(**status: Any) -> bool:
        unbound = {**RAW, "spec": {}, "status": {"conditions": [NO_ROOM], **status}}
        found = read(unbound)
        return found.lacks_node

    assert lacks_node()
    assert lacks_node(conditions=[{**NO_ROOM, "reason": "SchedulingGated"}])
    assert not lacks_node(conditions=[{**NO_ROOM, "reason": "SchedulerError"}])
    assert not lacks_node(**waiting("ImagePullBackOff")), "that is trouble of its own"
    assert not lacks_node(reason="NodeLost")


def test_a_pod_that_is_older_than_the_label_of_its_class_gets_it() -> None:
    blue, labels = spec_of(operatorClass="blue"), made_by_us()["metadata"]["labels"]
    for spec, label, lacks in (
        (spec_of(), None, False),
        (blue, None, True),
        (blue, "green", True),
        (blue, "blue", False),
    ):
        own = labels if label is None else {**labels, "rollout.dev/operator-class": label}
        [pod] = tell_apart(made_by_us(metadata={"labels": own}), spec).ours
        assert pod.mislabelled is lacks
