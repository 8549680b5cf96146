"""`pool.turn()`: real locks, real processes; the pool's operator and its one worker are played."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from rollout_client import (
    AsyncRolloutPool,
    ClusterError,
    EpochLost,
    PoolClosed,
    RolloutPool,
    SteeringFailed,
    TurnFailed,
)
from rollout_client.steering import cluster_steering
from rollout_client.turn import local_turn, locks
from rollout_client.turn.plan import TurnPlan
from rollout_client.turn.session import TurnSession
from rollout_common.turn import Turn, TurnTimeout, device_memory
from rollout_common.turn.lock_files import holders
from tests.support.loopback import kubeconfig, loopback
from tests.support.unit.scripted_control import scripted_controls
from tests.support.unit.turn_pool import (
    CLAIMS,
    GPUS,
    PODS,
    SLICES,
    PlayedPool,
    claim,
    played_pool,
    pod,
)
from tests.support.unit.turn_process import puppet
from tests.support.waiting import until

T = TypeVar("T", bound=Exception)
OTHER = "gpu.example.com/node-1/gpu-11"
MINE: dict[str, str | None] = dict.fromkeys(sorted(GPUS), "trainer-0")
FREE: dict[str, str | None] = dict.fromkeys(sorted(GPUS))
SERVING: dict[str, str | None] = dict.fromkeys(sorted(GPUS), "math-0-0")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "turn"
    folder.mkdir()
    monkeypatch.setenv("ROLLOUT_TURN_DIRECTORY", str(folder))
    monkeypatch.setenv("ROLLOUT_TURN_DEVICES", ",".join(GPUS))
    monkeypatch.setenv("ROLLOUT_TURN_HOLDER", "trainer-0")
    yield folder
    # Of blocks that ended with an error: till this process ends.
    for turn in itertools.chain(*locks._idle_turns.values()):
        turn.give()


@pytest.fixture
async def played(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[PlayedPool]:
    async with played_pool(directory) as made:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, made.server.url)))
        yield made


@pytest.fixture
async def pool(played: PlayedPool) -> AsyncIterator[AsyncRolloutPool]:
    async with AsyncRolloutPool.from_cluster("math") as made:
        yield made


# One process.


async def test_the_pool_sleeps_while_the_trainer_has_the_devices(
    played: PlayedPool, pool: AsyncRolloutPool, directory: Path
) -> None:
    files = []
    for count in (1, 2, 3):
        assert holders(directory) == SERVING
        async with pool.turn(seconds=20) as turn:
            assert turn.devices == tuple(sorted(GPUS))
            assert holders(directory) == MINE
        assert played.asked == ["Asleep", "Active"] * count
        # It serves: its worker has the turn again.
        assert holders(directory) == SERVING
        files.append(len(os.listdir("/proc/self/fd")))
    assert files[1] == files[2], "none is left open"


async def test_a_program_without_an_event_loop_has_the_same(
    played: PlayedPool, directory: Path
) -> None:
    def train() -> None:
        with RolloutPool.from_cluster("math") as pool:
            with pool.turn(seconds=20):
                assert holders(directory) == MINE
            assert holders(directory) == SERVING
            with pytest.raises(ZeroDivisionError), pool.turn(seconds=20):
                raise ZeroDivisionError
            with pytest.raises(TurnFailed, match="don't nest"), pool.turn(), pool.turn():
                raise AssertionError

    await asyncio.to_thread(train)
    assert played.asked == ["Asleep", "Active"] * 3


async def test_a_pool_that_was_closed_inside_gives_the_devices_back(
    played: PlayedPool, directory: Path
) -> None:
    def train() -> None:
        pool = RolloutPool.from_cluster("math")
        with pytest.raises(PoolClosed), pool.turn(seconds=20):
            pool.close()

    await asyncio.to_thread(train)
    assert holders(directory) == FREE


@pytest.mark.parametrize("wake", [False, True])
async def test_the_pool_may_stay_asleep_or_wake_by_itself(
    played: PlayedPool, pool: AsyncRolloutPool, wake: bool
) -> None:
    played.deaf = {"Active"}
    async with pool.turn(seconds=20, wake=wake, serving=False):
        pass
    assert played.asked == ["Asleep", "Active"][: 1 + wake]


# What goes wrong.


async def refused_turn(pool: AsyncRolloutPool, error: type[T], why: str, **options: Any) -> T:
    """Ask for a turn that is not had, for this reason."""
    with pytest.raises(error, match=why) as raised:
        async with pool.turn(**options):
            raise AssertionError
    return raised.value


async def test_an_error_inside_keeps_the_devices_and_asks_for_the_pool(
    played: PlayedPool, pool: AsyncRolloutPool, directory: Path
) -> None:
    played.deaf = {"Active"}  # an error does not wait until the pool serves
    with pytest.raises(ZeroDivisionError) as error:
        async with pool.turn(seconds=20):
            raise ZeroDivisionError
    (note,) = error.value.__notes__
    assert f"this process keeps {', '.join(sorted(GPUS))} until it ends" in note
    assert played.asked == ["Asleep", "Active"]
    assert holders(directory) == MINE
    with pytest.raises(TurnTimeout):
        await Turn(directory, [GPUS[0]], "math-0-0").take_async(0.1)
    # What the failed block had is freed in another turn, which is had at once, though the worker is still awake.
    played.deaf, played.reached = {"Asleep", "Active"}, "Active"
    async with pool.turn(seconds=5, serving=False):
        assert holders(directory) == MINE
    assert holders(directory) == FREE


async def test_what_an_error_left_is_not_given_by_a_turn_that_is_not_had(directory: Path) -> None:
    with pytest.raises(ZeroDivisionError), local_turn():
        raise ZeroDivisionError
    votes = iter([True, True, False])
    session = TurnSession(None, TurnPlan(world=2, agree=lambda _: next(votes)), locks_of_nobody)
    with pytest.raises(TurnFailed, match="another process"):
        await session.acquire_turn()
    assert holders(directory) == MINE


async def locks_of_nobody() -> list[str]:
    raise AssertionError("they are named")


async def test_what_an_error_left_is_freed_in_a_turn_on_the_same_devices(directory: Path) -> None:
    with pytest.raises(ZeroDivisionError), local_turn():
        raise ZeroDivisionError
    with (
        pytest.raises(TurnFailed, match="another turn on exactly these devices"),
        local_turn([GPUS[0]]),
    ):
        raise AssertionError
    async with local_turn():
        assert holders(directory) == MINE
    assert holders(directory) == FREE
    with local_turn([GPUS[0]]):
        pass


WITH_CHILDREN = """
import os, sys
from rollout_client.turn import local_turn
from rollout_client import RolloutPool
with RolloutPool.from_cluster("math") as pool:
    for turn in (local_turn(), pool.turn(serving=False)):
        with turn:
            for error in (SystemExit(3), ValueError("in the child")):
                forked = os.fork()
                if forked == 0:
                    raise error
                print(os.waitpid(forked, 0)[1] >> 8, flush=True)
                input()
