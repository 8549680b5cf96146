"""Steering a RolloutReplica through an API server that fails in passing, or refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_client import (
    AsyncRolloutPool,
    ClusterError,
    EpochLost,
    PublishFailed,
    SteeringFailed,
    WeightsId,
)
from rollout_client.cluster_client import ClusterClient, load_access
from rollout_client.hooks import Hook
from rollout_client.steering import cluster_steering
from rollout_client.steering.cluster_steering import ClusterSteering
from rollout_client.steering.control_ports import ControlPorts, read_mounted_token
from rollout_client.steering.steering_protocol import Published
from rollout_client.steering.steering_verbs import SteeringVerbs
from rollout_client.worker_control import WorkerControl
from rollout_common.kube.reflector import retry_pause
from rollout_worker.embedded.handing_over import HandedOver
from rollout_worker.schemas import Pushed, WeightsSource
from tests.support.loopback import Loopback, kubeconfig, loopback
from tests.support.unit import scripted_control
from tests.support.unit.receiver import Receiver
from tests.support.unit.scripted_control import (
    PUSHED_HASH,
    ScriptedControl,
    pushing,
    scripted_controls,
)

VERSION = WeightsId(epoch=1, version=1)
COLLECTION = "/apis/rollout.dev/v1alpha1/namespaces/train/rolloutreplicas"


class FlakyApi:
    """One RolloutReplica, whose reads and writes fail as told before they succeed.

    A failure is a status, or None for no answer at all; `lost` lets the write take effect first.
    """

    def __init__(self, server: Loopback) -> None:
        self.server = server
        self.reads: list[int | None] = []
        self.writes: list[int | None] = []
        self.lists: list[int] = []
        self.lost = False
        self.pool: dict[str, Any] = {
            "metadata": {"name": "math", "resourceVersion": "1", "generation": 1},
            "spec": {},
            "status": {},
        }
        server.answers["GET", f"{COLLECTION}/math"] = self._read
        server.answers["PATCH", f"{COLLECTION}/math"] = self._write
        server.answers["GET", COLLECTION] = self._list

    @property
    def epoch(self) -> str | None:
        """What the annotation says."""
        notes: dict[str, str] = self.pool["metadata"].get("annotations", {})
        return notes.get("rollout.dev/trainer-epoch")

    @property
    def source(self) -> dict[str, Any]:
        """The source that the target names."""
        named = self.pool["spec"]["weights"]["target"]["source"]
        return {kind: value for kind, value in named.items() if value is not None}

    async def _read(self, request: web.Request) -> web.StreamResponse:
        return self._failed(request, self.reads) or web.json_response(self.pool)

    async def _write(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        failing = bool(self.writes)
        if not failing or self.lost:
            answer = self._merged(body)
            if answer is not None:
                return answer
        return self._failed(request, self.writes) or web.json_response(self.pool)

    def _merged(self, body: dict[str, Any]) -> web.Response | None:
        meta = self.pool["metadata"]
        if body["metadata"]["resourceVersion"] != meta["resourceVersion"]:
            return web.json_response({"message": "it was changed"}, status=409)
        meta.setdefault("annotations", {}).update(body["metadata"].get("annotations", {}))
        self.pool["spec"].update(body.get("spec", {}))
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)
        meta["generation"] += "spec" in body
        return None

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return web.Response(text="")
        if self.lists:
            return web.json_response({"message": "no list"}, status=self.lists.pop(0))
        items = {"metadata": {"resourceVersion": "1"}, "items": [self.pool]}
        return web.json_response(items)

    def _failed(self, request: web.Request, failures: list[int | None]) -> web.Response | None:
        if not failures:
            return None
        status = failures.pop(0)
        if status is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.json_response({"message": "overloaded"}, status=status)

    def commits(self, epoch: int, version: int, root_hash: str = "h") -> None:
        """Note what an operator would, ahead of the order."""
        committed = {"epoch": epoch, "version": version, "rootHash": root_hash}
        self.pool["status"] = {"observedGeneration": 99, "weights": {"committed": committed}}


@pytest.fixture
async def api() -> AsyncIterator[FlakyApi]:
    async with loopback() as server:
        yield FlakyApi(server)


@pytest.fixture
async def steering(api: FlakyApi, tmp_path: Path) -> AsyncIterator[ClusterSteering]:
    kube = ClusterClient(load_access(kubeconfig(tmp_path, api.server.url)))
    made = ClusterSteering(kube, "math", "train")
    yield made
    await made.close()


def publish(steering: ClusterSteering, seconds: float = 20) -> Any:
    source = WeightsSource(path="steps/1")
    return steering.publish_identity(VERSION, source, seconds, lambda progress: None)


FAILURES = [[503], [429, 429], [500, 504], [None]]


@pytest.mark.parametrize(
    "steer",
    [
        lambda pool: pool.acquire(seconds=0.3),
        lambda pool: pool.sleep(seconds=0.3),
        lambda pool: pool.publish_weights(1, "steps/1", seconds=0.3),
    ],
    ids=["acquire", "sleep", "publish_weights"],
)
async def test_no_verb_waits_beyond_its_deadline_for_an_api_server_without_answers(
    tmp_path: Path, steer: Callable[[AsyncRolloutPool], Awaitable[object]]
) -> None:
    """Neither for the members nor for the object; a last request has a second."""
    async with loopback() as server:
        for collection in ("discovery.k8s.io/v1", "rollout.dev/v1alpha1"):
            kind = "rolloutreplicas/math" if "rollout" in collection else "endpointslices"
            server.delay("GET", f"/apis/{collection}/namespaces/train/{kind}", {}, 60)
        path = kubeconfig(tmp_path, server.url)
        async with AsyncRolloutPool.from_cluster("math", "train", kubeconfig=path) as pool:
            began = time.monotonic()
            with pytest.raises(ClusterError, match="no answer in time"):
                await steer(pool)
            assert time.monotonic() - began < 3


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between two tries of a request are short, and so is the time in which a worker has to tell its state."""
    monkeypatch.setattr(retry_pause, "__defaults__", (0.01, 0.1))
    monkeypatch.setattr(cluster_steering, "STATUS_POLL_SECONDS", 0.01)
    monkeypatch.setattr(scripted_control, "STATE_TIMEOUT_SECONDS", 0.5)
    defaults = WorkerControl.state.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "timeout", 0.5)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("failures", FAILURES, ids=str)
