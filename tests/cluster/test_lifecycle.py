"""A pool's life on a real cluster: made, scaled, upgraded, taken from, deleted, off a lost node.

That its workers are killed, rolled and suspended is seen where a pool lives anyway, for each of those is a
worker that starts: `test_client_life`, `test_weights_cases`, `test_weights_commits`. Names that are taken, Services that are
changed and `reconcile-paused` need no node: `tests/api/test_operator_reconcile.py`, and `test_zz_rights`.
"""

from __future__ import annotations

import os
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rollout_local
from localkube import Cluster
from rollout_client.commands.rollout_command import run_command
from tests.support.cluster.fleets import Fleet
from tests.support.cluster.pools import PROMPT, START_SECONDS, Pool, operator_pids
from tests.support.waiting import eventually

MakePool = Callable[..., Pool]


@pytest.fixture(scope="module")
def life(shared_fleet: Fleet) -> Fleet:
    """The pool of the weights' tests, which several tests here change and leave serving."""
    shared_fleet.settled(shared_fleet.identity, 2, START_SECONDS)
    return shared_fleet


def stop_operator(cluster: Cluster) -> None:
    """Leave no operator; `rollout_local.install` brings it back."""
    rollout_local.install(cluster, replicaCount=0)
    eventually("the operator is gone", lambda: not operator_pids(cluster), 60)


def test_children_are_the_contract(life: Fleet) -> None:
    names = sorted(pod["metadata"]["name"] for pod in life.pods())
    assert names == ["w-0-0", "w-1-0"]
    status = life.status()
    assert status["replicas"] == status["readyReplicas"] == status["updatedReplicas"] == 2
    assert status["selector"] == "rollout.dev/pool=w,rollout.dev/role=head"
    assert {m["name"] for m in status["members"]} == set(names)
    life.eventually("both are endpoints", lambda: len(life.endpoints()) == 2)
    answer = life.generate()
    assert life.identities(answer) == [life.identity]
    looked_up = life.kubectl(
        "exec", "w-0-0", "--", "python3", "-c",
        "import socket; print(socket.gethostbyname('w-1-0.w-heads'))",
    ).strip()  # fmt: skip
    assert looked_up == life.pod(1)["status"]["podIP"]


def test_a_person_sees_what_matters(life: Fleet) -> None:
    header, row = life.kubectl("get", "rr", "w", "-o", "wide").strip().splitlines()
    columns = ["MODE", "ENGINE", "DESIRED", "READY", "WEIGHTS", "TARGET", "PHASE", "AGE"]
    assert header.split()[1:9] == columns
    version = str(life.identity[1])
    assert row.split()[1:8] == ["Standalone", "hf", "2", "2", version, version, "Ready"]
    described = life.kubectl("describe", "rr", "w")
    assert "2 of 2 replicas serve" in described
    assert "Ready" in described.partition("Events:")[2]


def test_the_command_line_on_a_real_pool(
    life: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(verb: str, *words: str) -> str:
        where = ("-n", life.namespace, "--kubeconfig", str(life.cluster.kubeconfig))
        status = run_command("rollout", [verb, "w", *words, *where])
        shown = capsys.readouterr()
        assert status == 0, shown.out + shown.err
        return shown.out

    life.settled(life.identity, 2, START_SECONDS)
    tree = run("status")
    assert f"2 of 2 replicas serve  weights ({life.identity[0]}, {life.identity[1]})" in tree
    assert "└─ w-1-0  Running  on " in tree
    why = run("why", "--operator-namespace", rollout_local.SYSTEM)
    assert "nothing is known to be wrong" in why
    assert "not read" not in why
    ids = run("generate", "--ids", ",".join(map(str, PROMPT)), "--max-tokens", "4")
    assert len(ids.split(",")) == 4
    archive = tmp_path / "w.tar.gz"
    run("collect", "--file", str(archive), "--operator-namespace", rollout_local.SYSTEM)
    with tarfile.open(archive) as found:
        sizes = {each.name: each.size for each in found}
    assert sizes["w/unread.txt"] == 0
    assert all(sizes[f"w/{name}"] for name in ("logs/w-0-0.log", "metrics/w-1-0.txt"))
    assert any(name.startswith("w/operator/") for name in sizes)


@pytest.mark.soak
def test_the_operator_is_killed_and_nothing_happens_to_the_pool(
    cluster: Cluster, life: Fleet
) -> None:
    """Most of it waits for the Lease to run out. Every day it dies while a pool commits, which goes on serving
    (`test_the_operator_dies_while_committing`), and among workers that take turns (`test_colocated`)."""
    version = life.get()["metadata"]["resourceVersion"]
    for pid in operator_pids(cluster):
        os.kill(pid, signal.SIGKILL)
    assert life.generate()
    life.patch(state="Paused")
    life.eventually("a new leader acts", lambda: life.status()["phase"] == "Paused", 60)
    assert life.get()["metadata"]["resourceVersion"] != version
    life.patch(state="Active")
    life.wait("Ready")


@pytest.mark.soak
def test_a_lost_node_costs_a_replacement(cluster: Cluster, pool: MakePool) -> None:
    """Kill -9 of a whole node: its pod stays Terminating, is forced away and made elsewhere.

    A minute and a half, most of it Kubernetes' own deadlines. Every day the same is seen of a node without
    processes, from its eviction on (`test_a_pod_of_a_dead_node_is_freed_and_made_on_another`, in `tests/scale`).
    """
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


@pytest.fixture(scope="module")
def upgraded(cluster: Cluster, life: Fleet) -> Iterator[tuple[set[str], str]]:
    """The operator with other defaults of an engine, for the last tests here; a pool's pods and version before.

    The way back takes no rolling update: no operator runs when it begins.
    """
    before = uids(life), life.get()["metadata"]["resourceVersion"]
    engines = {"hf": {"image": "localhost/another-image:1", "podTemplate": {"labels": {"x": "y"}}}}
    rollout_local.install(cluster, engines=engines)
    yield before
    stop_operator(cluster)
    rollout_local.install(cluster)


def uids(pool: Pool) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pool.pods()}


def test_an_upgrade_of_the_operator_rolls_nothing(
    life: Fleet, upgraded: tuple[set[str], str]
) -> None:
    time.sleep(5)
    pods, version = upgraded
    assert uids(life) == pods
    assert life.get()["metadata"]["resourceVersion"] == version, "nothing was written either"


@pytest.mark.soak
@pytest.mark.usefixtures("upgraded")
def test_deleted_while_the_operator_is_down(cluster: Cluster, pool: MakePool) -> None:
    """Every day this is seen of pods without processes, in `tests/scale/test_fleet.py`."""
    made = pool("orphan", replicas=1)
    made.eventually("it has a pod", lambda: made.pods(), 30)
    stop_operator(cluster)
    made.delete()
    assert made.left() == []
