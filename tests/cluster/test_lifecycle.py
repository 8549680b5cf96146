"""A pool's life on a real cluster: made, asked, put to sleep, off a lost node.

That its workers are killed, rolled and suspended is seen where a pool lives anyway, for each of those is a
worker that starts: `test_client_life`, `test_weights_cases`. Names that are taken, Services that are changed, operators
that come with other defaults and pools that go while there is none need no node: `tests/api/test_operator_reconcile.py`,
`tests/scale/test_fleet.py`.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import rollout_local
from localkube import Cluster
from rollout_client.commands.rollout_command import run_command
from tests.support.cluster.fleets import Fleet
from tests.support.cluster.pools import PROMPT, START_SECONDS, Pool

MakePool = Callable[..., Pool]


@pytest.fixture(scope="module")
def life(shared_fleet: Fleet) -> Fleet:
    """The pool of the weights' tests, which several tests here change and leave serving."""
    shared_fleet.settled(shared_fleet.identity, 2, START_SECONDS)
    return shared_fleet


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


def test_sleep_and_wake(fleet: Fleet) -> None:
    """At the deeper level; what each level keeps of each engine is in tests/contract, with what holds of others do."""
    fleet.raise_to("3")
    fleet.settled(fleet.identity, 2)
    before = [fleet.generate(r, tokens=32, logprobs="raw") for r in (0, 1)]
    committed = fleet.committed()

    fleet.patch(state="Asleep", sleep={"level": 2})
    fleet.eventually("the pool is asleep", lambda: fleet.status()["phase"] == "Asleep")
    assert fleet.condition("Ready") == ("False", "Asleep")
    assert fleet.condition("Degraded")[0] == "False"
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

    fleet.patch(state="Active")
    fleet.settled(fleet.identity, 2)
    assert fleet.committed() == committed
    assert fleet.condition("Asleep") == ("False", "Awake")
    after = [fleet.generate(r, tokens=32, logprobs="raw") for r in (0, 1)]
    assert [a["outputs"] for a in after] == [b["outputs"] for b in before], "bit for bit"
    transition = fleet.status()["lastTransition"]
    assert (transition["from"], transition["to"]) == ("Asleep", "Active")
    assert transition["completedAt"] >= transition["startedAt"]


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
