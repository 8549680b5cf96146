"""The client against a real API server, under the account and rights of the chart's trainer.

The test plays the operator: it writes status. Members are discovered on real nodes, in tests/cluster/test_client_life.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from localkube import Cluster
from rollout_client import (
    AsyncRolloutPool,
    ClusterError,
    EpochLost,
    NoReplica,
    PublishFailed,
    PublishProgress,
    RolloutPool,
    SteeringFailed,
    Superseded,
    TurnFailed,
)
from tests.support.api.apiclient import POOLS, Obj, api_of
from tests.support.api.people import add_account
from tests.support.manifests import pool as manifest
from tests.support.waiting import until

NAMESPACE = "client"
NAME = "math"


@pytest.fixture(scope="module")
def cluster(policed: Cluster) -> Iterator[Cluster]:
    policed.kubectl("create", "namespace", NAMESPACE)
    policed.kubectl("-n", NAMESPACE, "create", "serviceaccount", "nobody")
    add_account(policed, NAMESPACE, "trainer", "rollout-trainer")
    yield policed
    policed.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture(scope="module")
def trainer(cluster: Cluster) -> Path:
    return cluster.service_account_kubeconfig(NAMESPACE, "trainer")


class Object:
    """The RolloutReplica of a test, and its status as an operator would write it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.api = api_of(cluster)
        self.name = name
        self.path = f"{POOLS.format(NAMESPACE)}/{name}"
        self.api.create(POOLS.format(NAMESPACE), manifest(name))

    def get(self) -> Obj:
        return self.api.get(self.path)

    def target(self) -> tuple[int, int] | None:
        found = self.get()["spec"].get("weights", {}).get("target")
        return (found["epoch"], found["version"]) if found else None

    def status(self, **fields: Any) -> None:
        generation = self.get()["metadata"]["generation"]
        body = {"status": {"observedGeneration": generation, **fields}}
        self.api.patch(f"{self.path}/status", body)

    def update(self, phase: str, message: str, committed: bool = False) -> None:
        """Status of the update to the target."""
        found = self.target()
        assert found is not None
        identity = {"epoch": found[0], "version": found[1]}
        weights: dict[str, Any] = {
            "lastUpdate": {**identity, "phase": phase, "message": message},
        }
        if committed:
            weights["committed"] = {**identity, "source": {"path": "p"}, "rootHash": "h"}
        self.status(weights=weights, readyReplicas=2)


@pytest.fixture
def pool_object(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Object]:
    name = "t" + str(abs(hash(request.node.name)) % 10**8)
    made = Object(cluster, name)
    yield made
    made.api.delete(made.path)


@pytest.fixture
async def pool(pool_object: Object, trainer: Path) -> AsyncIterator[AsyncRolloutPool]:
    async with AsyncRolloutPool.from_cluster(
        pool_object.name, NAMESPACE, kubeconfig=trainer
    ) as pool:
        yield pool


async def seen_target(pool_object: Object, version: int) -> None:
    def there() -> bool:
        found = pool_object.target()
        return found is not None and found[1] == version

    await until(there, what="the target")


# Rights.


async def test_without_the_right_the_reason_is_told(cluster: Cluster) -> None:
    nobody = cluster.service_account_kubeconfig(NAMESPACE, "nobody")
    async with AsyncRolloutPool.from_cluster(NAME, NAMESPACE, kubeconfig=nobody) as pool:
        with pytest.raises(NoReplica, match=r"cannot list resource \"endpointslices\""):
            await pool.generate([1], deadline_seconds=1)
        with pytest.raises(ClusterError, match="cannot get resource") as error:
            await pool.acquire()
        assert (error.value.status, error.value.reason) == (403, "Forbidden")


# Epochs.


