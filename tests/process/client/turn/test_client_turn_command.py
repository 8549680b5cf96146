"""`rollout-turn`: a real command, real locks and signals; the pool is played."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_client.turn.command import main, make_parser
from rollout_common.turn.lock_files import holders
from tests.support.loopback import kubeconfig
from tests.support.processes import look
from tests.support.unit.turn_pool import CLAIMS, GPUS, PODS, claim, played_pool, pod
from tests.support.unit.turn_process import puppet
from tests.support.waiting import until, until_sync

FREE: dict[str, str | None] = {"gpu-0": None}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "turn"
    folder.mkdir()
    return folder


@pytest.fixture
def environment(directory: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": ":".join(sys.path),
        "ROLLOUT_TURN_DIRECTORY": str(directory),
        "ROLLOUT_TURN_HOLDER": "trainer-0",
        "POD_NAME": "trainer-0",
    }


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rollout_client.turn.command", *arguments]


def on_gpu(*cmd: str, options: tuple[str, ...] = ()) -> list[str]:
    return command("run", "--devices", "gpu-0", *options, "--", *cmd)


class Ended:
    """How it ended and what it said."""

    def __init__(self, environment: dict[str, str], words: list[str]) -> None:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr


def test_the_command_runs_while_its_devices_are_locked(
    environment: dict[str, str], directory: Path
) -> None:
    """A turn inside it is refused rather than waited for."""
    script = f"{shlex.join(command('status'))}; {shlex.join(on_gpu('true'))}; echo $?"
    done = Ended(environment, on_gpu("sh", "-c", script))
    assert (done.status, done.out) == (0, "gpu-0\ttrainer-0\n125\n")
    assert "`rollout-turn run` holds gpu-0 for this program" in done.err
    assert Ended(environment, command("status")).out == "gpu-0\tfree\n"


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -9 $$"], 137),
        (["no-such-command"], 127),
        (["/"], 126),
    ],
    ids=str,
)
def test_its_exit_status_is_the_commands(
    environment: dict[str, str], directory: Path, words: list[str], status: int
) -> None:
    assert Ended(environment, on_gpu(*words)).status == status
    assert holders(directory) == FREE


def test_who_has_it_is_named_when_time_is_up(environment: dict[str, str], directory: Path) -> None:
    with puppet(directory, "math-0-0", "gpu-0") as worker:
        worker.ask("take")
        done = Ended(environment, on_gpu("true", options=("--timeout", "0.5")))
    assert done.status == 124
    assert "gpu-0 is held by math-0-0" in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        ("run --devices gpu-0 --directory /nowhere -- true", 125, "mount"),
        ("run -- true", 125, "or name the devices"),
        ("run --devices a,a -- true", 125, "at least one device, and each once"),
        ("run --devices gpu-0", 2, "give the command to run after --"),
        ("run --timeout -1 -- true", 2, "give a number of seconds above 0"),
        ("run --namespace n -- true", 2, "give --pool"),
        ("status --directory /nowhere", 125, "/nowhere"),
        ("", 2, "run|status"),
    ],
)
def test_what_can_not_be_done_is_said(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    status: int,
    why: str,
) -> None:
    for name, value in {**environment, "KUBECONFIG": "/nowhere"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == status
    assert why in capsys.readouterr().err


def test_help_tells_what_a_person_needs() -> None:
    actions = make_parser()._subparsers._group_actions[0]  # type: ignore[union-attr]
    text = actions.choices["run"].format_help()  # type: ignore[index]
    for word in ("rollout-turn run [options] -- CMD", "--pool", "124", "ROLLOUT_TURN_DEVICES"):
        assert word in text


# Signals and death.

TELLS = """
import os, signal, sys
def tell(number, frame):
    os.write(1, signal.Signals(number).name.encode() + b"\\n")  # print may be interrupted in itself
    if number == signal.SIGTERM:
        sys.exit(5)
for each in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, tell)
os.write(1, b"ready\\n")
while True:
    signal.pause()
"""


@pytest.fixture
def running(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """`rollout-turn` with a command that tells of its signals, in a process group of their own."""
    words = on_gpu(sys.executable, "-c", TELLS)
    process = subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        process_group=0,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    if process.poll() is None or holds(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    process.stdout.close()


def holds(group: int) -> bool:
    """Whether a process group has processes."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_signals_are_passed_on(running: subprocess.Popen[str], directory: Path) -> None:
    assert running.stdout is not None
    running.send_signal(signal.SIGUSR1)
    assert running.stdout.readline() == "SIGUSR1\n"
    running.terminate()
    assert running.stdout.readline() == "SIGTERM\n"
    assert running.wait(30) == 5
    assert holders(directory) == FREE


def test_a_command_that_outlives_it_keeps_the_turn(
    running: subprocess.Popen[str], directory: Path
) -> None:
    group = running.pid
    running.kill()
    running.wait(30)
    assert look(group) is None
    assert holders(directory) == {"gpu-0": "trainer-0"}
    os.killpg(group, signal.SIGKILL)
    until_sync(lambda: holders(directory) == FREE, what="the lock falls with the command")


def test_what_the_command_leaves_behind_keeps_the_turn(
    environment: dict[str, str], directory: Path, tmp_path: Path
) -> None:
    """The command itself ends at once; a process of its own may have device memory still."""
    left = tmp_path / "left"
    script = f"sleep 60 & echo $! > {left}"
    done = subprocess.run(
        on_gpu("sh", "-c", script),
        env=environment,
        stdout=subprocess.DEVNULL,
        timeout=60,
        check=True,
    )
    assert done.returncode == 0
    assert holders(directory) == {"gpu-0": "trainer-0"}
    os.kill(int(left.read_text()), signal.SIGKILL)
    until_sync(lambda: holders(directory) == FREE, what="the lock falls with it")


def test_a_signal_ends_the_wait(environment: dict[str, str], directory: Path) -> None:
    with puppet(directory, "math-0-0", "gpu-0") as worker:
        worker.ask("take")
        with subprocess.Popen(
            on_gpu("true"), env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == (
                "rollout-turn: waiting for gpu-0, which math-0-0 has\n"
            )
            process.terminate()
            assert process.wait(30) == 128 + signal.SIGTERM
        worker.ask("give")
    assert holders(directory) == FREE


# With a pool.


async def test_its_pool_sleeps_while_the_command_runs(
    environment: dict[str, str], directory: Path, tmp_path: Path
) -> None:
    async with played_pool(directory) as played:
        played.server.answer(
            "GET", f"{PODS}/trainer-0", pod({"name": "g", "resourceClaimName": "g"})
        )
        played.server.answer("GET", f"{CLAIMS}/g", claim("gpu-9", "gpu-10"))
        environment["KUBECONFIG"] = str(kubeconfig(tmp_path, played.server.url))
        words = command("run", "--pool", "math", "--", *command("status"))
        done = await asyncio.to_thread(Ended, environment, words)
        assert done.status == 0, done.err
        assert done.out.splitlines() == [f"{each}\ttrainer-0" for each in sorted(GPUS)]
        assert played.asked == ["Asleep", "Active"]
        await until(lambda: played.worker.held, what="the worker has its devices again")

        played.deaf = {"Asleep"}
        words = command("run", "--timeout", "1.5", "--pool", "math", "--", "true")
        done = await asyncio.to_thread(Ended, environment, words)
        assert done.status == 124
        assert "not Asleep within" in done.err
        assert played.asked == ["Asleep", "Active"] * 2
