"""Weights are pushed to real pods over TLS, by the operator's certificates, and a joiner fetches them so from its peers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

import images
import rollout_local
from localkube import Cluster
from localkube.pki import Authority
from rollout_client import RolloutPool, SteeringFailed
from rollout_common.transfer.connections.tls_session import TLS_NAME
from tests.support.cluster.pools import START_SECONDS, Pool
from tests.support.cluster.versions import steering_token
from tests.support.clusters import nodes_cluster

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
"""An operator has TLS for all pools or for none, so this needs a cluster of its own."""

NAMESPACE, SECRET, AUTHORITY = "secured", "workers-tls", "workers-ca"
REPLICAS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and what it issued to the workers."""
    made = tmp_path_factory.mktemp("tls")
    Authority(made, "ca").issue("worker", "/CN=worker", usage="serverAuth", san=f"DNS:{TLS_NAME}")
    return made


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[Pool]:
    """A pool whose weights move over TLS alone."""
    images.build()
    with nodes_cluster("tls", nodes=1) as cluster:
        images.load(cluster)
        models = rollout_local.make_models()
        for name, level in ((rollout_local.SYSTEM, "restricted"), (NAMESPACE, "baseline")):
            rollout_local.namespace(cluster, name, level)
        _secrets(cluster, folder)
        tls = {"controlTLS": {"secretName": SECRET, "caSecretName": AUTHORITY}}
        rollout_local.install(cluster, NAMESPACE, workers={"namespaces": [NAMESPACE], **tls})
        rollout_local.claims(cluster, NAMESPACE, models)
        made = Pool(cluster, NAMESPACE, "p")
        made.apply(replicas=REPLICAS, weights={"transport": {"tls": "Required"}})
        made.wait("Ready")
        yield made


def _secrets(cluster: Cluster, folder: Path) -> None:
    files = {"tls.crt": "worker.crt", "tls.key": "worker.key", "ca.crt": "ca.crt"}
    for namespace, name, keys in (
        (NAMESPACE, SECRET, tuple(files)),
        (rollout_local.SYSTEM, AUTHORITY, ("ca.crt",)),
    ):
        given = [f"--from-file={key}={folder / files[key]}" for key in keys]
        cluster.kubectl("-n", namespace, "create", "secret", "generic", name, *given)


def _trainer(pool: Pool, authority: Path | None) -> RolloutPool:
    return RolloutPool.from_cluster(
        pool.name,
        pool.namespace,
        kubeconfig=pool.cluster.kubeconfig,
        control_token=steering_token(pool),
        control_ca=authority,
    )


def _serving(pool: Pool) -> list[str]:
    """Replicas that serve the pushed version, as the operator hears from their control ports."""
    members = pool.status().get("members", ())
    ready = [member for member in members if member["ready"] and member["version"] == 1]
    return [member["name"] for member in ready]


def test_a_trainer_pushes_over_tls_and_a_joiner_fetches_over_tls(pool: Pool, folder: Path) -> None:
    weights = rollout_local.make_models() / "weights" / "2" / "model.safetensors"
    with _trainer(pool, folder / "ca.crt") as trainer:
        trainer.wait_serving(REPLICAS, seconds=START_SECONDS)
        done = trainer.publish_weights(1, tensors=load_file(weights), transport="tcp")
    assert done.identity.version == 1
    pool.eventually("all have it", lambda: len(_serving(pool)) == REPLICAS)
    assert pool.status()["weights"]["committed"]["rootHash"] == done.root_hash
    pool.patch(replicas=REPLICAS + 1)
    pool.eventually("the joiner has it", lambda: len(_serving(pool)) == REPLICAS + 1, START_SECONDS)
    assert pool.status()["weights"]["committed"]["rootHash"] == done.root_hash


def test_a_trainer_without_the_ca_is_told_what_to_give(pool: Pool) -> None:
    weights = rollout_local.make_models() / "weights" / "3" / "model.safetensors"
    before = pool.status()["weights"]["committed"]
    with _trainer(pool, None) as trainer, pytest.raises(SteeringFailed, match="control_ca"):
        trainer.publish_weights(2, tensors=load_file(weights), transport="tcp", seconds=60)
    assert pool.status()["weights"]["committed"] == before
