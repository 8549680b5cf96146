"""Tensors on their way to replicas: what arrives, what is told, and what every failure leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_client import (
    AsyncRolloutPool,
    PublishFailed,
    PublishProgress,
    RolloutPool,
    WeightsId,
)
from rollout_client.steering.plain_tensors import spec_of
from rollout_client.steering.pushing.options import PushPlan
from rollout_client.steering.pushing.pusher import Pusher
from rollout_client.steering.pushing.stream_filling import Filling
from rollout_client.steering.pushing.tensor_copying import Copier
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import Ended, Frame, Kind
from rollout_common.transfer.layout import LayoutError
from rollout_common.transfer.memory.arena import Arena
from rollout_common.transfer.settings import BURST_SECONDS
from tests.support.unit.pushing import no_file_above
from tests.support.unit.receiver import Receiver
from tests.support.unit.scripted_control import ScriptedControl, scripted_controls
from tests.support.waiting import until

MEBI = 1 << 20
JAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def tensors(step: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return {
        "model.b": torch.randn(3, MEBI // 4, generator=made),
        "model.a": torch.randn(7, generator=made).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "one": torch.tensor(5 + step),
        "turned": torch.randn(8, 16, generator=made).t(),
    }


def content(values: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, value in values.items()
    }


class World:
    """Scripted control ports, each with a receiver behind it."""

    def __init__(self, controls: list[ScriptedControl], receivers: list[Receiver]) -> None:
        self.controls, self.receivers = controls, receivers
        for control, receiver in zip(controls, receivers, strict=True):
            control.transfer, control.phase = receiver.transfer, "Staging"
        self.told: list[PublishProgress] = []
        self.pool = self.open_pool()

    @property
    def places(self) -> dict[str, Any]:
        """Arguments of `from_urls`."""
        members = [each.member for each in self.controls]
        controls = [each.control_url for each in members]
        return {"urls": [each.url for each in members], "control_urls": controls}

    def open_pool(self, count: int = 3, **options: Any) -> AsyncRolloutPool:
        """A pool of the first replicas alone."""
        self.controls, self.receivers = self.controls[:count], self.receivers[:count]
        return AsyncRolloutPool.from_urls(**self.places, **options)

    @property
    def verbs(self) -> list[list[str]]:
        return [[verb for verb in each.verbs if verb != "require"] for each in self.controls]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with scripted_controls(3) as controls:
        receivers = [Receiver(f"w{index}:8000", tmp_path) for index in range(3)]
        made = World(controls, receivers)
        async with made.pool:
            yield made
        for each in receivers:
            each.close()


@pytest.mark.parametrize("transport", ["shm", "tcp", "auto"])
async def test_every_replica_gets_every_byte(world: World, transport: Any) -> None:
    for version in (1, 2, 3):
        values = tensors(version)
        done = await world.pool.publish_weights(
            version, tensors=values, transport=transport, progress=world.told.append
        )
        assert done.identity.version == version
        assert [each.content for each in world.receivers] == [content(values)] * 3
        assert done.report is not None
        kind = "tcp" if transport == "tcp" else "shm"
        assert {each.transport for each in done.report.replicas.values()} == {kind}
        assert list(done.report.seconds) == ["plan", "copy", "transfer", "stage", "commit"]
        assert sum(done.report.seconds.values()) <= done.seconds + 1
        assert done.report.bytes >= sum(map(len, content(values).values()))
        assert done.root_hash == world.receivers[0].root_hash
    assert world.verbs == [["stage", "commit"] * 3] * 3
    assert [each.phase for each in world.told][-1] == "Complete"
    for index, each in enumerate(world.receivers if transport == "tcp" else ()):
        assert each.hellos[0]["share"] == [index, 3]
        others = {other.name for other in world.receivers if other is not each}
        assert {holder["name"] for holder in each.hellos[0]["holders"]} == others


async def test_replicas_of_one_machine_share_one_copy_until_all_gave_it_back(world: World) -> None:
    async with world.open_pool() as pool:
        arena = pool._pusher._arena
        for each in world.receivers:
            each.release.clear()
        await pool.publish_weights(1, tensors=tensors(1), transport="shm")
        (first,) = arena._slots
        await pool.publish_weights(2, tensors=tensors(2), transport="shm")
        assert arena._slots[0] is first
        assert [slot.is_lent for slot in arena._slots] == [True, True]
        for each in world.receivers:
            each.release.set()
        for sender in pool._pusher._senders:
            assert sender.join(30)
        assert [slot.is_lent for slot in arena._slots] == [False, False]
        await pool.publish_weights(3, tensors=tensors(3), transport="shm")
        assert first in arena._slots
    assert arena.nbytes == 0


async def test_a_program_without_a_loop_fills_in_its_own_thread(world: World) -> None:
    threads = []

    def stream(step: int) -> Iterator[tuple[str, torch.Tensor]]:
        threads.append(threading.current_thread())
        yield from tensors(step).items()

    def run() -> None:
        with RolloutPool.from_urls(**world.places) as pool:
            for step in (1, 2):  # of the first stream nothing is known before its end
                done = pool.publish_weights(step, tensors=stream(step))
                assert done.report is not None
                assert [each.content for each in world.receivers] == [content(tensors(step))] * 3
        assert set(threads) == {threading.current_thread()}

    await asyncio.to_thread(run)


def test_what_is_given_up_at_the_end_of_a_stream_lacks_no_tensor() -> None:
    """The first stream is copied at its end: from then on a replica's refusal may come."""

    class Refused(Copier):
        def copy(self, *args: Any, **kwargs: Any) -> None:
            super().copy(*args, **kwargs)
            filling.fail()

    arena = Arena()
    filling = Filling(arena, None, Refused())
    filling.plan(None)
    for name in "ab":
        filling.take(name, torch.ones(3))
    filling.end()
    with pytest.raises(PublishFailed):
        filling.ended.result(0)
    filling.close()
    arena.close()


