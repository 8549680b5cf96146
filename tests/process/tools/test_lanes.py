"""`make test` on small folders of tests: what passes, what is tried again, what fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import run_tests

ROOT = Path(__file__).parents[3]
PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): assert 1 == 2\n"
ONCE = """
from pathlib import Path
def test_once_{n}():
    mark = Path(__file__).with_suffix(".{n}")
    was_there = mark.exists()
    mark.touch()
    assert was_there, "the first time it fails"
"""
CONTRACT, REST = "tests/contract/test_beside.py", "tests/unit/test_beside.py"
"""What passes in the lanes beside the one that a test is about."""

CHOSEN = "tests/cluster/test_a.py"


class Done:
    """How a run ended."""

    def __init__(self, folder: Path, status: int, said: str) -> None:
        self.folder, self.status, self.said = folder, status, said

    @property
    def totals(self) -> str:
        """Of the last line."""
        return self.said.splitlines()[-1].partition(" in ")[0]


def write(folder: Path, files: Mapping[str, str]) -> None:
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in {CONTRACT: PASSES, REST: PASSES, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def start(folder: Path, *words: str, shell: Sequence[str] = ()) -> subprocess.Popen[str]:
    variables = {
        "ROLLOUT_CACHE": str(folder / "cache"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take longer to import than the tests
    }
    return subprocess.Popen(
        [*shell, sys.executable, str(ROOT / "hack" / "run_tests.py"), *words],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, files: Mapping[str, str], *words: str) -> Done:
    write(folder, files)
    with start(folder, *words) as process:
        said, _ = process.communicate(timeout=60)
    return Done(folder, process.returncode, said)


def runs_of(done: Done, test: str) -> int:
    """How often a test left its mark."""
    return len((done.folder / test).read_text())


def test_lanes_and_targets_run_side_by_side_and_a_target_that_fails_fails_the_run(
    tmp_path: Path,
) -> None:
    meets = """
import time
from pathlib import Path
def test_meets():
    here = Path(__file__).resolve()
    here.with_suffix(".here").touch()
    others = [p for p in here.parents[1].glob("*/test_*.py") if p != here]
    assert len(others) == 2
    for _ in range(300):
        if all(other.with_suffix(".here").exists() for other in others):
            return
        time.sleep(0.1)
    raise AssertionError("another lane never came")
"""
    skip = "\nimport pytest\n@pytest.mark.skip\ndef test_skipped(): pass\n"
    (tmp_path / "Makefile").write_text("lint:\n\t@echo broken; false\nright:\n\t@true\n")
    files = {CHOSEN: meets, CONTRACT: meets, REST: meets + skip}
    done = run(tmp_path, files, "--beside", "lint", "--beside", "right")
    assert (done.status, done.totals) == (1, "3 passed, 0 failed, 1 skipped"), done.said
    assert "`make lint` failed" in done.said
    assert "`make right` failed" not in done.said
    assert "lint    | broken" in done.said
    assert "cluster | tests/cluster/test_a.py: 1 passed in" in done.said
    assert f"rest    | {REST}: 1 passed, 1 skipped in" in done.said
    assert f"contract| {CONTRACT}: 1 passed in" in done.said
    totals = tmp_path / "cache/logs/tests-totals.txt"
    assert totals.read_text() == "3 passed, 0 failed, 1 skipped\n"


def test_what_fails_once_is_flaky_and_nothing_else_runs_again(tmp_path: Path) -> None:
    counts = """
from pathlib import Path
def test_counts():
    with Path(__file__).with_name("count").open("a") as file:
        file.write("x")
"""
    done = run(tmp_path, {CHOSEN: counts + ONCE.format(n=1)})
    assert (done.status, done.totals) == (0, "4 passed, 0 failed, 0 skipped"), done.said
    assert "FLAKY" in done.said
    assert "tests/cluster/test_a.py::test_once_1: failed, then passed" in done.said
    assert done.said.count("AssertionError: the first time it fails") >= 2, "live and at the end"
    assert runs_of(done, "tests/cluster/count") == 1


def test_more_than_four_failures_of_all_lanes_do_not_run_again(tmp_path: Path) -> None:
    four = "".join(ONCE.format(n=number) for number in range(1, 5))
    done = run(tmp_path, {CHOSEN: four, "tests/unit/test_b.py": ONCE.format(n=5)})
    assert (done.status, done.totals) == (1, "2 passed, 5 failed, 0 skipped")
    assert "5 tests failed: at most 4 run again" in done.said
    assert "FLAKY" not in done.said


def test_what_always_fails_in_the_test_or_around_it(tmp_path: Path) -> None:
    around = """
import pytest
@pytest.fixture
def bad_setup():
    1 / 0
@pytest.fixture
def bad_teardown():
    yield
    1 / 0