async def test_epochs_are_taken_by_compare_and_swap(
    pool: AsyncRolloutPool, pool_object: Object, trainer: Path
) -> None:
    assert await pool.acquire() == 1
    # The operator's status writes are no competition.
    pool_object.status(message="busy")
    async with AsyncRolloutPool.from_cluster(
        pool_object.name, NAMESPACE, kubeconfig=trainer
    ) as other:
        assert await other.acquire() == 2
        with pytest.raises(EpochLost, match="epoch 2 has the pool, this one holds 1"):
            await pool.publish_weights(1, "1")
        assert pool_object.target() is None
        taken = await asyncio.gather(pool.acquire(), other.acquire(), return_exceptions=True)
        epochs = [each for each in taken if isinstance(each, int)]
        lost = [each for each in taken if isinstance(each, EpochLost)]
        assert epochs in ([3], [3, 4], [4, 3])
        assert len(epochs) + len(lost) == 2


async def test_the_epoch_is_above_all_that_were_used(
    pool: AsyncRolloutPool, pool_object: Object
) -> None:
    target = {"epoch": 7, "version": 2, "source": {"path": "a"}}
    pool_object.api.patch(pool_object.path, {"spec": {"weights": {"target": target}}})
    assert await pool.acquire() == 8


# Weights.


async def test_a_publish_follows_the_status_to_its_end(
    pool: AsyncRolloutPool, pool_object: Object
) -> None:
    told: list[PublishProgress] = []
    running = asyncio.create_task(pool.publish_weights(1, "steps/1", progress=told.append))
    await seen_target(pool_object, 1)
    await asyncio.to_thread(pool_object.update, "Staging", "staging on 2 replicas")
    await until(lambda: any(t.message == "staging on 2 replicas" for t in told), what="progress")
    await asyncio.to_thread(pool_object.update, "Committing", "committing")
    await asyncio.to_thread(pool_object.update, "Complete", "2 serve it", committed=True)
    done = await asyncio.wait_for(running, 10)
    assert done.identity.as_tuple() == (1, 1)
    assert (done.root_hash, done.replicas) == ("h", 2)
    assert [t.phase for t in told][-1] == "Complete"
    assert pool_object.get()["spec"]["weights"]["target"]["source"] == {"path": "steps/1"}
    # Asked for once more, it is there at once; going on, the other kind of source takes its place.
    assert (await pool.publish_weights(1, "steps/1")).identity == done.identity
    running = asyncio.create_task(pool.publish_weights(2, None))
    await seen_target(pool_object, 2)
    assert pool_object.get()["spec"]["weights"]["target"]["source"] == {"checkpoint": {}}
    await asyncio.to_thread(pool_object.update, "Complete", "2 serve it", committed=True)
    await asyncio.wait_for(running, 10)


async def test_the_operators_reason_is_raised(pool: AsyncRolloutPool, pool_object: Object) -> None:
    running = asyncio.create_task(pool.publish_weights(1, "bad"))
    await seen_target(pool_object, 1)
    reason = "tensor 'lm_head.weight' has shape [3]"
    await asyncio.to_thread(pool_object.update, "Failed", reason)
    with pytest.raises(PublishFailed, match=r"lm_head"):
        await asyncio.wait_for(running, 10)
    running = asyncio.create_task(pool.publish_weights(2, "later"))
    await seen_target(pool_object, 2)
    await asyncio.to_thread(pool_object.update, "Superseded", "given up: epoch 9 is newer")
    with pytest.raises(Superseded, match="epoch 9"):
        await asyncio.wait_for(running, 10)


async def test_versions_only_rise_and_the_deadline_is_kept(
    pool: AsyncRolloutPool, pool_object: Object
) -> None:
    with pytest.raises(PublishFailed, match=r"not committed within 1 s: .*the operator goes on"):
        await pool.publish_weights(3, "3", seconds=1)
    with pytest.raises(PublishFailed, match=r"lower than the stored"):
        await pool.publish_weights(2, "2")
    with pytest.raises(PublishFailed, match="must not change"):
        await pool.publish_weights(3, "other")


# State.