async def test_a_stream_may_be_asynchronous_and_change_nothing_of_its_layout(world: World) -> None:
    async def stream(values: dict[str, torch.Tensor]) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for item in values.items():
            await asyncio.sleep(0)
            yield item

    for step in (1, 2):
        await world.pool.publish_weights(step, tensors=stream(tensors(step)))
        assert world.receivers[0].content == content(tensors(step))
    changed = {**tensors(3), "one": torch.ones(2)}
    with pytest.raises(LayoutError, match=r"'one' is F32 \[2\] and was I64 \[\]"):
        await world.pool.publish_weights(3, tensors=stream(changed))
    with pytest.raises(LayoutError, match="'new' was not in the version before"):
        await world.pool.publish_weights(3, tensors=stream({**tensors(3), "new": torch.ones(1)}))
    await world.pool.publish_weights(3, tensors=stream(tensors(3)))
    assert world.receivers[0].content == content(tensors(3))


async def test_a_stream_of_the_model_may_follow_adapters(world: World) -> None:
    half = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    config = {"r": 4, "lora_alpha": 8, "peft_type": "LORA"}
    adapter = config, {f"{half}A.weight": torch.ones(4, 8), f"{half}B.weight": torch.ones(8, 4)}
    await world.pool.publish_weights(1, tensors=iter(tensors(1).items()))
    await world.pool.publish_weights(2, adapters={"policy": adapter})
    await world.pool.publish_weights(3, tensors=iter(tensors(3).items()))
    assert [each.content for each in world.receivers] == [content(tensors(3))] * 3


@pytest.mark.parametrize("given", [lambda values: iter(values.items()), dict])
async def test_the_corrected_tensors_are_taken_after_those_that_workers_refused(
    world: World, given: Any
) -> None:
    one = world.controls[1]
    for version in (1, 2):  # nothing was published before, then something was
        values = tensors(version)
        odd = {**values, "odd": torch.ones(1)} if version == 1 else values
        one.refuse["stage"] = (422, "odd-tensors")
        with pytest.raises(PublishFailed, match="odd-tensors"):
            await world.pool.publish_weights(version, tensors=given(odd))
        del one.refuse["stage"]
        await world.pool.publish_weights(version, tensors=iter(values.items()))
        assert [each.content for each in world.receivers] == [content(values)] * 3