"""


async def test_a_forked_child_that_leaves_the_block_gives_nothing_away(
    played: PlayedPool, directory: Path
) -> None:
    played.somebody_asks("Asleep")
    await until(lambda: not played.worker.held, what="the worker sleeps")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WITH_CHILDREN),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    async with asyncio.timeout(60):
        for status in (b"3\n", b"1\n") * 2:
            assert await process.stdout.readline() == status
            assert holders(directory) == MINE
            assert played.asked == ["Asleep"]
            process.stdin.write(b"\n")
        await process.communicate()
    assert process.returncode == 0
    assert played.asked == ["Asleep", "Active"]
    assert "trainer-0" not in holders(directory).values()


@pytest.mark.parametrize("inside", [None, ZeroDivisionError()])
async def test_a_pool_that_is_not_woken_is_an_error_and_hides_none_from_inside(
    played: PlayedPool, pool: AsyncRolloutPool, directory: Path, inside: Exception | None
) -> None:
    with pytest.raises(ClusterError if inside is None else ZeroDivisionError) as error:  # noqa: PT012  # from inside
        async with pool.turn(seconds=20):
            played.refuses = 403
            if inside is not None:
                raise inside
    assert holders(directory) == (FREE if inside is None else MINE)
    if inside is not None:
        assert "the pool was not asked to wake" in error.value.__notes__[1]


async def test_a_pool_that_does_not_fall_asleep_in_time_is_asked_back(
    played: PlayedPool, pool: AsyncRolloutPool, directory: Path
) -> None:
    played.deaf = {"Asleep"}
    why = r"not Asleep within .* the worker is Active"
    await refused_turn(pool, SteeringFailed, why, seconds=1.5)
    assert played.asked == ["Asleep", "Active"]
    assert holders(directory) == SERVING


async def test_a_turn_that_is_not_had_in_time_names_the_holder_and_leaves_the_pool_as_it_was(
    played: PlayedPool, pool: AsyncRolloutPool, directory: Path
) -> None:
    with puppet(directory, "trainer-9", OTHER) as other:
        other.ask("take")
        for asked in (["Asleep", "Active"], ["Asleep", "Active", "Asleep"]):
            options: Any = {"seconds": 1.5, "devices": [*GPUS, OTHER]}
            error = await refused_turn(pool, TurnFailed, "is held by trainer-9", **options)
            assert error.waiting_for == {OTHER: "trainer-9"}
            assert played.asked == asked
            if asked[-1] == "Active":
                await until(lambda: played.worker.held, what="the worker has its devices again")
                played.somebody_asks("Asleep")


async def test_a_missing_directory_is_told_before_the_pool_sleeps(
    played: PlayedPool, pool: AsyncRolloutPool, tmp_path: Path
) -> None:
    why = "mount the PersistentVolumeClaim rollout-turn"
    await refused_turn(pool, TurnFailed, why, directory=tmp_path / "nowhere")
    assert played.asked == []


@pytest.mark.parametrize("where", ["waiting", "inside"])
async def test_a_cancelled_task_asks_for_the_pool_and_holds_nothing_but_what_its_block_had(
    played: PlayedPool, pool: AsyncRolloutPool, directory: Path, where: str
) -> None:
    inside = asyncio.Event()

    async def train(devices: list[str]) -> None:
        async with pool.turn(seconds=60, devices=devices):
            inside.set()
            await asyncio.sleep(60)

    with puppet(directory, "trainer-9", OTHER) as other:
        other.ask("take")
        task = asyncio.create_task(train([*GPUS, *([OTHER] if where == "waiting" else [])]))
        if where == "inside":
            await asyncio.wait_for(inside.wait(), 30)
        else:
            await until(lambda: holders(directory)[min(GPUS)] not in ("math-0-0", None))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert inside.is_set() == (where == "inside")
    assert played.asked == ["Asleep", "Active"]
    if where == "inside":
        assert holders(directory) == MINE | {OTHER: None}
    else:
        await until(lambda: played.worker.held, what="the worker has its devices again")


async def test_somebody_who_pauses_the_pool_meanwhile_wins(
    played: PlayedPool, pool: AsyncRolloutPool
) -> None:
    async with pool.turn(seconds=20):
        played.somebody_asks("Paused")
    assert played.asked == ["Asleep", "Paused"]


async def test_a_pool_that_another_trainer_wakes_too_early_is_asked_again(
    played: PlayedPool, pool: AsyncRolloutPool, directory: Path
) -> None:
    played.overruled = ["Active"]
    async with pool.turn(seconds=30):
        assert holders(directory) == MINE
    assert played.asked == ["Asleep", "Active"] * 2


async def test_a_turn_that_somebody_overrules_gives_up_and_leaves_the_pool_to_them(
    played: PlayedPool, pool: AsyncRolloutPool
) -> None:
    played.overruled = ["Paused"]
    why = r"somebody set spec\.state to Paused"
    await refused_turn(pool, SteeringFailed, why, seconds=30)
    assert played.asked == ["Asleep", "Paused"]


async def test_another_trainers_turn_that_is_over_when_it_was_seen_fails_none(
    played: PlayedPool, pool: AsyncRolloutPool
) -> None:
    """Between the look that shows another state and the next one, that trainer may have woken the pool."""

    def over() -> None:
        if played.asked == ["Asleep", "Active", "Asleep"]:
            played.somebody_asks("Active")

    played.after_read = over
    async with pool.turn(seconds=30):
        played.overruled = ["Asleep"]
    assert played.asked == ["Asleep", "Active", "Asleep", "Active"]


async def test_the_end_of_a_turn_waits_for_another_trainers(
    played: PlayedPool, pool: AsyncRolloutPool
) -> None:
    async def other() -> None:
        await until(lambda: len(played.asked) == 3)
        await asyncio.sleep(0.3)
        played.somebody_asks("Active")

    async with pool.turn(seconds=30):
        played.overruled = ["Asleep"]
        ends = asyncio.create_task(other())
    assert ends.done()
    assert played.asked == ["Asleep", "Active", "Asleep", "Active"]
    await ends


async def test_a_trainer_with_an_older_epoch_gives_back_and_is_told(
    played: PlayedPool, pool: AsyncRolloutPool, directory: Path
) -> None:
    assert pool._steering is not None
    pool._steering._epoch = 1  # type: ignore[attr-defined]  # as after `acquire`
    with pytest.raises(EpochLost, match="a trainer with epoch 2 has the pool"):
        async with pool.turn(seconds=20):
            played.epoch = 2
    assert holders(directory) == FREE


async def test_turns_do_not_nest(
    played: PlayedPool, pool: AsyncRolloutPool, directory: Path
) -> None:
    async with pool.turn(seconds=20):
        for nested in (pool.turn(), pool.turn(locks=False), local_turn([GPUS[0]])):
            with pytest.raises(TurnFailed, match="turns don't nest"):
                async with nested:
                    raise AssertionError
        async with local_turn([OTHER]):
            pass
    assert played.asked == ["Asleep", "Active"]
    async with pool.turn(seconds=20):
        pass


async def test_without_locks_the_pool_sleeps_and_nobody_is_kept_off(
    played: PlayedPool, pool: AsyncRolloutPool, directory: Path
) -> None:
    async with pool.turn(seconds=20, locks=False) as turn:
        assert turn.devices == ()
        assert holders(directory) == FREE
    assert played.asked == ["Asleep", "Active"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rank": 1}, "rank 1 is not below world 1"),
        ({"world": 2}, "give agree"),
        ({"seconds": 0}, "seconds must be above 0"),
        ({"locks": False, "devices": ["a"]}, "drop them"),
        ({"devices": "gpu-0"}, "list of names"),
    ],
)
def test_what_can_not_be_met_is_refused(options: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TurnPlan.from_options(options)


# Two trainers, and one that dies.


async def test_two_trainers_at_once_have_the_devices_one_after_the_other(
    played: PlayedPool, directory: Path
) -> None:
    inside: list[int] = []
    most = 0

    async def train(number: int) -> None:
        nonlocal most
        async with AsyncRolloutPool.from_cluster("math") as pool:
            for _ in range(3):
                async with pool.turn(seconds=60):
                    inside.append(number)
                    most = max(most, len(inside))
                    assert not played.worker.held
                    await asyncio.sleep(0.05)
                    inside.remove(number)

    await asyncio.gather(train(0), train(1))
    assert most == 1
    await until(lambda: played.worker.held, what="the worker has its devices again")


TRAINER = """
import sys, time
from rollout_client import RolloutPool
pool = RolloutPool.from_cluster("math")
with pool.turn(seconds=20):
    print("inside", flush=True)
    time.sleep(60)
