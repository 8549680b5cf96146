"""The turn for a device: real processes, real locks; killed, stopped, replaced and cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from rollout_common.turn import Turn, TurnError, TurnTimeout
from rollout_common.turn.lock_files import holders, lock_name
from rollout_common.turn.sharing import SOCKET, Sharing, join
from tests.support.processes import shares_lock
from tests.support.unit import turn_process
from tests.support.unit.turn_process import ROOT, Puppet, puppet
from tests.support.waiting import eventually

GPU = "gpu.example.com/node-1/gpu-0"
OTHER = "gpu.example.com/node-1/gpu-1"
SOON = 0.15


@pytest.fixture
def mine(directory: Path) -> Iterator[Turn]:
    """This process's turn for one device."""
    turn = Turn(directory, [GPU], "mine")
    yield turn
    turn.give()


@contextlib.contextmanager
def trainer(directory: Path, *devices: str) -> Iterator[Puppet]:
    """Another process that has the turn."""
    with puppet(directory, "trainer-0", *(devices or (GPU,))) as other:
        assert other.ask("take").startswith("taken")
        yield other


@pytest.fixture
def other(directory: Path) -> Iterator[Puppet]:
    """Another process that has the turn."""
    with trainer(directory) as made:
        yield made


def refused(turn: Turn) -> dict[str, str]:
    """Who has the turn, so that we don't get it."""
    with pytest.raises(TurnTimeout) as told:
        turn.take(SOON)
    assert not turn.held
    return told.value.waiting_for


@contextlib.contextmanager
def waiting(turn: Turn) -> Iterator[None]:
    """Wait for the turn in a thread, which has got it at the end of the block."""
    thread = threading.Thread(target=turn.take, args=(30,))
    thread.start()
    eventually("it waits", lambda: turn.blocked_by, every=0.001)
    yield
    thread.join(30)
    assert turn.held


def test_one_process_at_a_time_holds_the_turn(other: Puppet, mine: Turn) -> None:
    assert refused(mine) == {GPU: "trainer-0"}
    other.ask("give")
    mine.take(10)
    assert mine.held
    assert other.ask("take 0.3") == (
        f"TurnTimeout: no turn within 0.3 s: {GPU} is held by mine; wait longer, or end the holder"
    )
    mine.give()
    mine.give()
    assert other.ask("take").startswith("taken")


def test_taking_what_one_has_changes_nothing(mine: Turn) -> None:
    mine.take(10)
    mine.take(0)
    mine.give()
    assert not mine.held


def test_a_free_turn_is_had_without_time_to_wait(mine: Turn) -> None:
    for _ in range(20):
        mine.take(0)
        mine.give()


def test_a_stopped_holder_keeps_the_turn(other: Puppet, mine: Turn) -> None:
    other.signal(signal.SIGSTOP)
    assert refused(mine) == {GPU: "trainer-0"}
    other.signal(signal.SIGCONT)
    other.ask("give")
    mine.take(10)


def test_a_child_that_joined_keeps_the_turn_of_its_killed_parent(
    other: Puppet, directory: Path, mine: Turn
) -> None:
    child = int(other.ask("child"))
    lock = directory / lock_name(GPU)
    assert shares_lock(child, lock)
    assert not shares_lock(os.getpid(), lock)
    other.kill()
    assert refused(mine) == {GPU: "trainer-0"}
    os.kill(child, signal.SIGKILL)
    mine.take(10)


@pytest.mark.parametrize("who", ["holder", "child", "heir"])
def test_a_killed_process_has_lost_its_memory_when_it_loses_its_turn(
    directory: Path, tmp_path: Path, who: str
) -> None:
    """It opened the memory first, and the kernel closes first what was opened last."""
    memory = tmp_path / "memory"
    memory.touch()
    with puppet(directory, "trainer-0", GPU) as other, memory.open() as mine:
        if who == "holder":
            assert other.ask(f"have {memory}") == "has"
        assert other.ask("take").startswith("taken")
        last = other.pid if who == "holder" else int(other.ask(f"{who} {memory}"))
        if who != "holder":
            other.kill()
        with (directory / lock_name(GPU)).open() as lock:
            threading.Timer(0.05, os.kill, (last, signal.SIGKILL)).start()
            fcntl.flock(lock, fcntl.LOCK_EX)
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_killed_holder_gives_way_and_the_next_turn_names_it(directory: Path, mine: Turn) -> None:
    mine.take(10)
    assert mine.left_by == {}
    mine.give()
    with trainer(directory) as other:
        assert refused(mine)
        other.kill()
        mine.take(10)
    assert holders(directory) == {GPU: "mine"}
    assert mine.left_by == {GPU: "trainer-0"}
    mine.give()
    mine.take(10)
    assert mine.left_by == {}


