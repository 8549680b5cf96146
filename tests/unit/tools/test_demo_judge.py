"""The judge of turns adds up what it saw: who had memory of a device, and for how long two did."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from demo.judge import Judge
from tests.support.waiting import until_sync

GPU = "node-1/gpu-0"
IDLE = 200.0
AWAKE = 320.0


def marks(t: float, *pods: str) -> dict[str, Any]:
    return {"t": t, "marks": [[GPU, pod] for pod in pods]}


def worker(t: float, mib: float, pod: str = "worker") -> dict[str, Any]:
    return {"t": t, "pod": pod, "devices": [GPU], "mib": mib}


def end(t: float) -> dict[str, Any]:
    return {"t": t, "looks": 1000, "gap": 0.002}


def judge_of(folder: Path, *lines: dict[str, Any]) -> Judge:
    (folder / "judge.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Judge(folder)


def test_turns_that_follow_each_other_do_not_overlap(tmp_path: Path) -> None:
    judge = judge_of(
        tmp_path,
        *(marks(1, "trainer"), worker(1.5, IDLE), marks(2), worker(3, AWAKE), worker(4, IDLE)),
        *(marks(5, "trainer"), marks(6), end(7)),
    )
    report = judge.report(judge.asleep_mib())
    assert report.overlap == {GPU: 0.0}
    assert report.turns == {GPU: 3}
    assert report.pods == {"trainer", "worker"}
    assert (report.seconds, report.looks) == (6, 1000)


@pytest.mark.parametrize("last", [marks(4.5), worker(4.5, IDLE), worker(4.5, 0.0)])
def test_memory_of_two_is_told_with_its_time(tmp_path: Path, last: dict[str, Any]) -> None:
    judge = judge_of(tmp_path, worker(1, IDLE), worker(2, AWAKE), marks(3, "trainer"), last, end(9))
    assert judge.report(IDLE).overlap == {GPU: 1.5}
    assert any("1.500 s" in line for line in judge.report(IDLE).lines())


def test_two_that_still_have_memory_at_the_end_count_until_then(tmp_path: Path) -> None:
    judge = judge_of(tmp_path, marks(1, "one", "two"), end(3))
    assert judge.report(IDLE).overlap == {GPU: 2.0}
    assert judge.having(IDLE) == {GPU: {"one", "two"}}


def test_a_worker_that_never_slept_teaches_nothing(tmp_path: Path) -> None:
    loading = [worker(t, mib) for t, mib in enumerate((4, 100, IDLE, AWAKE), 1)]
    assert judge_of(tmp_path, *loading).asleep_mib() == 0
    slept = [*loading, worker(5, IDLE + 3), worker(6, AWAKE)]
    assert judge_of(tmp_path, *slept).asleep_mib() == IDLE + 3


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    judge = judge_of(tmp_path, marks(1, "one", "two"), end(2))
    with (tmp_path / "judge.jsonl").open("a") as file:
        file.write('{"t": 3.0, "mar')
    assert judge.report(IDLE).overlap == {GPU: 1.0}
    with (tmp_path / "judge.jsonl").open("a") as file:
        file.write('ks": []}\n')
    assert judge.report(IDLE).overlap == {GPU: 2.0}


def test_it_reads_each_line_once(tmp_path: Path) -> None:
    """It is asked fifty times a second while a log grows that has a line for each change."""
    judge = judge_of(tmp_path, marks(1, "one", "two"), end(2))
    before = judge.report(IDLE), judge.having(IDLE), judge.asleep_mib()
    size = (tmp_path / "judge.jsonl").stat().st_size
    # What was read is not looked at again, so it may as well be unreadable.
    (tmp_path / "judge.jsonl").write_bytes(b"x" * size)
    assert (judge.report(IDLE), judge.having(IDLE), judge.asleep_mib()) == before
    with (tmp_path / "judge.jsonl").open("a") as file:
        file.write(json.dumps(marks(4)) + "\n" + json.dumps(end(5)) + "\n")
    assert judge.report(IDLE).overlap == {GPU: 3.0}
    # Another level of idle memory judges all lines anew.
    assert judge.report(IDLE + 1) == judge.report(IDLE)


def test_it_sees_who_locks_a_device_among_hundreds_of_locks(tmp_path: Path) -> None:
    """The kernel tells locks a page at a time."""
    device = tmp_path / "nodes" / "node-1" / "run" / "devices" / "gpu-0"
    device.parent.mkdir(parents=True)
    device.touch()
    us = {GPU: {f"process {os.getpid()}"}}
    with ExitStack() as stack:
        judge = stack.enter_context(Judge(tmp_path))
        locked = [tmp_path / f"other-{number}" for number in range(300)]
        for path in (*locked[:150], device, *locked[150:]):
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        until_sync(lambda: judge.having(IDLE) == us, 20, what="the judge sees our lock")
        until_sync(lambda: judge.report(IDLE).looks > 10, 20, what="some more looks")
    assert judge.report(IDLE).overlap == {GPU: 0.0}