async def test_sleep_is_written_first_and_waits_for_the_workers(
    pool: AsyncRolloutPool, pool_object: Object
) -> None:
    running = asyncio.create_task(pool.sleep(seconds=30))
    await until(lambda: pool_object.get()["spec"].get("state") == "Asleep", what="the spec")
    transition = {"to": "Asleep", "startedAt": "2026-01-01T00:00:00Z"}
    await asyncio.to_thread(pool_object.status, lastTransition=transition)
    await asyncio.sleep(0.5)
    assert not running.done()
    ended = {**transition, "completedAt": "2026-01-01T00:00:01Z"}
    await asyncio.to_thread(pool_object.status, lastTransition=ended)
    await asyncio.wait_for(running, 10)
    await pool.sleep(seconds=5)  # once more: nothing to do


async def test_who_changes_the_state_meanwhile_wins(
    pool: AsyncRolloutPool, pool_object: Object
) -> None:
    running = asyncio.create_task(pool.sleep(seconds=30))
    await until(lambda: pool_object.get()["spec"].get("state") == "Asleep", what="the spec")
    pool_object.api.patch(pool_object.path, {"spec": {"state": "Paused"}})
    with pytest.raises(SteeringFailed, match=r"somebody set spec\.state to Paused"):
        await asyncio.wait_for(running, 10)
    with pytest.raises(SteeringFailed, match="not Asleep within 1 s"):
        await pool.sleep(seconds=1)


def test_the_synchronous_pool_reads_the_environment(
    pool_object: Object, trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(trainer))
    with RolloutPool.from_cluster(pool_object.name, NAMESPACE) as pool:
        assert pool.acquire() == pool.epoch == 1
    monkeypatch.setenv("KUBECONFIG", str(trainer.with_name("no-such-file")))
    with pytest.raises(ClusterError, match="no-such-file"):
        RolloutPool.from_cluster(pool_object.name, NAMESPACE)


def test_a_trainer_may_read_which_devices_its_pod_has(
    cluster: Cluster,
    trainer: Path,
    pool_object: Object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the chart's role lets it; another account is told which role it lacks."""
    request = {"name": "gpus", "exactly": {"deviceClassName": "gpu.example.com"}}
    claims = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"
    container = {"name": "train", "image": "none", "resources": {"claims": [{"name": "gpus"}]}}
    for path, body in (
        (
            claims,
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": "of-0"},
                "spec": {"devices": {"requests": [request]}},
            },
        ),
        (
            f"/api/v1/namespaces/{NAMESPACE}/pods",
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "trainer-0"},
                "spec": {
                    "serviceAccountName": "trainer",
                    "containers": [container],
                    "resourceClaims": [{"name": "gpus", "resourceClaimName": "of-0"}],
                },
            },
        ),
    ):
        pool_object.api.create(path, body)
    monkeypatch.setenv("POD_NAME", "trainer-0")
    options = {"directory": tmp_path, "seconds": 1}

    def turn(kubeconfig: Path) -> None:
        with (
            RolloutPool.from_cluster(pool_object.name, NAMESPACE, kubeconfig=kubeconfig) as pool,
            pool.turn(**options),  # type: ignore[arg-type]
        ):
            raise AssertionError

    with pytest.raises(TurnFailed, match=r"ResourceClaim client/of-0 .* is not allocated yet"):
        turn(trainer)
    given = {"request": "gpus", "driver": "gpu.example.com", "pool": "n", "device": "gpu-0"}
    status = {"status": {"allocation": {"devices": {"results": [given]}}}}
    pool_object.api.patch(f"{claims}/of-0/status", status)
    # The devices are known: what is missing now is a pool that falls asleep.
    with pytest.raises(SteeringFailed, match="not Asleep within"):
        turn(trainer)
    with pytest.raises(ClusterError, match=r"bind .* role rollout-trainer, which may get pods"):
        turn(cluster.service_account_kubeconfig(NAMESPACE, "nobody"))