def test_who_gives_up_waiting_leaves_the_word_of_a_death_to_the_next(
    directory: Path, mine: Turn
) -> None:
    with trainer(directory) as dead, trainer(directory, OTHER) as alive:
        dead.kill()
        with puppet(directory, "both", GPU, OTHER) as both:
            assert both.ask("take 0.3").startswith("TurnTimeout")
        assert alive.ask("give").startswith("given")
    mine.take(10)
    assert mine.left_by == {GPU: "trainer-0"}


def until_it_waits(other: Puppet) -> None:
    """Until a process stands in the kernel and waits for a lock."""
    mark = f" {other.pid} "

    def waits() -> bool:
        lines = Path("/proc/locks").read_text().splitlines()
        return any("-> FLOCK" in line and mark in line for line in lines)

    eventually("it waits", waits, every=0.01)


def stands_still(other: Puppet) -> bool:
    """Whether all threads of a process have stopped."""
    threads = Path(f"/proc/{other.pid}/task").glob("*/stat")
    return {thread.read_text().rpartition(")")[2].split()[0] for thread in threads} == {"T"}


def test_who_waits_goes_before_who_gives_back_and_wants_it_again(
    directory: Path, mine: Turn
) -> None:
    with puppet(directory, "trainer-0", GPU) as other:
        for _ in range(5):
            mine.take(10)
            other.tell("take")
            until_it_waits(other)
            mine.give()
            with pytest.raises(TurnTimeout):
                mine.take(0.1)
            assert other.answer().startswith("taken")
            assert other.ask("give").startswith("given")


def test_who_waits_and_stands_still_keeps_nobody_out(directory: Path, mine: Turn) -> None:
    with puppet(directory, "trainer-0", GPU) as other:
        mine.take(10)
        other.tell("take")
        until_it_waits(other)
        other.signal(signal.SIGSTOP)
        eventually("it stands still", lambda: stands_still(other), every=0.01)
        mine.give()
        mine.take(10)
        mine.give()
        other.signal(signal.SIGCONT)
        assert other.answer().startswith("taken")


def test_the_holder_gives_back_for_a_child_that_is_stopped(other: Puppet, mine: Turn) -> None:
    """A sleeping engine need not be asked for anything."""
    os.kill(int(other.ask("child")), signal.SIGSTOP)
    other.ask("give")
    mine.take(10)


def test_a_child_that_joined_once_shares_every_later_turn(other: Puppet, mine: Turn) -> None:
    child = int(other.ask("child"))
    other.ask("give")
    mine.take(10)
    mine.give()
    other.ask("take")
    other.kill()
    assert refused(mine)
    os.kill(child, signal.SIGKILL)
    mine.take(10)


def test_nobody_joins_without_an_invitation_and_nobody_joins_the_dead(
    mine: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SOCKET, raising=False)
    join()
    sharing = Sharing(mine.fileno_list)
    assert "has no turn for the devices to share" in failed_join(sharing)
    sharing.close()
    assert "is gone" in failed_join(sharing)