"""


async def test_the_locks_of_a_trainer_that_is_killed_fall_and_the_next_one_goes_on(
    played: PlayedPool, pool: AsyncRolloutPool, directory: Path
) -> None:
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    dead = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TRAINER), stdout=subprocess.PIPE, env=env
    )
    assert dead.stdout is not None
    assert (await dead.stdout.readline()).strip() == b"inside"
    assert holders(directory) == MINE
    dead.send_signal(signal.SIGSTOP)  # stuck: everybody waits
    with pytest.raises(TurnFailed, match="held by trainer-0"):
        async with local_turn([GPUS[0]], seconds=0.3):
            raise AssertionError
    dead.kill()
    await dead.wait()
    # Who gave up waiting may have got the lock in that moment, and gives it back.
    await until(lambda: holders(directory) == FREE, what="the locks to fall")
    assert played.asked == ["Asleep"]
    async with pool.turn(seconds=20):
        assert holders(directory) == MINE
    assert played.asked == ["Asleep", "Active"]


# Several ranks.


class Ranks:
    """An all-reduce AND over threads."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=30)
        self._votes = [True] * world

    def agree(self, rank: int) -> Callable[[bool], bool]:
        def one(yes: bool) -> bool:
            self._votes[rank] = yes
            self._barrier.wait()
            together = all(self._votes)
            self._barrier.wait()
            return together

        return one


