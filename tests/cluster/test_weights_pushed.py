"""A trainer pushes its tensors through the operator; no volume has them, and a joiner gets them all the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from safetensors.torch import load_file

import rollout_local
from localkube import Cluster
from rollout_client import RolloutPool
from tests.support.cluster.fleets import Fleet
from tests.support.cluster.pools import START_SECONDS
from tests.support.cluster.versions import steering_token

ACCOUNT = "push-trainer"

pytestmark = pytest.mark.timeout(540)
"""Alone, it also makes and removes the cluster, which takes minutes on a busy machine."""


LONGEST = 1900
"""Tokens of a request that outlives a scale-down."""

Connect = Callable[[], RolloutPool]


@pytest.fixture(scope="module")
def connect(cluster: Cluster, shared_fleet: Fleet) -> Connect:
    """Makes a trainer's connection to the pool."""
    fleet = shared_fleet
    grant = [f"--serviceaccount={fleet.namespace}:{ACCOUNT}", "--clusterrole=rollout-trainer"]
    for words in (["serviceaccount", ACCOUNT], ["rolebinding", ACCOUNT, *grant]):
        fleet.kubectl("create", *words, check=False)  # there from a run before
    return partial(
        RolloutPool.from_cluster,
        *(fleet.name, fleet.namespace),
        kubeconfig=cluster.service_account_kubeconfig(fleet.namespace, ACCOUNT),
        control_token=steering_token(fleet),
    )


def test_what_a_trainer_pushed_reaches_the_pool_who_joins_it_later_and_who_sleeps(
    fleet: Fleet, connect: Connect
) -> None:
    folder = rollout_local.make_models() / "weights"
    first, second = (load_file(folder / name / "model.safetensors") for name in ("2", "3"))
    with connect() as trainer:
        trainer.wait_serving(2, seconds=START_SECONDS)
        done = trainer.publish_weights(1, tensors=first)
    fleet.identity = done.identity.as_tuple()
    fleet.bytes_of[fleet.identity] = "2"
    fleet.settled(fleet.identity, 2)
    committed = fleet.status()["weights"]["committed"]
    assert committed["source"] == {"pushed": {}}
    assert committed["rootHash"] == done.root_hash
    assert fleet.update()["phase"] == "Complete"
    fleet.patch(replicas=3)
    fleet.settled(fleet.identity, 3, seconds=START_SECONDS)
    found = {fleet.weights(replica)["active"]["root_hash"] for replica in range(3)}
    assert found == {done.root_hash}
    kept = [fleet.weights(replica)["kept"] for replica in range(3)]
    assert [(k["epoch"], k["version"]) for k in kept] == [fleet.identity] * 3, "each can give it"
    with connect() as trainer:
        trainer.sleep()
        done = trainer.publish_weights(2, tensors=second)
        assert fleet.status()["phase"] == "Asleep", "nobody is woken for it"
        assert fleet.committed() == done.identity.as_tuple()
        assert [fleet.active(replica) for replica in range(3)] == [fleet.identity] * 3
        trainer.wake()
    fleet.identity = done.identity.as_tuple()
    fleet.bytes_of[fleet.identity] = "3"
    fleet.settled(fleet.identity, 3)
    found = {fleet.weights(replica)["active"]["root_hash"] for replica in range(3)}
    assert found == {done.root_hash}, "they had it when they woke"


def test_a_drain_takes_the_only_copy_once_another_node_has_one(
    cluster: Cluster, fleet: Fleet, connect: Connect
) -> None:
    # A scale-down leaves the one that has something to do, whatever its number.
    running = fleet.long_request(1, LONGEST)
    fleet.patch(replicas=1)
    fleet.eventually("the idle replica is gone", lambda: len(fleet.pods()) == 1, 60)
    assert running.result().status == 200
    weights = load_file(rollout_local.make_models() / "weights" / "1" / "model.safetensors")
    with connect() as trainer:
        done = trainer.publish_weights(3, tensors=weights)
    fleet.identity = done.identity.as_tuple()
    fleet.bytes_of[fleet.identity] = "1"
    assert fleet.serves(fleet.identity, 60)
    before = fleet.pod(1)
    node, since = before["spec"]["nodeName"], fleet.now()
    drain = ("drain", node, f"--pod-selector={fleet.selector}", "--delete-emptydir-data")
    try:
        said = cluster.kubectl(*drain, f"--timeout={START_SECONDS:.0f}s", timeout=START_SECONDS + 9)
        assert f"{fleet.name}-1-0 evicted" in said
        fleet.eventually("the added replica is gone", lambda: len(fleet.pods()) == 1, START_SECONDS)
        assert fleet.serves(fleet.identity, 60)
    finally:
        cluster.kubectl("uncordon", node)
    after = fleet.pod(1)
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert after["spec"]["nodeName"] != node
    assert fleet.weights(1)["active"]["root_hash"] == done.root_hash
    for status in fleet.history(since):
        ready = {c["type"]: c["status"] for c in status["conditions"]}["Ready"]
        assert ready == "True", "some replica serves all the time"
