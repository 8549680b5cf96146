"""Receivers of pushed weights in processes of their own, each with the same limit on what it sends."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from rollout_client.steering.pushing.pusher import Pusher
from rollout_client.steering.pushing.routes import Receiver
from rollout_worker.schemas import Transfer

HOP = Path(__file__).with_name("hop.py")
DEADLINE_SECONDS = 300.0


class Hops:
    """Receivers that wait for one version after another.

    Args:
        processes: One for each.
        rate: Bytes a second that each of them, and the trainer, sends at most; None: as many as go.
    """

    def __init__(self, processes: list[subprocess.Popen[str]], rate: int | None) -> None:
        self._processes, self._rate = processes, rate
        self._pusher = Pusher()

    def push(self, tensors: Mapping[str, torch.Tensor], count: int) -> float:
        """Return the seconds from the call until the first `count` of them have verified every byte."""
        chosen = self._processes[:count]
        receivers = [
            Receiver(f"hop-{index:02}", "127.0.0.1", Transfer.model_validate(_told(each, "take")))
            for index, each in enumerate(chosen)
        ]
        began = time.monotonic()
        push = self._pusher.begin(tensors, "tcp", self._rate)
        filling = threading.Thread(target=push.fill_here)
        filling.start()
        while not push.filling.wait_planned(1.0):
            pass
        push.start(receivers, lambda: None)
        ended = max(_settled(push, each.name, began) for each in receivers)
        filling.join()
        for each in chosen:
            _line(each)
        push.close()
        return ended - began

    def join(self, members: int, *, shared: bool = False) -> tuple[float, float]:
        """Let the last of them fetch and verify what the first so many have; returns seconds, and those of its CPU.

        `shared`: to memory that other processes can map.
        """
        told = self._fetched("share" if shared else "join", members)
        return float(told["seconds"]), float(told["cpu"])

    def copy(self) -> float:
        """Return the seconds in which the bytes of the first one came to the last one, of which nothing is hashed."""
        return float(self._fetched("copy", 1)["seconds"])

    def _fetched(self, way: str, members: int) -> Any:
        *others, joiner = self._processes
        return _told(joiner, way, peers=[_told(each, "offer") for each in others[:members]])

    def close(self) -> None:
        """Let go of the memory."""
        self._pusher.close()


def _settled(push: Any, name: str, began: float) -> float:
    while (of := push.board.of(name)).settled_at is None:
        if time.monotonic() - began > DEADLINE_SECONDS:
            raise TimeoutError(f"{name} has {of.bytes_done} bytes after {DEADLINE_SECONDS:g} s")
        time.sleep(0.005)
    if of.root_hash is None:
        raise RuntimeError(f"{name}: {of.why}")
    return float(of.settled_at)


@contextmanager
def hops(count: int, rate: int | None = None) -> Iterator[Hops]:
    """Start so many receivers, each with this limit."""
    with ExitStack() as stack:
        command = [sys.executable, str(HOP), "none" if rate is None else str(rate)]
        processes = []
        for _ in range(count):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(_end, process)
            processes.append(process)
        made = Hops(processes, rate)
        stack.callback(made.close)
        yield made


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=10)


def _told(process: subprocess.Popen[str], order: str, **words: Any) -> Any:
    """Give an order; returns the first answer."""
    assert process.stdin is not None
    process.stdin.write(json.dumps({"do": order, **words}) + "\n")
    process.stdin.flush()
    return _line(process)


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{HOP.name} has ended")
    return json.loads(line)
