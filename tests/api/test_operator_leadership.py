"""The Lease on a real API server, with the clock in the test's hand."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from localkube import Cluster
from rollout_operator.api.names import ANNOTATION_SHARDS
from rollout_operator.kube import lease
from rollout_operator.kube.kube_client import KubeClient
from rollout_operator.kube.lease import Leadership
from rollout_operator.kube.settings import LEASE_DURATION_SECONDS, RENEW_DEADLINE_SECONDS
from rollout_operator.kube.shard_lease import LeadershipLost
from tests.support.waiting import until

NAMESPACE = "leadership"
PACES = ("STANDBY_POLL_SECONDS", "LAYOUT_RETRY_SECONDS", "RENEW_INTERVAL_SECONDS")
_numbers = itertools.count()


class Clock:
    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def cluster(api_server: Cluster) -> Iterator[Cluster]:
    api_server.kubectl("create", "namespace", NAMESPACE)
    yield api_server
    api_server.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


class Election:
    """Candidates for one Lease, each with a clock of its own."""

    def __init__(self, kube: KubeClient, sent: Counter[str]) -> None:
        self.kube = kube
        self.sent = sent
        """Requests by their verbs."""
        self.lease = f"lease-{next(_numbers)}"
        self.clocks: dict[str, Clock] = {}

    def candidate(self, name: str, shards: int = 1) -> Leadership:
        clock = self.clocks[name] = Clock()
        return Leadership(
            self.kube,
            namespace=NAMESPACE,
            name=self.lease,
            identity=name,
            shards=shards,
            clock=clock,
        )

    async def holder(self) -> str:
        lease = await self.kube.get("leases", NAMESPACE, self.lease)
        return str(lease["spec"]["holderIdentity"])

    async def happens(self, *verbs: str, times: int = 2) -> None:
        """Wait until so many more requests of each of these kinds have been answered: looks (get), renewals (patch)."""
        wanted = {verb: self.sent[verb] + times for verb in verbs}
        await until(lambda: all(self.sent[v] >= n for v, n in wanted.items()), what=f"{verbs}")


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks or renews does so all the time."""
    for name in PACES:
        monkeypatch.setattr(lease, name, 0.02)


@pytest.fixture
async def election(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Election]:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    sent: Counter[str] = Counter()
    async with KubeClient(on_request=lambda verb, resource, code: sent.update([verb])) as kube:
        yield Election(kube, sent)


async def acquired(leader: Leadership) -> None:
    async with asyncio.timeout(10):
        await leader.acquire_lease()


async def test_permission_to_write_ends_before_the_lease(election: Election) -> None:
    leader = election.candidate("a")
    clock = election.clocks["a"]
    assert not leader.may_write()
    await acquired(leader)
    assert leader.may_write()
    assert leader.write_seconds() == LEASE_DURATION_SECONDS - 1
    clock.now += RENEW_DEADLINE_SECONDS
    assert leader.write_seconds() == LEASE_DURATION_SECONDS - 1 - RENEW_DEADLINE_SECONDS
    clock.now += 0.1
    assert leader.write_seconds() == 0
    assert not leader.may_write()
    assert leader.has_lease(), "fenced, but nobody else has it"


async def test_a_renewal_that_comes_through_lifts_the_fence(election: Election) -> None:
    """Also if somebody has edited the Lease, and left the holder."""
    leader = election.candidate("a")
    await acquired(leader)
    label = {"metadata": {"labels": {"edited": "yes"}}}
    await election.kube.patch("leases", NAMESPACE, election.lease, label)
    election.clocks["a"].now += 3600
    assert not leader.may_write()
    holding = asyncio.create_task(leader.hold_lease())
    await until(leader.may_write, 10, what="the renewal")
    assert not holding.done()
    holding.cancel()
    await asyncio.wait({holding})


