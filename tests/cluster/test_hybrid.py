"""A pool in a trainer's own pods, on a real cluster: the operator makes none of them and leads to those that serve.

The workers are plain ones, which is what a pool sees of a worker that is embedded in a trainer, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localkube import Cluster
from tests.support.cluster.inside import REPLICAS, Inside
from tests.support.cluster.pools import START_SECONDS

NAMESPACE = "pools"


@pytest.fixture(scope="module")
def pool(cluster: Cluster) -> Iterator[Inside]:
    """The pool, applied before there is a trainer."""
    made = Inside(cluster, NAMESPACE, "inside", "grpo")
    made.make()
    yield made
    made.kubectl("delete", "statefulset", made.trainer, "--ignore-not-found")
    made.delete()


def serves(pool: Inside, *replicas: int) -> bool:
    """Whether the Service leads to exactly these pods."""
    return sorted(pool.endpoints()) == sorted(pool.address(replica) for replica in replicas)


def test_it_waits_for_its_trainer_and_serves_in_its_pods(pool: Inside) -> None:
    pool.eventually(
        "it says for whom", lambda: pool.condition("Progressing") == ("True", "WaitingForTrainer")
    )
    pool.start_trainer()
    pool.wait("Ready")
    assert pool.status()["desiredReplicas"] == REPLICAS
    assert serves(pool, 0, 1)
    assert pool.identities(pool.generate()) == [(0, 0)]
    row = pool.kubectl("get", "rr", pool.name).splitlines()[1].split()
    assert row[1:5] == ["Hybrid", "hf", "2", "2"]
    for replica in range(REPLICAS):
        meta = pool.pod(replica)["metadata"]
        assert meta["ownerReferences"][0]["kind"] == "StatefulSet"
        assert not [key for key in meta["labels"] if key.startswith("rollout.dev/")]


def test_its_members_have_names(pool: Inside) -> None:
    """Looked up by a pod, as trainers do."""
    names = [f"{pool.name}-{i}-0.{pool.name}-heads" for i in range(REPLICAS)]
    look = "import socket, sys; print(*(socket.gethostbyname(n) for n in sys.argv[1:]))"
    inside = ("exec", f"{pool.trainer}-0", "--", "python3", "-c", look, *names)
    wanted = [pool.address(0), pool.address(1)]
    pool.eventually("DNS has them", lambda: pool.kubectl(*inside, check=False).split() == wanted)


def test_an_update_is_committed_by_the_operator(pool: Inside) -> None:
    pool.target(1, 1, "1")
    pool.eventually("it is committed", lambda: pool.committed() == (1, 1), 60)
    pool.eventually("all serve it", lambda: pool.identities(pool.generate()) == [(1, 1)])
    assert pool.status()["weights"]["lastUpdate"]["phase"] == "Complete"


def test_asleep_nobody_gets_requests(pool: Inside) -> None:
    pool.patch(state="Asleep")
    pool.eventually("all sleep", lambda: pool.status()["phase"] == "Asleep", 60)
    assert pool.endpoints() == []
    pool.patch(state="Active")
    pool.wait("Ready")
    assert serves(pool, 0, 1)


def test_who_is_killed_or_replaced_comes_back_at_the_pools_weights(pool: Inside) -> None:
    """One starts again in its pod, the other in a new one."""
    before = [pool.pod(i)["metadata"]["uid"] for i in range(REPLICAS)]
    pool.kill(0)
    pool.eventually("the killed one leaves the Service", lambda: serves(pool, 1))
    pool.kubectl("delete", "pod", f"{pool.trainer}-1", "--wait=false")
    pool.eventually("the deleted one leaves it, too", lambda: not pool.endpoints())
    pool.eventually("both serve", lambda: serves(pool, 0, 1), START_SECONDS)
    after = [pool.pod(i)["metadata"]["uid"] for i in range(REPLICAS)]
    assert after[0] == before[0]
    assert after[1] != before[1]
    for replica in range(REPLICAS):
        assert pool.identities(pool.generate(replica)) == [(1, 1)]
    assert pool.status()["restarts"] == 1, (
        "the container that was killed; the operator restarted nobody"
    )


def test_the_trainers_pods_outlive_the_pool(pool: Inside) -> None:
    pool.delete()
    assert [pool.pod(i)["status"]["phase"] for i in range(REPLICAS)] == ["Running"] * REPLICAS