async def test_what_fails_in_passing_is_tried_again(
    api: FlakyApi, steering: ClusterSteering, failures: list[int | None]
) -> None:
    api.reads, api.writes = list(failures), list(failures)
    assert await steering.acquire_epoch(20) == 1
    api.reads, api.writes = list(failures), list(failures)
    api.lists = [each for each in failures if each is not None]
    api.commits(1, 1)
    assert (await publish(steering)).root_hash == "h"
    api.reads, api.writes = list(failures), list(failures)
    done = {"to": "Asleep", "completedAt": "2026-01-01T00:00:00Z"}
    api.pool["status"] = {"observedGeneration": 99, "lastTransition": done}
    await steering.change_state("Asleep", 20)
    assert api.pool["spec"]["state"] == "Asleep"
    api.reads = list(failures)
    assert await steering.wanted_state() == "Asleep"


async def test_an_epoch_whose_answer_was_lost_is_taken_over(
    api: FlakyApi, steering: ClusterSteering
) -> None:
    """Nobody can tell whether it was ours: the one above it shuts out whoever has it."""
    api.lost, api.writes = True, [None]
    assert await steering.acquire_epoch(20) == 2
    assert api.epoch == "2"


async def test_another_trainers_epoch_is_not_taken_over(
    api: FlakyApi, steering: ClusterSteering
) -> None:
    api.lost = True
    api.writes = [429]  # a refusal that can't have taken effect, and yet the epoch has risen
    with pytest.raises(EpochLost):
        await steering.acquire_epoch(20)


@pytest.mark.parametrize("part", ["reads", "writes"])
async def test_what_will_not_pass_is_told_at_once(
    api: FlakyApi, steering: ClusterSteering, part: str
) -> None:
    setattr(api, part, [403] * 9)
    for ask in (
        steering.acquire_epoch(600),
        publish(steering, 600),
        steering.change_state("Paused", 600),
    ):
        with pytest.raises(ClusterError) as caught:
            await asyncio.wait_for(ask, 10)
        assert caught.value.status == 403


async def test_who_may_not_follow_the_pool_is_told_at_once(
    api: FlakyApi, steering: ClusterSteering
) -> None:
    api.lists = [403] * 9
    with pytest.raises(ClusterError, match="no list"):
        await asyncio.wait_for(publish(steering, 600), 10)


async def test_an_api_server_that_stays_away_is_named_at_the_deadline(
    api: FlakyApi, steering: ClusterSteering
) -> None:
    api.reads = [503] * 99
    with pytest.raises(ClusterError, match="overloaded"):
        await steering.acquire_epoch(0.5)
    api.reads = []
    done = {"to": "Active", "completedAt": None}
    api.pool["status"] = {"observedGeneration": 1, "lastTransition": done, "message": "2 of 3"}
    with pytest.raises(SteeringFailed, match="2 of 3"):
        await steering.change_state("Active", 0.5)
    assert json.dumps(api.pool["spec"]) == "{}", "it was Active already: nothing was written"


@contextlib.asynccontextmanager
async def publishing(
    api: FlakyApi, home: Path, controls: Sequence[ScriptedControl], seconds: float = 20
) -> AsyncIterator[tuple[list[Receiver], asyncio.Future[Published]]]:
    """Publish a tensor to these heads; what each received, and the publish under way, all of it filled."""
    kube = ClusterClient(load_access(kubeconfig(home, api.server.url)))
    heads = ControlPorts(lambda: [each.member for each in controls], None)
    steering = ClusterSteering(kube, "math", "train", heads)
    source = WeightsSource(pushed=Pushed())
    publish = partial(steering.publish_identity, VERSION, source, seconds, lambda _: None)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(steering.close)
        yield await stack.enter_async_context(pushing(controls, publish))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("slow", [(1,), (0, 1)], ids=["one", "all"])
