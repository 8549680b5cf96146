"""A trainer and a worker of one machine: the tensors that one has, and the pool through which it publishes."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from rollout_client import DirectOptions, Published, RolloutPool
from rollout_client.steering.pushing.routes import Transport
from tests.support.engine.engine_kinds import KINDS, EngineKind
from tests.support.engine.lora_adapters import config_of

from .worker import Observed

CHUNK = 1 << 20


class Trainer:
    """Publishes the same tensors again and again, each time as a version of its own."""

    def __init__(
        self, pool: RolloutPool, worker: Observed, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self._pool, self._worker = pool, worker
        self._tensors = tensors
        self._versions = itertools.count(1)

    def push(self, transport: Transport) -> Published:
        """Publish from memory without a base: with one, unchanged tensors would send nothing."""
        return self._pool.publish_weights(
            next(self._versions), tensors=self._tensors, transport=transport, base=None
        )

    def drop_weights(self) -> Published:
        """Publish the model's own weights, to which alone adapters belong."""
        return self._pool.publish_weights(next(self._versions), path=None)

    def push_adapter(self, tensors: Mapping[str, torch.Tensor], rank: int) -> Published:
        adapter = (config_of(rank), tensors)
        return self._pool.publish_weights(next(self._versions), adapters={"policy": adapter})

    def save(self, folder: Path) -> Published:
        return self._pool.save_and_publish(self._tensors, next(self._versions), folder)

    def answer(self, body: Mapping[str, object]) -> list[int]:
        answer = self._worker.data.post("/v1/generate", json=body)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["outputs"][0]["token_ids"]
        return tokens

    def stage(self, folder: Path) -> float:
        return self._worker.stage_seconds(next(self._versions), folder)


@contextmanager
def trainer(
    model: Path,
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    kind: EngineKind = KINDS["hf"],
    more: Sequence[str] = (),
) -> Iterator[Trainer]:
    """Start a worker on a model and a pool of it; both exchange files in `folder`."""
    flags = ["--weights-port", "0", "--weights-socket", str(folder / "weights.sock")]
    flags += ["--dtype", "bfloat16", "--weights-roots", str(folder), *more]
    with ExitStack() as stack:
        worker = Observed(kind, model, folder / "worker.log", flags)
        stack.callback(worker.finish)
        data, control = (str(each.base_url).rstrip("/") for each in (worker.data, worker.control))
        pool = RolloutPool.from_urls([data], control_urls=[control], direct=DirectOptions())
        stack.enter_context(pool)
        yield Trainer(pool, worker, tensors)


def copied(tensors: Mapping[str, torch.Tensor]) -> Callable[[], float]:
    """Return a function that copies all tensors into others of this process and returns the seconds."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def copy() -> float:
        began = time.monotonic()
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
        return time.monotonic() - began

    return copy


def loaded(tensors: Mapping[str, torch.Tensor]) -> Callable[[Path], float]:
    """Return a function that loads a folder's files, copies them into tensors, and returns the seconds."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def load(folder: Path) -> float:
        began = time.monotonic()
        for file in folder.glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                targets[name].copy_(tensor)
        return time.monotonic() - began

    return load


def newest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda each: each.stat().st_mtime)


def over_loopback(nbytes: int) -> float:
    """Return the seconds that this many bytes take from one thread to another by plain TCP."""
    source, target = memoryview(bytearray(nbytes)), bytearray(nbytes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname()[1], source))
        sender.start()
        connection, _ = server.accept()
        with connection, memoryview(target) as view:
            began, done = time.monotonic(), 0
            while done < nbytes:
                count = connection.recv_into(view[done : done + CHUNK])
                if not count:
                    raise ConnectionError(f"{done} of {nbytes} bytes came")
                done += count
            took = time.monotonic() - began
        sender.join(60)
    return took


def _send(port: int, source: memoryview) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for begin in range(0, len(source), CHUNK):
            connection.sendall(source[begin : begin + CHUNK])
