"""Worker processes on this machine: their ports, their devices, their start and their end."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from typing_extensions import Unpack

from rollout_client.errors import RolloutError
from rollout_client.pool.asynchronous import PoolOptions
from rollout_client.pool.synchronous import RolloutPool
from rollout_client.steering.control_ports import DirectOptions
from rollout_common.parent_death import PARENT_VARIABLE

from .settings import ANSWER_SECONDS, DRAIN_SECONDS, LOOK_SECONDS, STOP_SECONDS

HOST = "127.0.0.1"
"""Nobody but this machine's users reaches the workers; the control ports ask for a token besides."""

PORT_STEP = 10
"""Between the data ports of two workers; the control port is the next one, the port for weights the one after."""

LOG_LINES = 15
"""How many of its last lines are shown of a worker that has ended."""


class LocalPoolFailed(RolloutError):
    """The workers can't be started, or one has ended; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What to start.

    Attributes:
        engine: `hf`, `vllm` or `sglang`.
        model: Folder of the checkpoint, or a repository on the Hugging Face Hub.
        replicas: How many workers.
        port: Data port of the first worker.
        gpus: How many devices each worker gets; 0: none is chosen for it.
        flags: More flags of `rollout-worker serve`.
    """

    engine: str
    model: str
    replicas: int = 1
    port: int = 8000
    gpus: int = 0
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """One worker process, and the file that it logs to."""

    number: int
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def data_url(self) -> str:
        """Where it generates."""
        return f"http://{HOST}:{self.port}"

    @property
    def control_url(self) -> str:
        """Where it is steered."""
        return f"http://{HOST}:{self.port + 1}"


def visible_devices() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [each.strip() for each in chosen.split(",") if each.strip()]
    found = (each.name.removeprefix("nvidia") for each in Path("/dev").glob("nvidia[0-9]*"))
    return sorted(found, key=int)