@pytest.mark.parametrize("given", [lambda values: iter(values.items()), dict])
async def test_what_is_to_be_cast_has_the_dtypes_that_workers_tell(
    world: World, given: Any
) -> None:
    wanted = tensors()
    for control in world.controls[1:]:  # the first one doesn't answer, so the next one is asked
        control.dtypes = {name: spec_of(name, tensor)[1] for name, tensor in wanted.items()}
    world.controls[0].refuse["dtypes"] = (404, "not-found")
    wide = {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in wanted.items()
    }
    for version in (1, 2):
        await world.pool.publish_weights(version, tensors=given(wide), cast=True)
        assert [each.content for each in world.receivers] == [content(wanted)] * 3
    await world.pool.publish_weights(3, tensors=wide)
    assert [each.content for each in world.receivers] == [content(wide)] * 3
    asked = [[verb for verb, _ in each.bodies].count("dtypes") for each in world.controls]
    assert asked == [1, 1, 1]


async def test_a_progress_that_raises_ends_no_publish(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    done = await world.pool.publish_weights(1, tensors=tensors(), progress=lambda told: 1 / 0)  # type: ignore[arg-type]
    assert done.replicas == 3
    assert "progress raised an error; the call that it reports on continues" in caplog.messages


async def test_a_version_is_a_whole_number_also_of_numpy_or_torch(world: World) -> None:
    counted: list[Any] = [torch.tensor(4), torch.tensor(5).numpy()[()]]
    wrong: list[Any] = ["5", 5.0, None, True, -1, 2**60]
    async with world.open_pool(max_staleness=1) as pool:
        for version in wrong:
            with pytest.raises(ValueError, match="version must be"):
                await pool.publish_weights(version, "/w")
            with pytest.raises(ValueError, match="version must be"):
                await pool.publish_weights(version, tensors=tensors())
        for version in counted:
            await pool.publish_weights(version, tensors=tensors(), seconds=30)
            assert pool.floor == WeightsId(epoch=1, version=int(version) - 1)


async def test_a_freed_tensor_is_not_cast(world: World) -> None:
    for control in world.controls:
        control.dtypes = {"x": "BF16"}
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="the memory of tensor 'x' was freed"):
        await world.pool.publish_weights(1, tensors={"x": freed}, cast=True)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_one_refusal_ends_it_for_all_and_names_the_replica(
    world: World, transport: Any
) -> None:
    def refuse(receiver: Receiver, connection: Connection, frame: Frame) -> None:
        why = "tensor 'one' is unknown to the model"
        connection.send(Kind.ERROR, {"slug": "layout", "detail": why, "tensor": "one"})

    world.receivers[1].faults[Kind.HELLO] = refuse
    taken = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors().items():
            yield name, tensor
            taken.append(name)

    world.controls[1].error = "tensor 'one' is unknown to the model"
    world.controls[1].phase = "Failed"
    with pytest.raises(PublishFailed, match=r"w1:8000: .*tensor 'one' is unknown"):
        await world.pool.publish_weights(1, tensors=stream(), transport=transport)
    assert taken == list(tensors())  # other ranks wait in a stream
    assert [verbs[-1] for verbs in world.verbs] == ["discard"] * 3
    # Whoever was about to send finds out that nobody listens.
    slots = world.pool._pusher._arena._slots
    await until(lambda: not any(slot.is_lent for slot in slots), what="the memory to come back")


async def test_a_replica_whose_port_is_closed_is_named_with_the_reason(world: World) -> None:
    world.receivers[2].close()
    with pytest.raises(
        PublishFailed, match=r"w2:8000: .*can't be brought there: .*can't be reached"
    ):
        await world.pool.publish_weights(1, tensors=tensors(), transport="tcp")
    assert [verbs[-1] for verbs in world.verbs] == ["discard"] * 3


async def test_a_push_goes_on_without_a_replica_that_died(world: World) -> None:
    def die(receiver: Receiver, connection: Connection, frame: Frame) -> None:
        world.controls[0].slot = None  # as a worker that was restarted, before that is seen
        receiver.close()
        raise Ended("the test says so")

    world.receivers[0].faults[Kind.PIECE] = die
    done = await world.pool.publish_weights(1, tensors=tensors(), transport="tcp")
    assert done.replicas == 2
    assert [each.content for each in world.receivers[1:]] == [content(tensors())] * 2
    assert done.report is not None
    assert {name for name, each in done.report.replicas.items() if each.error} == {"w0:8000"}