def test_before(bad_setup): pass
def test_after(bad_teardown): pass
"""
    done = run(tmp_path, {CHOSEN: PASSES + FAILS, "tests/unit/test_b.py": around})
    assert (done.status, done.totals) == (1, "3 passed, 3 failed, 0 skipped")
    for failed in (
        "tests/cluster/test_a.py::test_fails (call)",
        "tests/unit/test_b.py::test_before (setup)",
        "tests/unit/test_b.py::test_after (teardown)",
    ):
        assert f"FAILED {failed}" in done.said
    for lane in ("cluster", "again"):  # once more at the end, where it is found
        assert "assert 1 == 2" in done.said.rpartition(f" test_fails ({lane}) ")[2]
    assert "FLAKY" not in done.said


CRASHES = {
    "cluster": ("os.kill(os.getpid(), signal.SIGKILL)", "signal 9 ended it"),
    # What pytest-timeout does from a thread: pytest's status for failed tests, and no tests.
    "contract": ("os._exit(1)", "it ended early: 2 of 3 tests ran"),
    "rest": ("pytest.exit('enough')", "pytest ended with status 2"),
}


def test_a_crash_is_final(tmp_path: Path) -> None:
    paths = {"cluster": CHOSEN, "contract": CONTRACT, "rest": REST}
    files = {
        paths[lane]: ONCE.format(n=1)
        + f"import os, signal, pytest\ndef test_crashes(): {how}\ndef test_after(): pass\n"
        for lane, (how, _) in CRASHES.items()
    }
    done = run(tmp_path, files)
    assert done.status == 1
    for lane, (_, sentence) in CRASHES.items():
        assert f"lane {lane}: {sentence}" in done.said
        assert f"during or after {paths[lane]}::test_crashes" in done.said
    assert done.totals == "0 passed, 6 failed, 0 skipped", "no first failure is tried again"
    assert "FLAKY" not in done.said


def test_lanes_of_which_nothing_is_collected(tmp_path: Path) -> None:
    files = {CHOSEN: "def tost(): pass\n", "tests/contract/test_b.py": "1 / 0\n"}
    done = run(tmp_path, files)
    assert (done.status, done.totals) == (1, "1 passed, 1 failed, 0 skipped")
    assert "lane cluster: no test was collected" in done.said
    assert "lane contract: pytest can't collect tests/contract/test_b.py" in done.said


def test_a_lane_without_a_folder_fails(tmp_path: Path) -> None:
    done = run(tmp_path, {})
    assert done.status == 1
    assert "lane 'cluster' has no tests" in done.said


def test_arguments_may_leave_a_lane_empty_but_not_all(tmp_path: Path) -> None:
    files = {CHOSEN: FAILS}
    done = run(tmp_path, files, "--", CHOSEN, REST, "-k", "passes")
    assert (done.status, done.totals) == (0, "1 passed, 0 failed, 0 skipped"), done.said
    done = run(tmp_path, files, "--", CHOSEN, "-k", "nowhere")
    assert done.status == 1
    assert "no test was collected" in done.said


def test_paths_choose_the_lane(tmp_path: Path) -> None:
    files = {CHOSEN: FAILS, "tests/unit/test_b.py": FAILS}
    done = run(tmp_path, files, "--", f"{REST}::test_passes")
    assert (done.status, done.totals) == (0, "1 passed, 0 failed, 0 skipped"), done.said


def test_chosen_tests_do_not_run_again(tmp_path: Path) -> None:
    files = {CHOSEN: ONCE.format(n=1) + PASSES}
    done = run(tmp_path, files, "--", CHOSEN, "-x")
    assert (done.status, done.totals) == (1, "0 passed, 1 failed, 0 skipped"), done.said
    assert "FLAKY" not in done.said
    done = run(tmp_path, files, "--", CHOSEN, "--last-failed")
    assert (done.status, done.totals) == (0, "1 passed, 0 failed, 0 skipped"), done.said


def test_an_interrupt_lets_the_tests_clean_up(tmp_path: Path) -> None:
    """Also of a run in the background, for which a shell has SIGINT ignored."""
    text = """
import pytest, time
from pathlib import Path
@pytest.fixture
def room():
    Path(__file__).with_name("made").touch()
    yield
    Path(__file__).with_name("cleaned").touch()
def test_long(room): time.sleep(60)
"""
    write(tmp_path, {CHOSEN: text})
    with start(
        tmp_path, "--", CHOSEN, shell=("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    ) as process:
        end = time.monotonic() + 30
        while not (tmp_path / "tests/cluster/made").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        process.terminate()
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert (tmp_path / "tests/cluster/cleaned").exists()


def test_every_tier_has_a_budget_and_every_file_is_in_one_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    assert {run_tests.tier_of(file) for file in files} == run_tests.BUDGETS.keys()
    paths = [path for paths in run_tests.choose_lanes([]).values() for path in paths]
    assert sorted(paths) == sorted(files)


def test_a_folder_that_lanes_share_is_chosen_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    chosen = run_tests.choose_lanes(["tests/process"])
    assert list(chosen) == ["cluster", "contract", "rest"]
    first = ("tests/process/client/", "tests/process/tools/")
    assert all(path.startswith(first) for path in chosen["cluster"])
    assert not any(path.startswith("tests/process/worker/") for path in chosen["contract"])
    shared = ("tests/process/client/", "tests/process/operator/", "tests/process/tools/")
    assert not any(path.startswith(shared) for path in chosen["rest"])