async def test_a_standby_waits_out_the_lease_by_its_own_clock(election: Election) -> None:
    leader, standby = election.candidate("a"), election.candidate("b")
    await acquired(leader)
    waiting = asyncio.create_task(standby.acquire_lease())
    await election.happens("get")
    election.clocks["b"].now += LEASE_DURATION_SECONDS - 1
    await election.happens("get")
    assert not waiting.done()
    election.clocks["b"].now += 2
    await asyncio.wait_for(waiting, 5)
    assert await election.holder() == "b"

    with pytest.raises(LeadershipLost, match="held by 'b'"):
        async with asyncio.timeout(10):
            await leader.hold_lease()
    assert not leader.has_lease()
    assert not leader.may_write()


async def test_a_leader_that_renews_is_left_alone(election: Election) -> None:
    leader, standby = election.candidate("a"), election.candidate("b")
    await acquired(leader)
    holding = asyncio.create_task(leader.hold_lease())
    waiting = asyncio.create_task(standby.acquire_lease())
    for _ in range(4):
        await election.happens("get", "patch")
        election.clocks["b"].now += LEASE_DURATION_SECONDS - 1
    assert not waiting.done()
    for task in (holding, waiting):
        task.cancel()
    await asyncio.wait({holding, waiting})


async def test_a_released_lease_is_taken_at_once(election: Election) -> None:
    leader, standby = election.candidate("a"), election.candidate("b")
    await acquired(leader)
    await leader.release_lease()
    assert not leader.may_write()
    async with asyncio.timeout(LEASE_DURATION_SECONDS / 2):
        await standby.acquire_lease()
    lease = await election.kube.get("leases", NAMESPACE, election.lease)
    assert lease["spec"]["holderIdentity"] == "b"
    assert lease["spec"]["leaseTransitions"] == 1
    assert lease["spec"]["leaseDurationSeconds"] == LEASE_DURATION_SECONDS
    await leader.release_lease()  # what it does not hold it can't give away
    assert await election.holder() == "b"


async def test_candidates_with_different_numbers_of_shards_never_lead_together(
    election: Election,
) -> None:
    """They begin at the same time, and end one after the other."""
    candidates = [
        election.candidate(f"{shards}.{number}", shards)
        for shards in (1, 2, 3)
        for number in range(shards)
    ]
    led: set[int] = set()

    async def lead(candidate: Leadership) -> None:
        await candidate.acquire_lease()
        for _ in range(10):
            leaders = [each for each in candidates if each.may_write()]
            assert {each.shards for each in leaders} == {candidate.shards}
            assert len({each.shard for each in leaders}) == len(leaders)
            await asyncio.sleep(0.01)
        led.add(candidate.shards)
        await candidate.release_lease()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for candidate in candidates:
            group.create_task(lead(candidate))
    assert led == {1, 2, 3}


async def test_a_holder_of_an_earlier_release_has_one_shard(
    election: Election, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = election.candidate("old"), election.candidate("new", shards=2)
    await acquired(old)
    unnamed = {"metadata": {"annotations": {ANNOTATION_SHARDS: None}}}
    await election.kube.patch("leases", NAMESPACE, election.lease, unnamed)
    waiting = asyncio.create_task(new.acquire_lease())
    await election.happens("get", times=40)  # sixteen Leases at a look
    assert not new.has_lease()
    assert caplog.text.count("is held by an operator with --shards=1") == 1, "told once"
    released = {"spec": {"holderIdentity": ""}}
    await election.kube.patch("leases", NAMESPACE, election.lease, released)
    await asyncio.wait_for(waiting, 10)


async def test_without_an_api_server_one_waits(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    dead = cluster.kubeconfig.read_text().replace(f":{cluster.settings.api_port}", ":1")
    path = cluster.state / "dead.kubeconfig"
    path.write_text(dead)
    monkeypatch.setenv("KUBECONFIG", str(path))
    async with KubeClient() as kube:
        leader = Leadership(kube, namespace=NAMESPACE, name="dead", identity="a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await leader.acquire_lease()
        assert leader.silent_seconds() < 2
    assert caplog.text.count("can't acquire the Lease") == 1, "told once"