async def test_replicas_that_have_the_version_before_get_what_differs_from_it(
    world: World,
) -> None:
    first, second = tensors(), tensors()
    second["model.b"][1, 5] += 1
    await world.pool.publish_weights(1, tensors=first, transport="tcp")
    done = await world.pool.publish_weights(2, tensors=second, transport="tcp")
    assert [each.content for each in world.receivers] == [content(second)] * 3
    for each in world.receivers:
        assert sorted(each.coming.deltas) == sorted(each.coming.pieces)
    assert done.report is not None
    assert done.report.deltas == 3
    assert done.report.bytes_sent < 1000


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_stream_is_sent_while_it_comes_whatever_its_tensors_are_called(
    world: World, transport: Any
) -> None:
    """Its bytes lie in the order in which it brings its tensors, so none waits for one that comes late."""
    bulk, early = torch.arange(4 * MEBI, dtype=torch.int32), threading.Event()

    def hear(receiver: Receiver, connection: Connection, frame: Frame) -> None:
        early.set()

    async def stream(waits: bool) -> AsyncIterator[tuple[str, torch.Tensor]]:
        yield "z", bulk
        if waits:  # not in the first one, of which nothing is known before its end
            assert await asyncio.to_thread(early.wait, 30)
        yield "a", torch.ones(1)

    async with world.open_pool(1) as pool:
        await pool.publish_weights(1, tensors=stream(False), transport=transport)
        if transport == "shm":
            world.receivers[0].faults[Kind.FILLED] = hear
        else:
            world.receivers[0].on_piece = early.set
        await pool.publish_weights(2, tensors=stream(True), transport=transport)
    assert world.receivers[0].content == content({"z": bulk, "a": torch.ones(1)})


async def test_a_folder_is_written_before_anything_is_committed(
    world: World, tmp_path: Path
) -> None:
    spool = tmp_path / "versions"
    for version in (1, 2, 3):
        await world.pool.publish_weights(version, tensors=tensors(version), spool=spool)
    names = sorted(path.name for path in spool.iterdir())
    assert names == ["epoch-1-version-2", "epoch-1-version-3"]
    found = load_file(next((spool / names[1]).glob("*.safetensors")))
    assert content(found) == content(tensors(3))


async def test_a_folder_on_a_full_disk_fails_the_publish_and_leaves_no_half_version(
    world: World, tmp_path: Path
) -> None:
    spool = tmp_path / "versions"
    for version in (1, 2):  # both slots of memory are there
        await world.pool.publish_weights(version, tensors=tensors(version), transport="tcp")
    with (
        no_file_above(MEBI),
        pytest.raises(OSError, match=r"epoch-1-version-3 can't be written: .*File too large"),
    ):
        await world.pool.publish_weights(3, tensors=tensors(3), transport="tcp", spool=spool)
    assert not list(spool.iterdir())
    assert [verbs[-1] for verbs in world.verbs] == ["discard"] * 3
    await world.pool.publish_weights(4, tensors=tensors(4), transport="tcp", spool=spool)
    assert [path.name for path in spool.iterdir()] == ["epoch-1-version-4"]


async def test_a_publish_sends_no_faster_than_it_is_told(world: World) -> None:
    rate = 6 * MEBI
    async with world.open_pool(1) as pool:
        done = await pool.publish_weights(1, tensors=tensors(), transport="tcp", rate=rate)
    assert done.report is not None
    assert done.report.seconds["transfer"] > (3 * MEBI - (1 << 20)) / rate - BURST_SECONDS
    assert world.receivers[0].content == content(tensors())