class LocalWorkers:
    """Starts workers, waits until they serve, and ends them all with the block; `report` is called with lines for the user.

    The folder must exist; it takes logs, sockets and the token of the control ports.
    """

    def __init__(self, plan: LocalPlan, folder: Path, report: Callable[[str], None]) -> None:
        self._plan, self._folder, self._report = plan, folder, report
        self.token = secrets.token_urlsafe(24)
        """Bearer token of the control ports."""
        self._token_file = folder / "token"
        self.workers: list[LocalWorker] = []
        self._http = httpx.Client(timeout=ANSWER_SECONDS, trust_env=False)
        self._said: dict[int, str] = {}

    def __enter__(self) -> LocalWorkers:
        """Start all workers.

        Raises:
            LocalPoolFailed: The engine is not installed, a port is taken, or there are not enough devices.
        """
        plan = self._plan
        _check_installed(plan.engine)
        devices = visible_devices() if plan.gpus else []
        if plan.gpus * plan.replicas > len(devices):
            raise LocalPoolFailed(
                f"{plan.replicas} replicas of {plan.gpus} GPUs need {plan.replicas * plan.gpus}, and"
                f" {len(devices)} are visible: choose fewer --replicas or --gpus"
            )
        ports = [plan.port + number * PORT_STEP for number in range(plan.replicas)]
        for port in (base + offset for base in ports for offset in range(3)):
            _check_port(port)
        self._token_file.touch(mode=0o600)
        self._token_file.write_text(self.token)
        try:
            for number, port in enumerate(ports):
                mine = devices[number * plan.gpus : (number + 1) * plan.gpus]
                self.workers.append(self._start_worker(number, port, mine))
        except BaseException:
            self.stop_workers()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all workers, and wait until they have ended."""
        self.stop_workers()

    def _start_worker(self, number: int, port: int, devices: Sequence[str]) -> LocalWorker:
        environment = dict(os.environ)
        # The kernel ends a worker with the thread that started it, so it must be one that stays.
        if threading.current_thread() is threading.main_thread():
            environment[PARENT_VARIABLE] = str(os.getpid())
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        else:
            # Threads of several workers that fight for the same processors make each much slower.
            share = max(1, (os.cpu_count() or 1) // self._plan.replicas)
            environment.setdefault("OMP_NUM_THREADS", str(share))
        given: dict[str, object] = {
            "engine": self._plan.engine, "model": self._plan.model, "data-host": HOST, "data-port": port,
            "control-host": HOST, "control-port": port + 1, "weights-port": port + 2,
            "weights-socket": self._folder / f"weights-{number}.sock", "auth": "token",
            "auth-token-file": self._token_file, "log-format": "text",
            "shutdown-grace": 0, "drain-seconds": DRAIN_SECONDS,
        }  # fmt: skip
        flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        log = self._folder / f"worker-{number}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "rollout_worker", "serve", *flags, *self._plan.flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a Ctrl-C is for this process, which ends them
            )
        return LocalWorker(number, port, process, log)

    def wait_until_ready(self) -> None:
        """Wait until all workers serve, and report what each one does until then.

        Raises:
            LocalPoolFailed: One has ended, or its engine did not start.
        """
        left = list(self.workers)
        while left:
            self.check_alive()
            left = [each for each in left if not self._is_ready(each)]
            time.sleep(LOOK_SECONDS if left else 0)

    def connect(self, **options: Unpack[PoolOptions]) -> RolloutPool:
        """Return a pool of these workers, which steers them, too; close it before they end. For options see `PoolOptions`."""
        return RolloutPool.from_urls(
            [each.data_url for each in self.workers],
            control_urls=[each.control_url for each in self.workers],
            direct=DirectOptions(token=self.token),
            **options,
        )

    def watch_workers(self) -> None:
        """Return never; raise LocalPoolFailed once a worker has ended."""
        while True:
            self.check_alive()
            time.sleep(LOOK_SECONDS)

    def check_alive(self) -> None:
        """Raise LocalPoolFailed if a worker has ended; the message has the end of its log."""
        for each in self.workers:
            if (code := each.process.poll()) is not None:
                last = each.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                shown = "".join(f"\n    {line}" for line in last)
                raise LocalPoolFailed(f"worker {each.number} has ended with status {code}:{shown}")

    def _is_ready(self, worker: LocalWorker) -> bool:
        try:
            answer = self._http.get(f"{worker.data_url}/ready")
            if answer.status_code == httpx.codes.OK:
                self._report_change(worker, "serves")
                return True
            self._report_change(worker, str(answer.json()["detail"]).partition(";")[0])
            self._check_engine(worker)
        except (httpx.HTTPError, ValueError, LookupError):
            self._report_change(worker, "starts")
        return False

    def _check_engine(self, worker: LocalWorker) -> None:
        """Raise LocalPoolFailed if the engine did not start: it is tried again, but nobody has mended anything."""
        said = {"Authorization": f"Bearer {self.token}"}
        state = self._http.get(f"{worker.control_url}/v1/state", headers=said).json()
        if state["last_error"]:
            raise LocalPoolFailed(f"the engine of worker {worker.number}: {state['last_error']}")

    def _report_change(self, worker: LocalWorker, what: str) -> None:
        if self._said.get(worker.number) != what:
            self._said[worker.number] = what
            self._report(f"worker {worker.number}: {what}")

    def stop_workers(self) -> None:
        """End all workers; those that don't end in time are killed, with all processes of their engines."""
        for each in self.workers:
            each.process.terminate()
        until = time.monotonic() + STOP_SECONDS
        for each in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, until - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()
        self._http.close()


def _check_installed(engine: str) -> None:
    """Raise LocalPoolFailed unless this environment, which may only have the client, has what a worker imports."""
    modules = ("fastapi", "transformers" if engine == "hf" else engine)
    if any(importlib.util.find_spec(each) is None for each in modules):
        raise LocalPoolFailed(
            f"the engine {engine} is not installed in {sys.prefix}: run pip install '.[{engine}]' in a checkout of Rollout"
        )


def _check_port(port: int) -> None:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise LocalPoolFailed(
                f"port {port} can't be used ({error}): choose another --port"
            ) from error
