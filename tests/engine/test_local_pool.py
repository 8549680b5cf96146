"""`rollout up` as users type it, and the example that learns with workers of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout_client.local import LocalPlan, LocalPoolFailed, LocalWorkers
from tests.support.engine.engine_kinds import ROOT
from tests.support.engine.gangs import free_port_row
from tests.support.engine.tinymodels import TinyModels
from tests.support.processes import descendants
from tests.support.waiting import until_sync

COMMAND = (
    *("env", "--default-signal=HUP"),  # below nohup it is ignored, as it should be
    *(sys.executable, "-m", "rollout_client.commands.rollout_command", "up"),
)


@contextlib.contextmanager
def running(log: Path, *flags: object) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*COMMAND, *map(str, flags)], stdout=out, stderr=subprocess.STDOUT, cwd=ROOT
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def test_the_shown_program_generates_and_a_worker_that_dies_ends_all(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    flags = ("--model", tiny_models.model(1), "--replicas", 2, "--port", free_port_row())
    with running(log, *flags, "--", "--dtype", "float32") as process:
        until_sync(lambda: "Ctrl-C ends" in log.read_text(), 120, what="both workers")
        shown = log.read_text()
        program = shown.partition("In Python:")[2].partition("In a shell:")[0]
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        assert re.match(r"\((\d+, ){7}\d+\) ", done.stdout), done.stdout + done.stderr
        [curl] = re.findall(r"^curl .*\n.*$", shown, re.MULTILINE)
        answer = subprocess.run(
            ["bash", "-c", f"{curl} -s"], capture_output=True, timeout=60, check=False
        )
        assert b'"token_ids":[' in answer.stdout, answer.stderr
        workers = [each for each in descendants(process.pid) if "rollout_worker" in each.command]
        os.kill(workers[0].pid, signal.SIGKILL)
        assert process.wait(30) == 1
        assert "has ended with status -9" in log.read_text()
        until_sync(lambda: not any(each.alive for each in workers), 10, what="the others' end")
    folder = Path(re.findall(r"^logs: (.*)/worker", shown, re.MULTILINE)[0])
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_the_workers_while_they_load(
    number: signal.Signals, tiny_models: TinyModels, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    flags = "--model", tiny_models.model(1), "--port", free_port_row(), "--folder", tmp_path
    with running(log, *flags) as process:
        until_sync(lambda: "worker 0: " in log.read_text(), 60, what="the worker's start")
        workers = descendants(process.pid)
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait(30)
            until_sync(lambda: not any(each.alive for each in workers), 30, what="their end")
        else:
            assert process.wait(30) == 0
            assert not any(each.alive for each in workers)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    """A port that is taken, too few GPUs, a model that is none."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        done = subprocess.run(
            [*COMMAND, "--model", tmp_path, "--port", str(port)],
            capture_output=True, text=True, timeout=60, cwd=ROOT,
        )  # fmt: skip
    assert done.returncode == 1
    assert f"port {port} can't be used" in done.stderr
    assert "choose another --port" in done.stderr
    plan = LocalPlan("hf", str(tmp_path), replicas=2, port=free_port_row(), gpus=99)
    with pytest.raises(LocalPoolFailed, match="fewer --replicas or --gpus"):
        LocalWorkers(plan, tmp_path, print).__enter__()
    empty = LocalPlan("hf", str(tmp_path), port=free_port_row())
    wrong = LocalPlan("hf", str(tmp_path), port=free_port_row(), flags=("--no-such-flag",))
    for plan, why in (
        (empty, r"engine of worker 0: .*config\.json"),
        (wrong, "unrecognized arguments: --no-such-flag"),
    ):
        with (
            LocalWorkers(plan, tmp_path, print) as workers,
            pytest.raises(LocalPoolFailed, match=why),
        ):
            workers.wait_until_ready()


Run = Callable[..., list[list[float]]]


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example in this process, which has imported what takes it seconds; returns the numbers of each step's line."""

    def run(name: str, steps: int, pattern: str, *words: object) -> list[list[float]]:
        path = str(ROOT / "examples" / name)
        flags = ("--steps", steps, "--port", free_port_row(), *words)
        monkeypatch.setattr(sys, "argv", [path, *map(str, flags)])
        runpy.run_path(path, run_name="__main__")
        shown = capsys.readouterr().out
        found = [[float(each) for each in line] for line in re.findall(pattern, shown)]
        assert len(found) == steps, shown
        return [list(column) for column in zip(*found, strict=True)]

    return run


def test_the_example_learns_to_count(run_example: Run) -> None:
    pattern = r"reward (\d\.\d+)  \|dlogp\| (\S+)"
    rewards, differences = run_example("local/count.py", 7, pattern, "--replicas", 1)
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.3, rewards
    assert max(differences) < 1e-3


@pytest.mark.soak  # every day the contract suite sees that pictures become the right tokens
def test_the_model_that_sees_learns_to_count_squares(run_example: Run, tmp_path: Path) -> None:
    pattern = r"reward (\d\.\d+)  \|dlogp\| (\S+)"
    rewards, differences = run_example("vision/squares.py", 8, pattern, "--out", tmp_path)
    assert rewards[0] < 0.4 < 0.6 < rewards[-1], rewards
    assert max(differences) < 1e-3
    assert (tmp_path / "table.csv").read_text().count("\n") == 9


@pytest.mark.soak  # every day test_client_docs.py scores by the code of docs/generate.md
def test_the_student_comes_closer_to_its_teacher(run_example: Run) -> None:
    pattern = r"divergence (\d\.\d+)  counts (\d\.\d+)"
    divergences, counts = run_example("distill/distill.py", 15, pattern)
    assert divergences[-1] < divergences[0] / 4, divergences
    assert counts[0] < 0.2 < 0.6 < counts[-1], counts
