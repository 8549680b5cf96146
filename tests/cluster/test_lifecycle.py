"""A pool's life on a real cluster: made, scaled, upgraded, taken from, deleted, off a lost node.

That its workers are killed, rolled and suspended is seen where a pool lives anyway, for each of those is a
worker that starts: `test_client_life`, `test_weights_cases`, `test_weights_commits`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

import rollout_local
from localkube import Cluster
from operators import operator_pids
from pools import Pool, manifest
from waiting import eventually

MakePool = Callable[..., Pool]


@pytest.fixture(scope="module")
def life(cluster: Cluster) -> Iterator[Pool]:
    """One pool that several tests change and leave serving."""
    pool = Pool(cluster, "pools", "life").apply(replicas=2)
    pool.wait("Ready")
    yield pool
    pool.delete()


def scale_operator(cluster: Cluster, replicas: int) -> None:
    words = ("-n", rollout_local.SYSTEM, "scale", "deployment/rollout-operator")
    cluster.kubectl(*words, f"--replicas={replicas}")
    if replicas:
        cluster.kubectl(
            "-n", rollout_local.SYSTEM, "rollout", "status", "deployment/rollout-operator",
            "--timeout=60s",
        )  # fmt: skip
    else:
        eventually("the operator is gone", lambda: not operator_pids(cluster), 60)


def test_children_are_the_contract(life: Pool) -> None:
    names = sorted(pod["metadata"]["name"] for pod in life.pods())
    assert names == ["life-0-0", "life-1-0"]
    status = life.status()
    assert status["replicas"] == status["readyReplicas"] == status["updatedReplicas"] == 2
    assert status["selector"] == "rollout.dev/pool=life,rollout.dev/role=head"
    assert {m["name"] for m in status["members"]} == set(names)
    life.eventually("both are endpoints", lambda: len(life.endpoints()) == 2)
    answer = life.generate()
    assert life.identities(answer) == [(0, 0)]
    looked_up = life.kubectl(
        "exec", "life-0-0", "--", "python3", "-c",
        "import socket; print(socket.gethostbyname('life-1-0.life-heads'))",
    ).strip()  # fmt: skip
    assert looked_up == life.pod(1)["status"]["podIP"]


def test_a_person_sees_what_matters(life: Pool) -> None:
    header, row = life.kubectl("get", "rr", "life", "-o", "wide").strip().splitlines()
    assert header.split()[1:8] == ["MODE", "ENGINE", "DESIRED", "READY", "WEIGHTS", "PHASE", "AGE"]
    assert row.split()[1:7] == ["Standalone", "hf", "2", "2", "0", "Ready"]
    described = life.kubectl("describe", "rr", "life")
    assert "2 of 2 replicas serve" in described
    assert "Ready" in described.partition("Events:")[2]


def test_an_upgrade_of_the_operator_rolls_nothing(cluster: Cluster, life: Pool) -> None:
    before = {pod["metadata"]["uid"] for pod in life.pods()}
    generation = life.get()["metadata"]["resourceVersion"]
    engines = {"hf": {"image": "localhost/another-image:1", "podTemplate": {"labels": {"x": "y"}}}}
    rollout_local.install(cluster, engines=engines)
    time.sleep(5)
    assert {pod["metadata"]["uid"] for pod in life.pods()} == before
    assert life.get()["metadata"]["resourceVersion"] == generation, "nothing was written either"
    rollout_local.install(cluster)


def test_reconcile_paused_and_kubectl_scale(life: Pool) -> None:
    life.annotate(reconcile_paused="true")
    life.eventually("it says so", lambda: "reconcile-paused" in life.status()["message"])
    life.kubectl("scale", "rr", "life", "--replicas=3")
    time.sleep(3)
    assert len(life.pods()) == 2
    life.annotate(reconcile_paused=None)
    life.eventually("it goes on", lambda: len(life.pods()) == 3, 40)
    life.wait("Ready")
    life.kubectl("scale", "rr", "life", "--replicas=1")
    life.eventually("one pod is left", lambda: len(life.pods()) == 1, 40)
    life.wait("Ready")
    assert life.pods()[0]["metadata"]["name"] == "life-0-0"
    assert life.status()["replicas"] == 1


def test_a_taken_name_is_reported_and_not_adopted(cluster: Cluster, pool: MakePool) -> None:
    stranger = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "taken"},
        "spec": {"ports": [{"port": 1}], "selector": {"app": "strange"}},
    }
    cluster.kubectl("-n", "pools", "apply", "-f", "-", input=json.dumps(stranger))
    made = pool("taken", replicas=0)
    made.eventually("NameConflict", lambda: made.condition("Degraded") == ("True", "NameConflict"))
    kept = made.service()
    assert kept["spec"]["selector"] == {"app": "strange"}
    assert "ownerReferences" not in kept["metadata"]
    made.kubectl("delete", "service", "taken")
    made.eventually("it makes its own", lambda: made.condition("Degraded")[0] == "False", 40)


def test_a_taken_pod_name_is_reported(cluster: Cluster, pool: MakePool) -> None:
    stranger = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "squatter-0-0"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "c", "image": "localhost/pause:1"}],
        },
    }
    cluster.kubectl("-n", "pools", "apply", "-f", "-", input=json.dumps(stranger))
    made = pool("squatter", replicas=1)
    made.eventually("NameConflict", lambda: made.condition("Degraded") == ("True", "NameConflict"))
    assert "squatter-0-0" in made.status()["message"]
    made.kubectl("delete", "pod", "squatter-0-0", "--wait=false")
    made.eventually("its own pod", lambda: made.pods(), 40)


def test_a_changed_service_is_mended(life: Pool) -> None:
    life.kubectl(
        "patch", "service", "life", "--type=merge", "-p", '{"spec": {"selector": {"a": "b"}}}'
    )

    def mended() -> bool:
        wanted = {"rollout.dev/pool": "life", "rollout.dev/role": "head"}
        return bool(life.service()["spec"]["selector"] == wanted)

    life.eventually("the selector is back", mended)


def test_the_operator_is_killed_and_nothing_happens_to_the_pool(
    cluster: Cluster, life: Pool
) -> None:
    version = life.get()["metadata"]["resourceVersion"]
    for pid in operator_pids(cluster):
        os.kill(pid, signal.SIGKILL)
    assert life.generate()
    life.patch(state="Paused")
    life.eventually("a new leader acts", lambda: life.status()["phase"] == "Paused", 60)
    assert life.get()["metadata"]["resourceVersion"] != version
    life.patch(state="Active")
    life.wait("Ready")


def test_deleted_while_the_operator_is_down(cluster: Cluster, pool: MakePool) -> None:
    made = pool("orphan", replicas=1)
    made.eventually("it has a pod", lambda: made.pods(), 30)
    scale_operator(cluster, 0)
    try:
        made.delete()
        assert made.left() == []
    finally:
        scale_operator(cluster, 2)


def test_a_lost_node_costs_a_replacement(cluster: Cluster, pool: MakePool) -> None:
    """Kill -9 of a whole node: its pod stays Terminating, is forced away and made elsewhere."""
    spread = {
        "podTemplate": {
            "nodeSelector": {},
            "tolerations": [
                {
                    "key": f"node.kubernetes.io/{word}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": 1,
                }
                for word in ("not-ready", "unreachable")
            ],
        }
    }
    cluster.kubectl("cordon", "node-1")
    try:
        made = pool("lost", replicas=1, drainSeconds=0, **spread)
        made.wait("Ready")
        assert made.pod()["spec"]["nodeName"] == "node-2"
        uid = made.pod()["metadata"]["uid"]
        cluster.kubectl("uncordon", "node-1")
        # The operator may live on that node, too: then the standby takes over first.
        cluster.node_crash(2)
        made.eventually(
            "the pod is made anew on the other node",
            lambda: [pod["metadata"]["uid"] for pod in made.pods()] not in ([], [uid]),
            150,
            every=1,
        )
        made.wait("Ready")
        assert made.pod()["spec"]["nodeName"] == "node-1"
        assert made.generate()
    finally:
        cluster.kubectl("uncordon", "node-1")
        cluster.node_add(2)


def test_a_strange_field_is_refused_by_kubectl(cluster: Cluster) -> None:
    body = manifest("odd", replicaz=3)
    answer = cluster.kubectl(
        "-n", "pools", "apply", "--dry-run=server", "-f", "-", input=json.dumps(body), check=False
    )
    assert "replicaz" in answer
