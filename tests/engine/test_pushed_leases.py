"""A trainer or a worker that stands still for longer than a lease: no answer has other bytes than its label says."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from localkube.settings import free_ports
from tests.support.engine.push_rig import CLOSE, Nursery
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import LOOPBACK, PROMPT
from tests.support.waiting import eventually

LEASE = 1.5
STANDS = 2.2
"""How long somebody stands still."""


class Lab:
    """A trainer, two workers that serve from its memory, and their processes."""

    def __init__(self, folder: Path, models: TinyModels) -> None:
        self._folders = [models.weights(2), models.weights(3)]
        self._judges = [Reference(each) for each in self._folders]
        self._folder, self.nursery = folder, Nursery(folder / "nursery.out")
        self.ports: dict[str, int] = {}
        self.pids: dict[str, int] = {}
        control = []
        for name in "ab":
            self.ports[name], its = free_ports(2)
            control.append(its)
            flags = [
                "--model", str(models.model(1)), "--auth", "none", *LOOPBACK,
                "--data-port", str(self.ports[name]), "--control-port", str(its),
                "--weights-socket", str(folder / f"{name}.sock"),
            ]  # fmt: skip
            self.pids[name] = self.nursery.start("worker", flags, folder / f"{name}.out", LEASE)
        eventually("the workers", lambda: all(map(self.serves, "ab")), 90)
        self._urls = [
            ",".join(f"http://127.0.0.1:{n}" for n in p) for p in (self.ports.values(), control)
        ]
        self.contents: dict[int, int] = {}

    def serves(self, name: str) -> bool:
        with suppress(httpx.TransportError):
            url = f"http://127.0.0.1:{self.ports[name]}/ready"
            return httpx.get(url, timeout=2, trust_env=False).status_code == 200
        return False

    @contextmanager
    def trainer(self) -> Iterator[Trainer]:
        with socket.socket(socket.AF_UNIX) as listening:
            path = self._folder / "orders"
            path.unlink(missing_ok=True)
            listening.bind(str(path))
            listening.listen()
            listening.settimeout(60)
            arguments = [str(path), *self._urls, *map(str, self._folders)]
            self.pids["trainer"] = self.nursery.start(
                "trainer", arguments, self._folder / "trainer.out", LEASE
            )
            orders, _ = listening.accept()
        orders.settimeout(90)
        self.contents.clear()
        with orders, orders.makefile("rw") as lines:
            json.loads(lines.readline())
            yield Trainer(self, lines)

    def stand_still(self, name: str) -> None:
        os.kill(self.pids[name], signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        os.kill(self.pids[name], signal.SIGCONT)

    def wrong(self, name: str) -> str | None:
        """Ask a worker; what is wrong with the answer, judged by the content that its label has."""
        body = {
            "token_ids": PROMPT, "logprobs": "raw",
            "sampling": {"max_tokens": 4, "ignore_eos": True, "temperature": 0},
        }  # fmt: skip
        url = f"http://127.0.0.1:{self.ports[name]}/v1/generate"
        answer = httpx.post(url, json=body, timeout=90, trust_env=False)
        if answer.status_code != 200:
            return None  # fenced, say: it serves nothing
        (output,) = answer.json()["outputs"]
        (span, *others) = output["weights"]
        if others:
            return None  # over a commit; each side is asked alone, too
        judge = self._judges[self.contents[span["version"]]]
        told = judge.raw_logprobs(PROMPT, output["token_ids"])
        far = max(abs(a - b) for a, b in zip(output["logprobs"], told, strict=True))
        return f"version {span['version']} is off by {far:.3g}" if far > CLOSE else None


class Trainer:
    """The trainer's process, which does what it is told."""

    def __init__(self, lab: Lab, lines: Any) -> None:
        self._lab, self._lines = lab, lines

    def order(self, version: int, folder: int, **how: Any) -> None:
        self._lab.contents[version] = folder
        order = {"version": version, "folder": folder, "transport": "shm", **how}
        self._lines.write(json.dumps(order) + "\n")
        self._lines.flush()

    def said(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._lines.readline())
        return found

    def publish(self, version: int, folder: int) -> None:
        self.order(version, folder)
        assert "seconds" in (said := self.said()), said

    def while_it_publishes(self, *names: str) -> tuple[dict[str, Any], list[str | None]]:
        """Ask workers until it has said how that went, and once more; returns that, and their faults."""
        said: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: said.append(self.said()))
        thread.start()
        faults = []
        while True:
            over = not thread.is_alive()
            faults += [self._lab.wrong(name) for name in names]
            if over:
                return said[0], faults


@pytest.fixture(scope="module")
def lab(tiny_models: TinyModels) -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(prefix="lease-") as folder:
        lab = Lab(Path(folder), tiny_models)
        yield lab
        lab.nursery.close()


def test_a_trainer_that_stood_still_fails_halfway_through_the_next_version(lab: Lab) -> None:
    with lab.trainer() as trainer:
        trainer.publish(1, 0)
        lab.stand_still("trainer")
        time.sleep(STANDS)
        lab.go_on("trainer")
        time.sleep(LEASE)
        trainer.order(2, 1, slow=1.0, breaks=True)
        said, faults = trainer.while_it_publishes("a", "b")
        assert "own error" in said["failed"]
        assert not any(faults), faults


def test_a_call_in_c_keeps_the_interpreter_for_longer_than_a_lease(lab: Lab) -> None:
    with lab.trainer() as trainer:
        trainer.publish(1, 0)
        trainer.order(2, 1, hold=STANDS, slow=2.0)
        said, faults = trainer.while_it_publishes("a", "b")
        assert said.get("replicas") == 2, said
        assert not any(faults), faults
        trainer.publish(3, 0)
        assert lab.wrong("a") is lab.wrong("b") is None


@pytest.mark.soak  # it waits for calls of the one that stands; without processes: test_client_leases.py
def test_a_worker_that_stood_still_serves_what_it_had(lab: Lab) -> None:
    with lab.trainer() as trainer, ThreadPoolExecutor() as asked:
        trainer.publish(1, 0)
        lab.stand_still("b")
        # Asked now, they are answered as soon as it goes on: before anybody can fence it.
        asking = [asked.submit(lab.wrong, "b") for _ in range(4)]
        try:
            time.sleep(STANDS)
            for version in (2, 3):  # each into another slot
                trainer.publish(version, 1)
                assert lab.wrong("a") is None
        finally:
            lab.go_on("b")
        faults = [each.result(60) for each in asking] + [lab.wrong("b")]
        assert not any(faults), faults
