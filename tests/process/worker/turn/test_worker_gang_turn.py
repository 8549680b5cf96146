"""A gang that takes turns: all nodes' locks or none, in any company, and none kept for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rollout_common.turn import Turn, TurnTimeout, device_memory
from rollout_common.turn.device_memory import MIB, Free
from rollout_common.turn.lock_files import holders
from rollout_common.wire.problems import ProblemError
from rollout_worker.device_turn import DeviceTurn
from rollout_worker.gang import gang_head as heads
from rollout_worker.gang import member_turn, multi_node_turn
from rollout_worker.gang import member_worker as members
from rollout_worker.gang.member_client import MemberClient, MemberSilent
from rollout_worker.schemas import Lifecycle
from tests.support.unit.tiny_gang import Node, TinyGang, hasten, head, node
from tests.support.unit.tiny_worker import refused, settings
from tests.support.waiting import until


def gpu(rank: int) -> str:
    """The device of a node."""
    return f"gpu.example.com/node-{rank}/gpu-0"


def waits_at(rank: int) -> str:
    """What is said of a node whose device its trainer has."""
    return f"waiting for the turn: {gpu(rank)} is held by trainer-{rank}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of a gang takes a fiftieth here."""
    hasten(monkeypatch)
    monkeypatch.setattr(member_turn, "WAIT_SECONDS", 0.02)
    monkeypatch.setattr(member_turn, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(multi_node_turn, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(multi_node_turn, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(multi_node_turn, "MEMBERS_POLL_SECONDS", 0.02)


class Nodes:
    """Nodes with a lock directory and a trainer's process each."""

    def __init__(self, home: Path, count: int) -> None:
        self.folders = [home / f"node-{rank}" for rank in range(count)]
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
        self.trainers = [
            Turn(folder, [gpu(rank)], f"trainer-{rank}") for rank, folder in enumerate(self.folders)
        ]

    def flags(self, rank: int, holder: str = "gang") -> tuple[str, ...]:
        """Of the worker of a rank."""
        turn = ("--turn-directory", str(self.folders[rank]), "--turn-devices", gpu(rank))
        return (*turn, "--turn-holder", f"{holder}-{rank}")

    @property
    def held(self) -> list[str | None]:
        """Who has each device."""
        return [holders(folder).get(gpu(rank)) for rank, folder in enumerate(self.folders)]

    async def trains(self, ranks: Sequence[int], seconds: float = 20.0) -> None:
        """Take a turn as ranks of a trainer do, one after the other, and give it back."""
        for rank in ranks:
            await self.trainers[rank].take_async(seconds)
        for rank in ranks:
            self.trainers[rank].give()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, 3)
    yield made
    for trainer in made.trainers:
        trainer.give()


@contextlib.asynccontextmanager
async def taking_turns(
    home: Path,
    nodes: Nodes,
    root_hash: str,
    *,
    ranks: Sequence[int] = (0, 1),
    holder: str = "gang",
    loads: bool = True,
) -> AsyncIterator[tuple[TinyGang, list[Node]]]:
    """A gang on these nodes."""
    async with contextlib.AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(
                node(home, root_hash, *nodes.flags(each, holder), rank=rank)
            )
            for rank, each in enumerate(ranks[1:], 1)
        ]
        where = ",".join(f"127.0.0.1:{each.port}" for each in running)
        gang = await stack.enter_async_context(
            head(home, where, *nodes.flags(ranks[0], holder), wait=loads)
        )
        yield gang, running


@pytest.fixture
async def gang(tmp_path: Path, nodes: Nodes, root_hash: str) -> AsyncIterator[TinyGang]:
    async with taking_turns(tmp_path, nodes, root_hash) as (made, _):
        yield made


def turn_of(gang: TinyGang) -> str:
    """The whole gang's turn, as `/v1/state` has it."""
    turn = gang.worker.worker_state().turn
    assert turn is not None
    return turn.state


async def says(gang: TinyGang, words: str) -> None:
    """Until the head says so of its progress."""

    def told() -> str | None:
        progress = gang.worker.worker_state().progress
        return None if progress is None else progress.message

    await until(lambda: words in (told() or ""), what=f"{words!r} to be said")


async def free(nodes: Nodes) -> None:
    """Until nobody has any device."""
    await until(lambda: not any(nodes.held), what="all devices to be given back")


async def test_a_gang_has_the_turn_on_all_nodes_while_it_is_awake(
    tmp_path: Path, nodes: Nodes, root_hash: str
) -> None:
    async with taking_turns(tmp_path, nodes, root_hash, ranks=(0, 1, 2)) as (gang, running):
        for _ in range(3):
            assert nodes.held == ["gang-0", "gang-1", "gang-2"]
            assert turn_of(gang) == "Held"
            await until(lambda: len(devices_of(gang)) == 3, what="the members' devices")
            assert devices_of(gang) == (gpu(0), gpu(1), gpu(2))
            await gang.sleep()
            assert turn_of(gang) == "Released"
            await nodes.trains((0, 1, 2))
            await gang.wake()
            assert gang.state is Lifecycle.ACTIVE
        assert all(each.member.started for each in running)
        assert "rollout_worker_turn_wait_seconds_count 4.0" in gang.worker.render_metrics().decode()
    await free(nodes)


def devices_of(gang: TinyGang) -> tuple[str, ...]:
    turn = gang.worker.worker_state().turn
    assert turn is not None
    return turn.devices


async def test_memory_that_is_partly_given_back_keeps_all_turns(
    gang: TinyGang, nodes: Nodes
) -> None:
    await gang.sleep(tags=("weights",))
    assert (turn_of(gang), nodes.held[:2]) == ("Held", ["gang-0", "gang-1"])
    await gang.sleep(tags=("kv_cache",))
    await nodes.trains((0, 1))
    await gang.wake(tags=("weights",))
    assert (turn_of(gang), nodes.held[:2]) == ("Held", ["gang-0", "gang-1"])


@pytest.mark.parametrize("busy", [0, 1], ids=["the head's", "the member's"])
async def test_who_waits_for_one_node_keeps_no_other(
    tmp_path: Path, nodes: Nodes, root_hash: str, busy: int
) -> None:
    nodes.trainers[busy].take(5)
    async with taking_turns(tmp_path, nodes, root_hash, loads=False) as (gang, (member,)):
        name = f"rank 1 at 127.0.0.1:{member.port}" if busy else "rank 0"
        await says(gang, f"{name}: {waits_at(busy)}")
        assert turn_of(gang) == "Waiting"
        if busy == 0:
            assert nodes.held[1] is None, "no member locks before its head has"
        else:
            await until(lambda: nodes.held[0] is None, what="the head's own device")
        for _ in range(3):
            await nodes.trains([1 - busy])
        assert not gang.engines
        assert not member.member.started
        assert gang.worker.supervisor.health_problem() is None
        nodes.trainers[busy].give()
        await gang.reaches(Lifecycle.ACTIVE)
        assert nodes.held[:2] == ["gang-0", "gang-1"]


async def test_a_gang_that_waits_to_wake_falls_asleep_again_when_asked_to(
    gang: TinyGang, nodes: Nodes
) -> None:
    await gang.sleep()
    await nodes.trainers[1].take_async(5)
    waking = asyncio.create_task(gang.wake())
    await says(gang, waits_at(1))
    await gang.reaches(Lifecycle.WAKING)
    await asyncio.wait_for(gang.sleep("other"), 10)
    await gang.reaches(Lifecycle.ASLEEP)
    with refused("held"):
        await waking
    await nodes.trains([0])
    nodes.trainers[1].give()
    await nodes.trains([0, 1])
    await gang.wake("other")
    assert turn_of(gang) == "Held"


async def test_a_member_that_is_not_there_yet_keeps_nobody_from_a_device(
    tmp_path: Path, nodes: Nodes
) -> None:
    async with head(tmp_path, "127.0.0.1:9", *nodes.flags(0), wait=False) as gang:
        await says(gang, "rank 1 at 127.0.0.1:9 does not answer")
        assert turn_of(gang) == "Waiting"
        await nodes.trains([0])


@pytest.mark.parametrize("theirs", [(1, 0), (0, 1)])
async def test_a_trainer_in_any_order_and_a_gang_take_turns_without_end(
    gang: TinyGang, nodes: Nodes, theirs: tuple[int, int]
) -> None:
    """The trainer holds one node's device as long as it waits for the other's."""
    for _ in range(4):
        await gang.sleep()
        training = asyncio.create_task(nodes.trains(theirs))
        await asyncio.wait_for(gang.wake(), 20)
        assert nodes.held[:2] == ["gang-0", "gang-1"]
        await gang.sleep()  # it may have been faster
        await asyncio.wait_for(training, 20)
        await gang.wake()


async def test_a_trainer_and_a_gang_that_hold_half_each_both_go_on(
    gang: TinyGang, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_node_turn, "PATIENCE_SECONDS", 1.0)
    await gang.sleep()
    await nodes.trainers[1].take_async(5)
    waking = asyncio.create_task(gang.wake())
    await says(gang, waits_at(1))
    assert nodes.held[0] == "gang-0"
    await nodes.trainers[0].take_async(20)
    assert nodes.held[:2] == ["trainer-0", "trainer-1"]
    for trainer in nodes.trainers:
        trainer.give()
    await waking


async def test_two_gangs_in_opposite_orders_both_go_on(
    tmp_path: Path, nodes: Nodes, root_hash: str
) -> None:
    homes = [tmp_path / name for name in ("one", "other")]
    async with (
        taking_turns(homes[0], nodes, root_hash, holder="one") as (one, _),
        taking_turns(homes[1], nodes, root_hash, ranks=(1, 0), holder="other", loads=False) as (
            other,
            _,
        ),
    ):
        await until(lambda: other.worker.worker_state().progress, what="the other one waits")
        await one.sleep()
        await other.reaches(Lifecycle.ACTIVE)
        for _ in range(2):
            waking = asyncio.create_task(one.wake())
            await other.sleep()
            again = asyncio.create_task(other.wake())
            done, _pending = await asyncio.wait(
                {waking, again}, timeout=20, return_when=asyncio.FIRST_COMPLETED
            )
            assert done, "they wait for each other"
            first, last = (one, other) if waking in done else (other, one)
            assert turn_of(last) != "Held" or turn_of(first) != "Held"
            if first is one:
                await one.sleep()
                await asyncio.wait_for(again, 20)
            else:
                await other.sleep()
                await asyncio.wait_for(waking, 20)
                await one.sleep()
                await other.wake()


async def test_memory_of_each_node_is_looked_at_before_its_ranks_load(
    tmp_path: Path, nodes: Nodes, root_hash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not 0.1: a busy machine may say nothing for so long.
    monkeypatch.setattr(multi_node_turn, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(device_memory, "MEMORY_QUIET_SECONDS", 0.2)
    there = asyncio.Event()
    grown = 0

    async def look() -> dict[str, Free]:
        nonlocal grown
        grown += 0 if there.is_set() else 2 * MIB
        return {"GPU 0": Free(grown, 1 << 40)}

    async with node(tmp_path, root_hash, *nodes.flags(1)) as member:
        assert member.locks is not None
        member.locks._look = look
        where = f"127.0.0.1:{member.port}"
        async with head(tmp_path, where, *nodes.flags(0), wait=False) as gang:
            await says(gang, f"rank 1 at {where}: waiting for memory: it still grows")
            before = time.monotonic() + 1.0
            await until(lambda: time.monotonic() > before, what="longer than locks are waited for")
            assert nodes.held[:2] == ["gang-0", "gang-1"], "it is on its way"
            assert not member.member.started
            assert not gang.engines
            there.set()
            await gang.reaches(Lifecycle.ACTIVE)


async def test_each_node_knows_what_its_ranks_need_to_wake(
    tmp_path: Path, nodes: Nodes, root_hash: str
) -> None:
    """The ranks fall asleep by their engine's own word: the head says before that the memory is looked at."""
    free = 20 << 30

    async def look() -> dict[str, Free]:
        return {"GPU 0": Free(free, 80 << 30)}

    async with taking_turns(tmp_path, nodes, root_hash) as (gang, (member,)):
        assert isinstance(member.locks, DeviceTurn)
        member.locks._look = look
        await gang.sleep(tags=("kv_cache",))
        free = 79 << 30
        await gang.sleep(tags=("weights",))
        await until(lambda: nodes.held[1] != "gang-1", what="it is given back")
        free = 40 << 30
        waking = asyncio.create_task(gang.wake())
        await says(gang, "waiting for memory: GPU 0 has 40.0 of 80.0 GiB free")
        free = 70 << 30
        await waking


# Deaths and silence.


async def test_an_engine_that_dies_ends_the_gang_and_loads_nothing_more(
    tmp_path: Path, nodes: Nodes, root_hash: str
) -> None:
    async with taking_turns(tmp_path, nodes, root_hash) as (gang, (member,)):
        gang.engine.wrong = "it died"
        assert await gang.why() == "it died"
        assert len(gang.engines) == 1
        assert nodes.held[1] == "gang-1", "its ranks run until it has heard of it"
        await nodes.trainers[0].take_async(5)
        running, member.running = member.running, asyncio.create_task(asyncio.sleep(0))
        running.cancel()
        await member.worker.stop_worker()
        assert member.member.stopped
        await nodes.trainers[1].take_async(5)


async def test_a_rank_that_dies_asleep_takes_no_turn_with_it(
    tmp_path: Path, nodes: Nodes, root_hash: str
) -> None:
    async with taking_turns(tmp_path, nodes, root_hash) as (gang, (member,)):
        await gang.sleep()
        await nodes.trainers[0].take_async(5)
        await nodes.trainers[1].take_async(5)
        member.member.wrong = "a rank died"
        assert "a rank died" in await gang.why()
        assert len(gang.engines) == 1
        assert nodes.held[:2] == ["trainer-0", "trainer-1"]


async def test_a_member_whose_head_dies_while_they_wait_holds_nothing(
    tmp_path: Path, nodes: Nodes, root_hash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_node_turn, "PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(heads.GangHead, "give_turns", _nobody_hears)
    nodes.trainers[2].take(5)
    async with (
        node(tmp_path, root_hash, *nodes.flags(1)) as first,
        node(tmp_path, root_hash, *nodes.flags(2), rank=2) as second,
    ):
        where = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        async with head(tmp_path, where, *nodes.flags(0), wait=False) as gang:
            await says(gang, waits_at(2))
            assert nodes.held == ["gang-0", "gang-1", "trainer-2"]
        await nodes.trains([0, 1])
        assert first.worker.gang_state().wrong is None
        assert not first.member.started


async def _nobody_hears(*_: object) -> None:
    return None


async def test_a_member_that_does_not_hear_of_the_end_is_told_by_the_watch(
    gang: TinyGang, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads.GangHead, "give_turns", _nobody_hears)
    await gang.sleep()
    await nodes.trains([0, 1])


async def test_one_of_two_that_takes_no_turns_ends_the_start(
    tmp_path: Path, nodes: Nodes, root_hash: str
) -> None:
    async with node(tmp_path, root_hash) as member:
        where = f"127.0.0.1:{member.port}"
        async with head(tmp_path, where, *nodes.flags(0), wait=False) as gang:
            assert "give --turn-devices to both" in await gang.why()


async def test_a_lock_directory_that_a_member_lacks_is_told(
    tmp_path: Path, nodes: Nodes, root_hash: str
) -> None:
    nodes.folders[1].rmdir()
    async with taking_turns(tmp_path, nodes, root_hash, loads=False) as (gang, (member,)):
        why = await gang.why()
        assert why.startswith(f"rank 1 at 127.0.0.1:{member.port}: can't open the lock")
        assert not member.member.started
        await nodes.trains([0])


# The member alone, as a head on a bad line finds it.

LEADER = "a-head"


@pytest.fixture
async def member(tmp_path: Path, nodes: Nodes, root_hash: str) -> AsyncIterator[Node]:
    async with node(tmp_path, root_hash, *nodes.flags(1)) as member:
        yield member


@pytest.fixture
async def line(member: Node) -> AsyncIterator[MemberClient]:
    line = MemberClient(1, f"127.0.0.1:{member.port}", LEADER, settings())
    yield line
    await line.close()


@contextlib.contextmanager
def over() -> Iterator[None]:
    """The block is refused: the attempt is over."""
    with pytest.raises(MemberSilent) as caught:
        yield
    assert caught.value.status == 409


async def has_it(line: MemberClient, attempt: int) -> None:
    """Until a member has its turn."""
    async with asyncio.timeout(10):
        while (await line.take_turn(attempt)).phase != "Held":
            pass


async def test_what_comes_late_takes_nothing(line: MemberClient, nodes: Nodes) -> None:
    await line.give_turn(3, started=False)
    with over():
        await line.take_turn(3)
    with over():
        await line.take_turn(2)
    await nodes.trains([1])
    await has_it(line, 4)
    assert (await line.give_turn(3, started=False)).phase == "Held", "an end of an older one"
    with over():
        await line.use_turn(3)
    assert (await line.use_turn(4)).phase == "InUse"


async def test_a_turn_is_used_only_by_who_has_it(line: MemberClient, nodes: Nodes) -> None:
    with over():
        await line.use_turn(1)
    nodes.trainers[1].take(5)
    assert (await line.take_turn(1)).phase == "Waiting"
    with over():
        await line.use_turn(1)


async def test_a_silent_heads_turn_is_given_back_unless_it_is_used(
    line: MemberClient, member: Node, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "HEAD_SILENCE_SECONDS", 60.0)
    await has_it(line, 1)
    assert nodes.held[1] == "gang-1"
    await nodes.trains([1])
    with over():
        await line.use_turn(1)
    await has_it(line, 2)
    await line.use_turn(2)
    quiet = time.monotonic() + 1.0
    await until(lambda: time.monotonic() > quiet, what="a long silence")
    with pytest.raises(TurnTimeout):
        await nodes.trainers[1].take_async(0.1)
    assert member.member.started


async def test_a_turn_that_ends_while_the_ranks_load_is_kept_until_they_have_ended(
    line: MemberClient, member: Node, nodes: Nodes
) -> None:
    """Nobody knows what they have by then."""
    await has_it(line, 1)
    await line.use_turn(1)
    await line.give_turn(1, started=False)
    assert nodes.held[1] == "gang-1"
    assert "while the ranks of this node load" in await member.why()
    assert nodes.held[1] == "gang-1"
    await member.worker.stop_worker()
    assert member.member.stopped
    await nodes.trains([1])


async def test_ranks_that_do_not_stop_keep_the_turn(
    line: MemberClient, member: Node, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await has_it(line, 1)
    await line.use_turn(1)
    await until(lambda: member.member.started, what="its ranks")
    stop: Callable[[], object] = member.member.stop

    async def fails() -> None:
        raise OSError("stuck")

    monkeypatch.setattr(member.member, "stop", fails)
    await member.worker.stop_worker()
    with pytest.raises(TurnTimeout):
        await nodes.trainers[1].take_async(0.1)
    monkeypatch.setattr(member.member, "stop", stop)


async def test_the_next_attempt_waits_until_the_last_one_has_given_back(
    line: MemberClient, member: Node, nodes: Nodes
) -> None:
    """The look at the memory that is left takes its time."""
    looks = asyncio.Semaphore(1)
    assert isinstance(member.locks, DeviceTurn)

    async def look() -> dict[str, Free]:
        async with looks:
            return {}

    await has_it(line, 1)
    await line.use_turn(1)
    member.locks._look = look
    await looks.acquire()
    await line.give_turn(1, started=True)
    assert nodes.held[1] == "gang-1"
    assert (await line.take_turn(2)).phase != "Held"
    looks.release()
    await has_it(line, 2)
    assert nodes.held[1] == "gang-1"
    await line.give_turn(2, started=True)
    await nodes.trains([1])


async def test_a_member_without_turns_says_so(tmp_path: Path, root_hash: str) -> None:
    async with node(tmp_path, root_hash) as member:
        with pytest.raises(ProblemError, match="takes no turns"):
            _ = member.worker.member_turn