async def test_a_head_that_is_slow_to_answer_is_not_left_out(
    api: FlakyApi, tmp_path: Path, slow: tuple[int, ...]
) -> None:
    # It serves: the operator would wait for its bytes, and nobody would bring them.
    async with scripted_controls(2) as controls:
        for index in slow:
            controls[index].slow["state"] = 1
        api.commits(1, 1, PUSHED_HASH)
        async with publishing(api, tmp_path, controls) as (receivers, sending):
            await sending
            assert [bool(each.content) for each in receivers] == [True, True]


async def test_pushed_weights_are_on_every_head_before_the_target_moves(
    api: FlakyApi, tmp_path: Path
) -> None:
    async with scripted_controls(3) as controls:
        controls[1].resident = False  # asleep: it keeps them for its wake
        controls[2].refuse["stage"] = (409, "asleep")  # of an older release
        controls[2].resident = controls[2].serving = False
        async with publishing(api, tmp_path, controls) as (receivers, sending):
            api.commits(1, 1, PUSHED_HASH)
            done = await sending
            assert api.source == {"pushed": {}}
            assert [bool(each.content) for each in receivers] == [True, True, False]
            assert [each.verbs for each in controls] == [["stage"]] * 3
            assert done.report is not None
            assert sorted(done.report.replicas) == ["w0", "w1"]


async def test_weights_that_were_handed_over_need_the_pointer_alone(
    api: FlakyApi, steering: ClusterSteering
) -> None:
    pool = SteeringVerbs(steering, Hook())
    early = HandedOver(epoch=0, version=1, root_hash="h", committed=False)
    with pytest.raises(ValueError, match=r"under epoch 0, and this trainer has none: .*acquire"):
        await pool.publish_handed_over(early)
    assert await pool.acquire() == 1
    with pytest.raises(ValueError, match=r"under epoch 0, .* holds epoch 1: .* epoch=pool\.epoch"):
        await pool.publish_handed_over(early)
    assert "weights" not in api.pool["spec"]
    api.commits(1, 1)
    done = await pool.publish_handed_over(HandedOver(1, 1, "h", committed=False))
    assert (done.identity, done.root_hash) == (VERSION, "h")
    assert api.source == {"pushed": {}}


@pytest.mark.parametrize("serving", [True, False])
async def test_only_heads_that_serve_can_keep_the_target_from_moving(
    api: FlakyApi, tmp_path: Path, serving: bool
) -> None:
    async with scripted_controls(2) as controls:
        controls[1].serving = serving
        controls[1].refuse["stage"] = (409, "asleep")
        api.commits(1, 1, PUSHED_HASH)
        async with publishing(api, tmp_path, controls) as (_, sending):
            if serving:
                with pytest.raises(PublishFailed, match=r"w1: .*no stage: asleep"):
                    await sending
                assert controls[0].verbs == ["stage", "discard"]
                assert "weights" not in api.pool["spec"]
            else:
                await sending
                assert controls[0].verbs == ["stage"]
                assert "target" in api.pool["spec"]["weights"]


@pytest.mark.usefixtures("impatient")
async def test_bytes_stay_where_nobody_knows_whether_the_target_has_moved(
    api: FlakyApi, tmp_path: Path
) -> None:
    """If it has, the operator needs them."""
    async with scripted_controls(1) as controls:
        api.writes = [503] * 999
        async with publishing(api, tmp_path, controls, seconds=2) as (_, sending):
            with pytest.raises(ClusterError, match="overloaded"):
                await sending
        assert controls[0].verbs == ["stage"]


async def test_a_version_that_is_committed_with_other_content_is_not_published(
    api: FlakyApi, tmp_path: Path
) -> None:
    async with scripted_controls(1) as controls:
        api.commits(1, 1, "other")  # by a trainer of the same epoch, which was faster
        async with publishing(api, tmp_path, controls) as (_, sending):
            with pytest.raises(PublishFailed) as raised:
                await sending
    assert str(raised.value).startswith("content-mismatch: weights (1, 1) have root_hash other, ")
    assert PUSHED_HASH in str(raised.value)


async def test_a_head_that_has_other_content_keeps_the_target_and_its_bytes(
    api: FlakyApi, tmp_path: Path
) -> None:
    async with scripted_controls(2) as controls:
        controls[1].active = (1, 1)
        async with publishing(api, tmp_path, controls) as (_, sending):
            with pytest.raises(PublishFailed, match=r"w1: content-mismatch: .* active, .*xxh3"):
                await sending
        assert "weights" not in api.pool["spec"]
        assert [each.verbs for each in controls] == [["stage", "discard"], ["stage"]]


async def test_without_a_mounted_token_the_fix_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"audience rollout\.dev/train/math there"):
        read_mounted_token("rollout.dev/train/math", tmp_path / "token")()
    (tmp_path / "token").write_text("secret\n")
    assert read_mounted_token("", tmp_path / "token")() == "secret"
