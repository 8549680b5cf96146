"""Real workers for tests: in a thread of this process, or as the command that users start.

Both serve a tiny model on free loopback ports; tests talk HTTP to them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx

from rollout_worker.observe.processes import find_descendants, kill_processes
from rollout_worker.ports.server import HttpServers, make_authorizer
from rollout_worker.service import WorkerService
from rollout_worker.settings import add_flags, parse_settings
from tests.support.waiting import eventually, until_sync

T = TypeVar("T")

PROMPT = [5, 6, 7, 8, 9, 100, 200, 300]
LOOPBACK = ["--data-host", "127.0.0.1", "--control-host", "127.0.0.1"]
SERVE = ["-m", "rollout_worker", "serve"]
COMMAND = [sys.executable, *SERVE]
FREE_PORTS = ["--data-port", "0", "--control-port", "0"]
START_SECONDS = 120.0
TLS = httpx.create_ssl_context()
"""Unused by plain HTTP; each client would load its own, which takes longer than most requests."""


class Client:
    """Both ports of a worker, with the calls that tests make most."""

    def __init__(self, data_port: int, control_port: int, token: str | None = None) -> None:
        self._threads = ThreadPoolExecutor(80)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.data = httpx.Client(
            base_url=f"http://127.0.0.1:{data_port}", timeout=60, verify=TLS, trust_env=False
        )
        self.control = httpx.Client(
            base_url=f"http://127.0.0.1:{control_port}",
            timeout=60,
            headers=headers,
            verify=TLS,
            trust_env=False,
        )

    @property
    def url(self) -> str:
        """Of the data port."""
        return str(self.data.base_url).rstrip("/")

    @property
    def control_url(self) -> str:
        """Of the control port."""
        return str(self.control.base_url).rstrip("/")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.data.close()
        self.control.close()

    def post(self, verb: str, **body: Any) -> httpx.Response:
        """A verb of the control port."""
        return self.control.post(f"/v1/{verb}", json=body)

    def generate(self, **fields: Any) -> httpx.Response:
        return self.data.post("/v1/generate", json={"token_ids": PROMPT, **fields})

    def sample(self, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
        """The one greedy output, which must come."""
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = self.generate(sampling=sampling, **fields)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["outputs"][0])

    def state(self) -> dict[str, Any]:
        answer = self.control.get("/v1/state")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def ready(self) -> bool:
        return self.data.get("/ready").status_code == 200

    def call_verb(self, verb: str, **body: Any) -> dict[str, Any]:
        """A verb of the control port, which must do it."""
        answer = self.post(verb, **body)
        assert answer.status_code == 200, (verb, body, answer.text)
        return dict(answer.json())

    def wait_active(self, seconds: float = 20) -> None:
        """Wait until it serves; fail at once if it can't."""
        up = ("Active", "Failed")
        until_sync(lambda: self.state()["lifecycle"] in up, seconds, what="the worker to serve")
        assert self.state()["lifecycle"] == "Active", self.state()["last_error"]

    def stage(
        self, epoch: int, version: int, path: Path | str, *, seconds: float = 30, **fields: Any
    ) -> dict[str, Any]:
        """Stage and wait until it is staged or failed; returns the slot."""
        body = {"epoch": epoch, "version": version, "source": {"path": str(path)}, **fields}
        answer = self.post("weights/stage", **body)
        assert answer.status_code == 202, answer.text
        slot: dict[str, Any] = answer.json()

        def finished() -> bool:
            nonlocal slot
            slot = self.data.get("/v1/weights").json()["staged"] or slot
            return bool(slot["phase"] != "Staging")

        eventually("the stage to end", finished, seconds, 0.02)
        return slot

    def commit(self, epoch: int, version: int, **fields: Any) -> dict[str, Any]:
        return self.call_verb("weights/commit", epoch=epoch, version=version, **fields)

    def update(self, epoch: int, version: int, path: Path | str, **fields: Any) -> dict[str, Any]:
        slot = self.stage(epoch, version, path)
        assert slot["phase"] == "Staged", slot
        return self.commit(epoch, version, **fields)

    def long(self, request_id: str = "long", **fields: Any) -> Future[httpx.Response]:
        """Begin a request that takes seconds; returns once the worker works on it."""
        sampling = {"max_tokens": 1800, "ignore_eos": True, "temperature": 0}
        body = {"request_id": request_id, "sampling": sampling, **fields}
        before = self.state()["in_flight"]
        answer = self.in_background(lambda: self.generate(**body))
        until_sync(
            lambda: answer.done() or self.state()["in_flight"] > before, what="the request to run"
        )
        return answer

    def in_background(self, function: Callable[[], T]) -> Future[T]:
        """Run a call that waits."""
        return self._threads.submit(function)

    def stream(self, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
        body = {"token_ids": PROMPT, "stream": True, **fields}
        with self.data.stream("POST", "/v1/generate", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            return list(events(answer.iter_lines()))


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parse server-sent events."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def slug(answer: httpx.Response) -> str:
    """Check that an answer is a proper problem and return its kind."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    body = answer.json()
    assert body["status"] == answer.status_code
    assert body["title"]
    assert body["detail"]
    return str(body["type"]).removeprefix("urn:rollout:problem:")


class InProcess(Client):
    """A worker in a thread of its own, with its own loop and real sockets."""

    def __init__(self, model: Path, flags: Sequence[str], token: str | None) -> None:
        parser = argparse.ArgumentParser()
        add_flags(parser)
        auth = [] if "--auth" in flags else ["--auth", "none"]
        arguments = ["--model", str(model), *LOOPBACK, *FREE_PORTS, *auth, *flags]
        self._settings = parse_settings(parser.parse_args(arguments), {})
        self._started = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        assert self._started.wait(START_SECONDS)
        if self._failed is not None:
            raise self._failed
        data_port, control_port = self.servers.bound_ports
        super().__init__(data_port, control_port, token)

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self._failed = error
            raise
        finally:
            self._started.set()

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.worker = WorkerService(self._settings)
        self.servers = HttpServers(self.worker, make_authorizer(self._settings))
        running = asyncio.create_task(self.worker.run_until_cancelled())
        self._started.set()
        try:
            await self.servers.serve_both_ports()
        finally:
            running.cancel()
            await asyncio.wait({running}, timeout=10)
            await self.worker.supervisor.end_engine()

    def call(self, function: Callable[[], T], seconds: float = 10) -> T:
        """Run a function in the worker's loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(seconds)

    def crash(self, reason: str = "the test ended it") -> None:
        """Let the engine count as dead."""
        self.call(lambda: self.worker.runtime.report_crash(reason))

    def stop(self) -> None:
        self.call(self.servers.stop)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the worker did not stop"
        self.close()


def ports_of(workers: Sequence[Client]) -> dict[str, Any]:
    """The ports of some workers, as arguments of `from_urls`."""
    return {"urls": [w.url for w in workers], "control_urls": [w.control_url for w in workers]}


@contextlib.contextmanager
def in_process(
    model: Path, *flags: str, token: str | None = None, wait: bool = True
) -> Iterator[InProcess]:
    """A worker in this process; waits until its engine has loaded."""
    worker = InProcess(model, flags, token)
    try:
        if wait:
            loaded = worker.worker.runtime.lifecycle
            until_sync(lambda: loaded.has_engine, START_SECONDS, what="the engine")
        yield worker
    finally:
        worker.stop()


@contextlib.contextmanager
def several_in_process(
    model: Path, *flags: str, own: Iterable[Sequence[str]] = ((), ()), token: str | None = None
) -> Iterator[list[InProcess]]:
    """Workers in this process: as many as `own` has flags of their own, two else."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(in_process(model, *flags, *each, token=token)) for each in own]


def logged_lines(log: Path) -> list[dict[str, Any]]:
    """What a worker has logged so far; a line that is being written is left out."""
    complete = log.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines() if line.startswith("{")]


class Command(Client):
    """`rollout-worker serve` as a process."""

    def __init__(
        self,
        model: Path,
        log: Path,
        flags: Sequence[str],
        env: Mapping[str, str] | None,
        *,
        python: Path = Path(sys.executable),
        token: str | None = None,
        serve: Sequence[str] = SERVE,
    ) -> None:
        auth = [] if "--auth" in flags else ["--auth", "none"]
        self._log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [python, *serve, "--model", str(model), *LOOPBACK, *FREE_PORTS, *auth, *flags],
                stderr=stderr,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )
        until_sync(lambda: self._line("serving"), START_SECONDS, what="the ports")
        line = self._line("serving")
        assert line is not None
        super().__init__(line["data_port"], line["control_port"], token)

    def _line(self, message: str) -> dict[str, Any] | None:
        if self.process.poll() is not None:
            raise AssertionError(f"ended with {self.process.returncode}: {self._log.read_text()}")
        return next((line for line in self.logged() if line["message"] == message), None)

    def logged(self) -> list[dict[str, Any]]:
        return logged_lines(self._log)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end_all(self, grace_seconds: float = 0.0) -> None:
        """End it and all its processes; by force those that are left after so many seconds."""
        family = find_descendants(self.process.pid)
        if grace_seconds and self.process.poll() is None:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_seconds)
        self.process.kill()
        self.process.wait(60)
        kill_processes(family, 10)
        if hasattr(self, "data"):  # its ports came up
            self.close()


@contextlib.contextmanager
def command(
    model: Path, folder: Path, *flags: str, env: dict[str, str] | None = None, wait: bool = True
) -> Iterator[Command]:
    """A worker as a process; its log goes to `folder`."""
    worker = Command(model, folder / "worker.log", flags, env)
    try:
        if wait:
            worker.wait_active(START_SECONDS)
        yield worker
    finally:
        worker.close()
        worker.process.kill()
        worker.process.wait(30)