async def test_a_publish_that_is_cancelled_leaves_nothing(world: World) -> None:
    await world.pool.publish_weights(1, tensors=tensors())
    ended = threading.Event()
    for each in world.receivers:
        each.faults[Kind.END] = lambda receiver, connection, frame: ended.set()
    publishing = asyncio.ensure_future(world.pool.publish_weights(2, tensors=tensors(2)))
    await asyncio.to_thread(ended.wait, 30)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert [verbs[-1] for verbs in world.verbs] == ["discard"] * 3
    for sender in world.pool._pusher._senders:
        assert sender.join(30)
    # The replicas' ends of the connections notice that a moment later.
    slots = world.pool._pusher._arena._slots
    await until(lambda: not any(slot.is_lent for slot in slots), what="the memory to come back")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_versions_that_are_published_at_once_serve_one_after_the_other(
    world: World, transport: Any
) -> None:
    """They would take each other's memory: there are two slots."""
    told: list[int] = []

    def stream(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        told.append(version)
        yield from tensors(version).items()

    done = await asyncio.gather(
        *(
            world.pool.publish_weights(version, tensors=stream(version), transport=transport)
            for version in range(1, 6)
        )
    )
    assert [each.identity.version for each in done] == told == [1, 2, 3, 4, 5]
    for receiver in world.receivers:
        assert receiver.content == content(tensors(5))


async def test_a_publish_that_waits_for_another_one_ends_at_its_deadline(world: World) -> None:
    released, taken = asyncio.Event(), []

    async def slow() -> AsyncIterator[tuple[str, torch.Tensor]]:
        await released.wait()
        yield "one", torch.ones(1)

    def second() -> Iterator[tuple[str, torch.Tensor]]:
        taken.append("one")
        yield "one", torch.ones(1)

    first = asyncio.ensure_future(world.pool.publish_weights(1, tensors=slow()))
    await asyncio.sleep(0)
    with pytest.raises(PublishFailed, match=r"another publish .* did not end within 0\.2 s"):
        await world.pool.publish_weights(2, tensors=second(), seconds=0.2)
    assert taken == ["one"], "other ranks wait in the stream"
    released.set()
    assert (await first).identity.version == 1


async def test_tensors_that_do_not_come_in_time_are_the_reason(world: World) -> None:
    released = asyncio.Event()

    async def stream() -> AsyncIterator[tuple[str, torch.Tensor]]:
        yield "one", torch.ones(1)
        await released.wait()

    publishing = asyncio.ensure_future(world.pool.publish_weights(1, tensors=stream(), seconds=1))
    asyncio.get_running_loop().call_later(1.5, released.set)
    with pytest.raises(PublishFailed, match="their tensors did not all come"):
        await publishing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "a path, tensors= or adapters="),
        ({"path": "x", "tensors": {}}, "only one of them"),
        ({"path": "x", "transport": "shm"}, "transport: only a publish of tensors"),
        ({"tensors": {}, "keep": 3}, "give spool, too"),
        ({"tensors": {}, "spol": "/w"}, "no argument 'spol': do you mean 'spool'"),
        ({"tensors": {}, "rank": None}, "no argument 'rank': do you mean 'ranks'"),
        ({"path": "x", "second": 5}, "no argument 'second': do you mean 'seconds'"),
        ({"path": "x", "timeout": 5}, "no argument 'timeout': known are transport, .*seconds"),
    ],
)
async def test_arguments_that_mean_nothing_are_refused_before_anybody_is_asked(
    arguments: dict[str, Any], message: str
) -> None:
    async with AsyncRolloutPool.from_urls(["http://127.0.0.1:9"]) as pool:
        with pytest.raises(TypeError, match=message):
            await pool.publish_weights(1, **arguments)


async def test_a_generator_that_was_read_before_is_told_from_one_without_a_tensor(
    world: World,
) -> None:
    """As for another try of a publish that failed."""
    one = iter(tensors().items())
    await world.pool.publish_weights(1, tensors=one)
    with pytest.raises(LayoutError, match="no tensors were given: a generator can be read only"):
        await world.pool.publish_weights(2, tensors=one)


async def test_what_is_no_tensor_is_refused_by_name(world: World) -> None:
    odd: list[tuple[dict[str, Any], str]] = [
        ({"x": 3.5}, "'x' is a float, not a tensor: leave it out"),
        ({"x": torch.ones(2, dtype=torch.complex128)}, "'x' has the dtype torch.complex128"),
        ({"x": JAGGED}, "'x' is nested"),
        ({}, "no tensors were given"),
    ]
    for values, message in odd:
        with pytest.raises(LayoutError, match=message):
            await world.pool.publish_weights(1, tensors=values)
    assert not any("commit" in verbs for verbs in world.verbs)


@pytest.mark.parametrize(
    ("why", "told"),
    [
        (PublishFailed("rank 1: its tensor is odd"), "rank 1: its tensor is odd"),
        (ValueError("no such file"), "the publish was given up: no such file"),
        (None, "the publish was given up"),
    ],
)
async def test_who_waits_for_tensors_is_told_why_none_come(
    why: Exception | None, told: str
) -> None:
    """Which of the waiting ones hears of it first is chance; what a trainer reads is not."""
    pusher = Pusher()
    push = pusher.begin({"x": torch.ones(2)}, PushPlan())
    push.filling.fail(why)
    with pytest.raises(PublishFailed) as failed:
        await push.planned()
    assert str(failed.value) == told
    push.close()
    pusher.close()
