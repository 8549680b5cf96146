"""A turn that one process lends to another: who may borrow it, who unlocks it, and what the death of either does."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout_common.turn import Turn, TurnError, TurnTimeout
from rollout_common.turn.lock_files import holders, lock_name
from tests.support.unit.turn_process import puppet
from tests.support.waiting import eventually

DEVICES = ("gpu-0", "gpu-1")
Files = dict[str, tuple[int, int]]
"""By device: its lock file and keeper."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every descriptor that a test opened is closed again."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    eventually("descriptors to be closed", lambda: len(os.listdir("/proc/self/fd")) == before, 3)


@pytest.fixture
def lender(directory: Path, nothing_left: None) -> Iterator[Turn]:
    del nothing_left
    turn = Turn(directory, DEVICES, "lender")
    turn.take(10)
    yield turn
    turn.give()
    turn.leave()


def copy_files(turn: Turn) -> Files:
    """What another process gets of a turn that is lent."""
    return {device: (os.dup(a), os.dup(b)) for device, (a, b) in turn.lend_files().items()}


def borrow(turn: Turn, directory: Path) -> Turn:
    return Turn.adopt(directory, copy_files(turn), "borrower")


def names(directory: Path) -> set[str | None]:
    """Who holds the devices."""
    return set(holders(directory).values())


def test_who_lends_leaves_and_who_borrowed_unlocks(lender: Turn, directory: Path) -> None:
    borrowed = borrow(lender, directory)
    assert (borrowed.devices, borrowed.held, lender.held) == (DEVICES, True, True)
    lender.give()
    assert (borrowed.held, lender.held, names(directory)) == (True, False, {"lender"})
    borrowed.write_notes("borrower")
    assert names(directory) == {"borrower"}
    with pytest.raises(TurnTimeout):
        lender.take(0.05)
    borrowed.give()
    lender.take(5)
    borrowed.leave()
    assert names(directory) == {"lender"}
    lender.give()
    assert names(directory) == {None}, "the next turn of who has lent one is its own again"


def test_a_borrower_that_leaves_changes_nothing_and_one_that_gives_unlocks_for_all(
    lender: Turn, directory: Path
) -> None:
    borrow(lender, directory).leave()
    assert lender.held
    # A process of its own, which is gone afterwards: an attempt that was given up may get the lock for a moment.
    with puppet(directory, "other", *DEVICES) as other:
        assert other.ask("take 0").startswith("TurnTimeout")
    borrowed = borrow(lender, directory)
    borrowed.give()
    assert names(directory) == {None}
    borrowed.leave()


def swap(files: Files, _: Path) -> Files:
    return dict(zip(files, reversed(files.values()), strict=True))


def replace_second(make: Callable[[Path], tuple[int, int]]) -> Callable[[Files, Path], Files]:
    """Pass other descriptors for the second device."""

    def replace(files: Files, directory: Path) -> Files:
        for each in files[DEVICES[1]]:
            os.close(each)
        return {**files, DEVICES[1]: make(directory)}

    return replace


def open_pair(path: Path) -> tuple[int, int]:
    return os.open(path, os.O_RDWR | os.O_CREAT), os.open(os.devnull, os.O_RDONLY)


def half_pair(files: Files, _: Path) -> Files:
    file, keeper = files[DEVICES[0]]
    os.close(keeper)
    return {**files, DEVICES[0]: (file, keeper)}


def remove_file(files: Files, directory: Path) -> Files:
    (directory / lock_name(DEVICES[0])).unlink()
    return files