async def each_rank(world: int, work: Callable[[int, RolloutPool], None]) -> list[Any]:
    """Run this in one thread for each rank; return what each raised."""

    def one(rank: int) -> None:
        with RolloutPool.from_cluster("math") as pool:
            work(rank, pool)

    threads = (asyncio.to_thread(one, rank) for rank in range(world))
    return await asyncio.gather(*threads, return_exceptions=True)


async def test_several_ranks_have_it_together(played: PlayedPool, directory: Path) -> None:
    ranks, together = Ranks(2), threading.Barrier(2, timeout=30)

    def work(rank: int, pool: RolloutPool) -> None:
        devices = [sorted(GPUS)[rank]]
        agree = ranks.agree(rank)
        with pool.turn(seconds=20, devices=devices, rank=rank, world=2, agree=agree):
            together.wait()
            held = holders(directory)
            together.wait()
        assert list(held.values()) == ["trainer-0, rank 0 of 2", "trainer-0, rank 1 of 2"]

    assert await each_rank(2, work) == [None, None]
    assert played.asked == ["Asleep", "Active"]


async def test_a_rank_that_is_cancelled_in_a_vote_leaves_no_other_waiting(
    played: PlayedPool, directory: Path, pool: AsyncRolloutPool
) -> None:
    voted, ranks = asyncio.Event(), Ranks(2)
    loop = asyncio.get_running_loop()

    def agree(yes: bool) -> bool:
        loop.call_soon_threadsafe(voted.set)
        return ranks.agree(0)(yes)

    async def first() -> None:
        options: Any = {"rank": 0, "world": 2, "agree": agree}
        async with pool.turn(seconds=20, devices=[GPUS[0]], **options):
            raise AssertionError

    def second() -> None:
        with RolloutPool.from_cluster("math") as other:
            options: Any = {"rank": 1, "world": 2, "agree": ranks.agree(1)}
            with other.turn(seconds=20, devices=[GPUS[1]], **options):
                raise AssertionError

    task = asyncio.create_task(first())
    await voted.wait()
    task.cancel()  # it can't leave the vote: the other one is still to come
    with pytest.raises(TurnFailed, match="another process"):
        await asyncio.to_thread(second)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert holders(directory) == SERVING


