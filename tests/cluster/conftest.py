"""One real cluster for the whole tier: two nodes, the operator installed by Helm, three namespaces.

`ROLLOUT_TEST_CLUSTER=<name>` uses a running cluster of that name and leaves it as it is: quicker
while writing tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

import images
import rollout_local
from demo import train
from localkube import Cluster
from tests.support.cluster.fleets import Fleet
from tests.support.cluster.pools import Pool
from tests.support.clusters import run_cluster

NAMESPACES = ("pools", "weights", "trainers")
COLOCATED = "colocated"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster with the operator on it."""
    if os.geteuid() != 0:
        pytest.skip("real nodes need root")
    name = os.environ.get("ROLLOUT_TEST_CLUSTER")
    if name:
        running = Cluster.attach(name)
        _install(running)
        yield running
        return
    images.build()
    # One accelerator on each, so that the two pods of a gang run on two nodes.
    with run_cluster("tier", nodes=2, gpus=1, devices=2) as made:
        _install(made)
        yield made


def _install(cluster: Cluster) -> None:
    images.build()
    images.load(cluster)
    folder = rollout_local.make_models()
    # The training's is there from the start, too: an upgrade for it would replace the operator.
    rollout_local.install(
        cluster,
        *NAMESPACES,
        train.NAMESPACE,
        COLOCATED,
        colocation=rollout_local.colocation(COLOCATED),
    )
    # Whatever shares a trainer's devices gets by with what everybody may do.
    rollout_local.namespace(cluster, COLOCATED, "restricted")
    for namespace in NAMESPACES:
        rollout_local.claims(cluster, namespace, folder)


@pytest.fixture
def pool(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Callable[..., Pool]]:
    """Make pools that are gone after the test: `pool("name", replicas=2)`."""
    made: list[Pool] = []

    def make(name: str, namespace: str = "pools", **spec: object) -> Pool:
        made.append(Pool(cluster, namespace, name).apply(**spec))
        return made[-1]

    yield make
    for each in made:
        each.delete()


@pytest.fixture(scope="session")
def shared_fleet(cluster: Cluster) -> Iterator[Fleet]:
    """The pool of the weights' tests, just created: nobody serves yet."""
    fleet = Fleet(cluster, "weights", "w")
    fleet.create(replicas=2)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Fleet:
    """The same pool, serving, whatever the test before left."""
    shared_fleet.steady(replicas=2)
    return shared_fleet