def failed_join(sharing: Sharing) -> str:
    """What a process says that can't join."""
    return subprocess.run(
        [sys.executable, "-S", turn_process.__file__, "--join"],
        env={"PYTHONPATH": str(ROOT / "src"), **sharing.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    ).stderr


def test_who_shares_the_turn_needs_not_join_it(mine: Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its own copies would keep the turn when it leaves."""
    mine.take(10)
    sharing = Sharing(mine.fileno_list)
    monkeypatch.setenv(SOCKET, str(sharing.path))
    before = len(os.listdir("/proc/self/fd"))
    join()
    assert len(os.listdir("/proc/self/fd")) == before
    sharing.close()


def test_only_this_user_reaches_the_socket(mine: Turn) -> None:
    sharing = Sharing(mine.fileno_list)
    try:
        assert sharing.path.parent.stat().st_mode & 0o777 == 0o700
    finally:
        sharing.close()
    assert not sharing.path.parent.exists()


def test_who_waits_is_told_whom_for(directory: Path, mine: Turn) -> None:
    told: list[dict[str, str]] = []
    with trainer(directory) as other:
        with pytest.raises(TurnTimeout):
            mine.take(SOON, lambda who: told.append(dict(who)))
        assert told == [{GPU: "trainer-0"}]
        with waiting(mine):
            assert mine.blocked_by == {GPU: "trainer-0"}
            other.ask("give")
    assert mine.blocked_by == {}


def test_what_others_write_into_a_lock_file_hurts_nobody(
    directory: Path, mine: Turn, other: Puppet
) -> None:
    lock = directory / lock_name(GPU)
    for note in (
        *(b"", b"[", b"[]", b'{"holder": 7}', b'{"holder": ["a", "list"]}', b'{"holder": ""}'),
        *(b'{"holder": "a\\nb"}', b"[" * 4000, b"\xff" * 9000),
    ):
        lock.write_bytes(note)
        assert refused(mine) == {GPU: "a process that left no name"}, note
        other.ask("give")
        lock.write_bytes(note)
        mine.take(10)
        assert mine.left_by == {}, note
        mine.give()
        assert other.ask("take").startswith("taken")


def test_devices_are_had_all_or_none_in_one_order(directory: Path) -> None:
    """Two who name the same devices in different orders never wait for each other."""
    with trainer(directory, "b"):
        several = Turn(directory, ["c", "b", "a"], "several")
        assert several.devices == ("a", "b", "c")
        assert refused(several) == {"b": "trainer-0"}
        assert holders(directory) == {"a": None, "b": "trainer-0"}


@pytest.mark.parametrize(
    "devices", [[], ["a", "a"], [""], [".."], ["x" * 256]], ids=["none", "two", "", "up", "long"]
)
def test_devices_that_no_lock_can_be_for_are_refused(directory: Path, devices: list[str]) -> None:
    with pytest.raises(TurnError):
        Turn(directory, devices, "mine")


async def test_a_cancelled_waiter_holds_nothing_afterwards(directory: Path) -> None:
    turn = Turn(directory, ["a", "b"], "mine")
    with trainer(directory, "b") as other:
        waiting = asyncio.create_task(turn.take_async())
        await asyncio.to_thread(eventually, "it waits", lambda: turn.blocked_by)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        # At once, not when the other one gives its device back.
        assert holders(directory)["a"] is None
        other.ask("give")
        with puppet(directory, "third", "a", "b") as third:
            assert third.ask("take 10").startswith("taken")


async def test_a_turn_that_comes_as_its_waiter_is_cancelled_is_given_back(directory: Path) -> None:
    """However the two fall: cancelled before, with and after the answer."""
    turn = Turn(directory, [GPU], "mine")
    other = Turn(directory, [GPU], "other")
    for turns in range(60):
        waiting = asyncio.create_task(turn.take_async())
        for _ in range(turns // 10):
            await asyncio.sleep(0.0002)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
            turn.give()
        assert not turn.held
        await other.take_async(10)
        other.give()


async def test_giving_up_again_and_again_leaves_one_thread(directory: Path) -> None:
    turn = Turn(directory, [GPU], "mine")
    with trainer(directory) as other:
        for _ in range(20):
            with pytest.raises(TurnTimeout):
                await turn.take_async(0.001)
        assert [each.name for each in threading.enumerate()].count("turn") == 1
        waiting = asyncio.create_task(turn.take_async(30))
        await asyncio.sleep(0)
        other.ask("give")
        await waiting
    assert turn.held
    turn.give()


def test_a_second_waiter_on_one_object_is_refused(directory: Path, mine: Turn) -> None:
    with trainer(directory) as other, waiting(mine):
        with pytest.raises(TurnError, match="waited for already"):
            mine.take(0)
        other.ask("give")


def test_a_lock_file_that_was_replaced_is_not_the_lock(directory: Path, mine: Turn) -> None:
    mine.take(10)
    mine.give()
    (directory / lock_name(GPU)).unlink()
    with trainer(directory) as other:
        assert refused(mine) == {GPU: "trainer-0"}
        other.ask("give")
        mine.take(10)


def test_a_lock_file_that_is_replaced_while_we_wait_is_not_the_lock(
    directory: Path, mine: Turn
) -> None:
    with trainer(directory) as first, waiting(mine):
        (directory / lock_name(GPU)).unlink()
        with trainer(directory) as second:
            first.ask("give")
            eventually("it waits for the new one's holder", lambda: mine.blocked_by)
            assert not mine.held
            second.ask("give")


def test_processes_that_share_a_replaced_lock_must_end_first(directory: Path, mine: Turn) -> None:
    mine.take(10)
    mine.fileno_list()
    mine.give()
    (directory / lock_name(GPU)).unlink()
    with pytest.raises(TurnError, match=r"was replaced .* \(restart the engine\)"):
        mine.take(10)
    mine.leave()
    mine.take(10)
    with puppet(directory, "other", GPU) as other:
        assert other.ask("take 0.3").startswith("TurnTimeout")


def test_who_leaves_keeps_nobody_else_out_but_those_who_joined_do(
    other: Puppet, mine: Turn
) -> None:
    """Children that should have ended may still be there."""
    child = int(other.ask("child"))
    assert other.ask("leave") == "left"
    assert refused(mine)
    assert other.ask("take 0.3").startswith("TurnTimeout")
    os.kill(child, signal.SIGKILL)
    assert other.ask("take").startswith("taken")
    assert refused(mine)
    assert other.ask("leave") == "left"
    mine.take(10)


def test_a_missing_directory_says_what_to_mount(tmp_path: Path) -> None:
    turn = Turn(tmp_path / "nowhere", [GPU], "mine")
    with pytest.raises(TurnError, match=r"nowhere.*No such file.*mount the node's lock directory"):
        turn.take(10)
    assert not turn.held


def test_a_directory_that_vanishes_is_told_and_its_return_is_enough(
    directory: Path, mine: Turn
) -> None:
    mine.take(10)
    mine.give()
    moved = directory.rename(directory.with_name("away"))
    with pytest.raises(TurnError, match="mount the node's lock directory"):
        mine.take(10)
    moved.rename(directory)
    mine.take(10)


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    """And who finds the files there already needs no room: the holder's name is all that is lost."""
    if os.getuid() != 0:
        pytest.skip("mounts a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=3", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        first = Turn(disk, ["a"], "mine")
        first.take(10)
        with pytest.raises(TurnError, match="No space left on device"):
            Turn(disk, ["b", "c", "d"], "mine").take(10)
        first.give()
        first.take(10)
        first.give()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="starts processes of other users")
def test_users_who_differ_share_the_locks(tmp_path: Path) -> None:
    """Also where the kernel forbids O_CREAT on files of others, and whatever their umask."""
    directory = Path("/tmp") / f"turn-users-{os.getpid()}"
    directory.mkdir()
    directory.chmod(0o1777)
    try:
        with (
            puppet(directory, "one", GPU, uid=12345) as one,
            puppet(directory, "two", GPU, uid=23456) as two,
        ):
            assert one.ask("take").startswith("taken")
            assert "held by one" in two.ask("take 0.3")
            one.ask("give")
            assert two.ask("take").startswith("taken")
            assert holders(directory) == {GPU: "two"}
        folder = directory / "private"
        folder.mkdir(mode=0o700)
        with puppet(folder, "one", GPU, uid=12345) as one:
            assert "Permission denied" in one.ask("take")
    finally:
        subprocess.run(["rm", "-r", str(directory)], check=True)


def test_a_killed_maker_of_a_lock_file_blocks_nobody(directory: Path, mine: Turn) -> None:
    """A file gets its name last, so whatever a killed process leaves is in nobody's way."""
    (directory / ".new-0123456789abcdef").touch(mode=0o600)
    mine.take(10)
    assert (directory / lock_name(GPU)).stat().st_mode & 0o777 == 0o666
    assert holders(directory) == {GPU: "mine"}


def test_processes_killed_and_stopped_at_any_moment_never_overlap(
    directory: Path, tmp_path: Path
) -> None:
    random, said = Random(7), list[str]()
    with contextlib.ExitStack() as stack:

        def start() -> Puppet:
            made = stack.enter_context(puppet(directory, "spinner", "a", "b"))
            made.tell(f"spin {tmp_path / 'judge'}")
            return made

        spinners = [start() for _ in range(3)]
        for _ in range(8):
            victim = random.choice(spinners)
            if random.random() < 0.5:
                victim.signal(signal.SIGSTOP)
            time.sleep(random.random() * 0.05)
            victim.kill()
            said += victim.said()
            spinners[spinners.index(victim)] = start()
        # Nobody's death has lost the turn: each of those who live has more of them.
        for each in spinners:
            assert each.answer() == "turn"
        for each in spinners:
            each.kill()
            said += each.said()
    assert set(said) == {"turn"}


def test_a_hand_over_takes_milliseconds(directory: Path, mine: Turn) -> None:
    """docs/benchmarks.md has figures; here only that nobody polls."""
    waits = []
    with trainer(directory) as other:
        for _ in range(20):
            with waiting(mine):
                other.tell("give")
                given = other.answer_time()
            waits.append(time.monotonic() - given)
            mine.give()
            other.ask("take")
    assert sorted(waits)[10] < 0.05


@pytest.mark.parametrize("module", ["rollout_common.turn", "rollout_common.turn.sharing"])
def test_the_turn_needs_nothing_but_the_standard_library(module: str) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import {module}; "
        "print([m for m in sys.modules if m.partition('.')[0] not in sys.stdlib_module_names "
        "and not m.startswith(('rollout_common', '__m'))])"
    )
    told = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "[]"