async def test_an_outage_at_the_end_of_a_turn_keeps_no_devices_and_no_pool_asleep(
    played: PlayedPool, pool: AsyncRolloutPool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_steering, "QUICK_SECONDS", 0.1)
    free: list[bool] = []

    async def outage() -> None:
        await until(lambda: holders(directory) == FREE)
        free.append(played.away)
        await asyncio.sleep(1)
        played.away = False

    async with pool.turn(seconds=30):
        played.away = True
        over = asyncio.create_task(outage())
    await over
    assert free == [True]
    assert holders(directory) == SERVING


# The page.


def blocks() -> list[str]:
    page = Path(__file__).parents[4] / "docs" / "share-gpus.md"
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [each for each in found if "hand_over" not in each]  # which needs an engine


ONE_RANK = SimpleNamespace(
    tensor=int,
    ReduceOp=SimpleNamespace(MIN="min"),
    all_reduce=lambda vote, op: None,
    get_rank=lambda: 0,
    get_world_size=lambda: 1,
)
"""What the page uses of torch and torch.distributed, of the only rank."""


def play_two_devices(played: PlayedPool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a driver whose names for devices are in another order than nvidia-smi's numbers."""
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho GPU-ten\necho GPU-nine\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    devices = [
        {"name": name, "attributes": {"uuid": {"string": uuid}}}
        for name, uuid in (("gpu-9", "GPU-nine"), ("gpu-10", "GPU-ten"))
    ]
    spec = {"driver": "gpu.example.com", "pool": {"name": "node-1"}, "devices": devices}
    played.server.answer("GET", SLICES, {"items": [{"spec": spec}]})


@pytest.mark.parametrize("number", range(2))
async def test_the_code_of_the_page_runs(
    played: PlayedPool,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    play_two_devices(played, tmp_path_factory.mktemp("bin"), monkeypatch)
    held: list[list[str]] = []

    def train() -> None:
        held.append([device for device, who in holders(directory).items() if who == "trainer-0"])

    real = RolloutPool.from_cluster
    monkeypatch.setattr(RolloutPool, "from_cluster", lambda name, namespace: real(name))
    monkeypatch.setenv("POD_NAME", "trainer-0")
    played.server.answer("GET", f"{PODS}/trainer-0", pod({"name": "g", "resourceClaimName": "g"}))
    played.server.answer("GET", f"{CLAIMS}/g", claim("gpu-10", "gpu-9"))
    names = {
        "STEPS": 2,
        "sample": lambda pool: pool.wait_serving(),
        "publish": lambda pool, step: None,
        "train": train,
        "torch": ONE_RANK,
        "dist": ONE_RANK,
        "LOCAL_RANK": 1,
        "RolloutPool": RolloutPool,
    }
    assert len(blocks()) == 2
    await asyncio.to_thread(exec, blocks()[number], names)
    assert held == [[sorted(GPUS)] * 2, [[GPUS[0]]]][number]


# Pools without an operator, and no pool at all.


async def test_a_pool_without_an_operator_takes_turns_at_its_control_ports(directory: Path) -> None:
    async with scripted_controls(2) as controls:
        urls = ports = [each.server.url for each in controls]
        for each in controls:
            each.server.answer("GET", "/ready", {})
        async with AsyncRolloutPool.from_urls(urls, control_urls=ports) as pool:
            async with pool.turn(seconds=20):
                assert [each.verbs for each in controls] == [["sleep"]] * 2
                assert holders(directory) == MINE
            assert [each.holds for each in controls] == [[]] * 2
            controls[1].refuse["sleep"] = (409, "held")
            await refused_turn(pool, SteeringFailed, "no sleep: held", seconds=20)
            assert await pool._steering.wanted_state() == "Active"  # type: ignore[union-attr]
            assert [each.resident for each in controls] == [True] * 2


async def test_the_locks_alone(directory: Path) -> None:
    with local_turn(seconds=5) as turn:
        assert turn.devices == tuple(sorted(GPUS))
        assert holders(directory) == MINE
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  # from inside the turn
        async with local_turn([OTHER], directory):
            assert holders(directory)[OTHER] == "trainer-0"
            raise ZeroDivisionError
    assert holders(directory)[OTHER] == "trainer-0"
    with local_turn([OTHER], directory):
        pass
    assert set(holders(directory).values()) == {None}


async def test_the_memory_of_a_holder_that_died_is_waited_for(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks after a turn that was given back: it would cost each turn two looks."""
    monkeypatch.setattr(device_memory, "MEMORY_QUIET_SECONDS", 0.3)
    looks = tmp_path / "looks"
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\necho >>{looks}\nn=$(wc -l <{looks})\n[ $n -gt 3 ] && n=3\necho 0, GPU-a, $((n * 1000)), 8000\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with local_turn(seconds=30):
        pass
    assert not looks.exists()
    for way in ("with", "async with"):
        looks.unlink(missing_ok=True)
        with puppet(directory, "math-0-0", *GPUS) as worker:
            worker.ask("take")
            worker.kill()
        async with AsyncExitStack() as stack:
            if way == "with":
                stack.enter_context(local_turn(seconds=30))
            else:
                await stack.enter_async_context(local_turn(seconds=30))
            assert len(looks.read_text()) >= 4


async def test_an_api_server_that_is_away_costs_nothing_but_waiting(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loopback() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
    async with AsyncRolloutPool.from_cluster("math") as pool:
        with puppet(directory, "math-0-0", *GPUS) as worker:
            worker.ask("take")
            await refused_turn(pool, SteeringFailed, "not known within 1 s", seconds=1)
            assert holders(directory) == SERVING
