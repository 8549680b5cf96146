"""`rollout-worker serve` as users start it: start, SIGTERM, SIGKILL, taken ports, tokens, logs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.engine.engine_kinds import ROOT
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import COMMAND, LOOPBACK, Command, command, in_process, slug
from tests.support.processes import Process, descendants
from tests.support.waiting import until_sync

SOURCES = ROOT / "src"


def test_a_whole_life(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Probes answer while torch is imported, logs say what changed, running requests may end.

    It begins in the place of one that was killed, which leaves nothing behind.
    """
    with command(tiny_models.model(1), tmp_path, wait=False) as killed:
        boot, port = killed.state()["boot_id"], str(killed.data.base_url.port)
    flags = ("--log-level", "debug", "--shutdown-grace", "0", "--data-port", port)
    env = {"ROLLOUT_SERVED_NAME": "t"}
    with command(tiny_models.model(1), tmp_path, *flags, env=env, wait=False) as worker:
        assert worker.state()["boot_id"] != boot
        assert _slowest_probe_until_active(worker) < 5
        assert worker.data.get("/v1/info").json()["model"] == "t"
        worker.generate(token_ids=[4001, 4002, 4003], sampling={"max_tokens": 3})
        worker.generate(token_ids=[-4001])
        running = worker.long(sampling={"max_tokens": 150, "ignore_eos": True})
        streamed = worker.in_background(
            lambda: worker.stream(sampling={"max_tokens": 100, "ignore_eos": True})
        )
        until_sync(lambda: worker.state()["in_flight"] == 2, what="the stream to run")
        worker.terminate()
        assert running.result(30).json()["outputs"][0]["stop_reason"] == "length"
        assert streamed.result(30)[-1][0] == "done"
        assert worker.process.wait(30) == 0
        lines = worker.logged()
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert not any(token in line["message"] for line in lines for token in ("4001", "4002"))
    assert [line["message"] for line in lines if "lifecycle" in line["message"]] == [
        "lifecycle Starting -> Loading",
        "lifecycle Loading -> Active",
        "lifecycle Active -> Draining",
    ]


def _slowest_probe_until_active(worker: Command) -> float:
    """A liveness probe must not lose patience with a worker that imports torch."""
    slowest = 0.0
    while worker.state()["lifecycle"] != "Active":
        start = time.monotonic()
        assert worker.data.get("/health").status_code == 200
        slowest = max(slowest, time.monotonic() - start)
        time.sleep(0.05)
    return slowest


def test_sigterm_while_loading_exits_0_and_waits_for_no_import(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    with command(tiny_models.model(1), tmp_path, "--shutdown-grace", "0", wait=False) as worker:
        assert worker.state()["lifecycle"] in ("Starting", "Loading")
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.wait(5) == 0


@pytest.fixture
def init(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[bytes], Process]]]:
    """Start workers as PID 1, which a container makes them; a name is a module that imports for ever.

    Returns what waits for the worker and ends as it does, and the worker's own process.
    """
    alone = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*alone, "true"], capture_output=True, timeout=10).returncode:
        pytest.skip("no right to make a PID namespace: run as root")
    started = []

    def start(slow: str) -> tuple[subprocess.Popen[bytes], Process]:
        reached = tmp_path / "reached"
        text = f"import pathlib, time; pathlib.Path({str(reached)!r}).touch(); time.sleep(60)"
        (tmp_path / f"{slow}.py").write_text(text)
        env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCES}"}
        words = [*alone, *COMMAND, "--model", str(tmp_path), "--auth", "none", *LOOPBACK]
        started.append(subprocess.Popen(words, env=env))
        until_sync(reached.exists, 30, what=f"the import of {slow}")
        [worker] = descendants(started[-1].pid)
        return started[-1], worker

    yield start
    for process in started:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
@pytest.mark.parametrize("module", ["argparse", "pydantic", "uvicorn"])
def test_a_signal_during_the_imports_ends_pid_1(
    init: Callable[[str], tuple[subprocess.Popen[bytes], Process]],
    module: str,
    number: signal.Signals,
) -> None:
    """The kernel drops what PID 1 has no handler for: the kubelet would wait out the grace period."""
    ended, worker = init(module)
    os.kill(worker.pid, number)
    assert ended.wait(2) == 0


def _ended(tiny_models: TinyModels, *flags: str) -> str:
    """What a worker says that can't start."""
    words = [*COMMAND, "--model", str(tiny_models.model(1)), "--auth", "none", *flags]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("\n") == 1
    return ended.stderr


def test_a_taken_port_is_one_sentence(tiny_models: TinyModels) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = _ended(tiny_models, *LOOPBACK, "--data-port", port)
    assert said.startswith(f"rollout-worker: --data-port 127.0.0.1:{port} can't be used")
    everywhere = ("--data-host", "0.0.0.0", "--control-host", "127.0.0.1")
    said = _ended(tiny_models, *everywhere, "--data-port", port, "--control-port", port)
    assert said.startswith(f"rollout-worker: --control-port 127.0.0.1:{port} can't be used")


def test_the_control_port_asks_for_the_token(tiny_models: TinyModels, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    flags = ("--auth", "token", "--auth-token-file", str(file))
    with in_process(tiny_models.model(1), *flags, token="s3cret") as worker:
        assert worker.state()["caller"] == "token"
        assert worker.post("pause").json()["holds"][0]["holder"] == "token"
        routes = [
            ("GET", "/v1/state"),
            *(("POST", f"/v1/{v}") for v in ("pause", "resume", "sleep", "wake", "abort")),
            *(("POST", f"/v1/weights/{v}") for v in ("stage", "commit", "discard")),
            ("POST", "/v1/require"),
            ("POST", "/v1/cache/reset"),
            ("GET", "/openapi.json"),
            ("GET", "/v1/nothing"),
        ]
        with httpx.Client(base_url=worker.control.base_url, trust_env=False) as stranger:
            for method, path in routes:
                for headers in ({}, {"Authorization": "Bearer wrong"}):
                    # Before anything of the request is looked at, were it nonsense.
                    answer = stranger.request(method, path, content=b"{", headers=headers)
                    assert (answer.status_code, slug(answer)) == (401, "unauthenticated"), path
                    assert answer.headers["www-authenticate"] == "Bearer"
        assert worker.state()["lifecycle"] == "Paused"
        assert worker.data.get("/v1/info").status_code == 200, "the data port needs none"