def replace_file(files: Files, directory: Path) -> Files:
    remove_file(files, directory)
    (directory / lock_name(DEVICES[0])).touch()
    return files


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (swap, "not the lock file of gpu-0"),
        (replace_second(lambda folder: open_pair(folder / ".other")), "not the lock file of gpu-1"),
        (replace_second(lambda folder: open_pair(folder / "gpu-1")), "gpu-1 is somebody else's"),
        (replace_second(lambda _: (-1, -1)), "not the lock file of gpu-1"),
        (half_pair, "not the lock file of gpu-0"),
        (remove_file, "not the lock file of gpu-0"),
        (replace_file, "not the lock file of gpu-0"),
        (lambda files, _: {**files, ".hidden": open_pair(Path(os.devnull))}, "can't name a device"),
    ],
    ids=["swapped", "other file", "no lock", "closed", "half", "removed", "replaced", "name"],
)
def test_what_is_not_the_lock_is_refused_and_closed(
    lender: Turn, directory: Path, change: Callable[[Files, Path], Files], why: str
) -> None:
    files = change(copy_files(lender), directory)
    with pytest.raises(TurnError, match=why):
        Turn.adopt(directory, files, "borrower")
    assert lender.held
    assert "borrower" not in names(directory)


def test_a_lock_that_its_lender_had_not_is_had_from_then_on(directory: Path) -> None:
    files = {"gpu-0": open_pair(directory / "gpu-0")}
    borrowed = Turn.adopt(directory, files, "borrower")
    assert None not in names(directory)
    borrowed.give()
    borrowed.leave()


@pytest.mark.parametrize("gives_first", [True, False])
def test_the_turn_ends_with_the_last_of_lender_and_killed_borrower(
    lender: Turn, directory: Path, gives_first: bool
) -> None:
    with socket.socket(socket.AF_UNIX) as listener, puppet(directory, "other", "gpu-9") as other:
        listener.bind(str(directory / ".socket"))
        listener.listen()
        other.tell(f"borrow {directory / '.socket'} {' '.join(DEVICES)}")
        with listener.accept()[0] as sock:
            files = [file for pair in lender.lend_files().values() for file in pair]
            socket.send_fds(sock, [b"turn"], files)
        assert other.answer() == "borrowed"
        if gives_first:
            lender.give()
        assert None not in names(directory)
        other.kill()
        if not gives_first:
            assert names(directory) == {"lender"}, "it has it still"
            lender.give()
    assert names(directory) == {None}


@pytest.mark.parametrize("killed", [True, False])
def test_the_borrower_keeps_the_turn_of_a_lender_that_ends(directory: Path, killed: bool) -> None:
    with socket.socket(socket.AF_UNIX) as listener, puppet(directory, "it", *DEVICES) as other:
        listener.bind(str(directory / ".socket"))
        listener.listen()
        assert other.ask("take").startswith("taken")
        other.tell(f"lend {directory / '.socket'}")
        with listener.accept()[0] as sock:
            _, files, _, _ = socket.recv_fds(sock, 4, 4)
        assert other.answer() == "lended"
        lent = {DEVICES[0]: (files[0], files[1]), DEVICES[1]: (files[2], files[3])}
        borrowed = Turn.adopt(directory, lent, "borrower")
        other.kill() if killed else other.ask("give")
        assert (borrowed.held, names(directory)) == (True, {"it"})
        borrowed.give()
        borrowed.leave()
        assert names(directory) == {None}


def test_a_forked_child_neither_lends_nor_gives(lender: Turn, directory: Path) -> None:
    borrowed = borrow(lender, directory)
    if (child := os.fork()) == 0:
        refusals = 0
        for turn in (lender, borrowed):
            try:
                turn.lend_files()
            except TurnError:
                refusals += 1
            turn.give()
        os._exit(refusals)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert None not in names(directory)
    borrowed.leave()
    lender.give()
    with pytest.raises(TurnError, match="holds a turn can lend it"):
        lender.lend_files()


def test_lender_and_borrower_see_that_others_wait(lender: Turn, directory: Path) -> None:
    borrowed, other = borrow(lender, directory), Turn(directory, DEVICES[1:], "other")
    turns = lender, borrowed, other
    assert [each.is_waited_for for each in turns] == [False, False, False]
    thread = threading.Thread(target=other.take, args=(30,))
    thread.start()
    eventually("it waits", lambda: borrowed.is_waited_for and lender.is_waited_for)
    lender.give()
    assert [each.is_waited_for for each in turns] == [False, True, False]
    borrowed.give()
    thread.join(30)
    assert other.held
    assert [each.is_waited_for for each in turns] == [False, False, False]
    for each in (other, borrowed):
        each.give()
        each.leave()
