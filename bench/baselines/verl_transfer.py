"""verl's own transfer of weights between two processes of one machine, by its shared memory.

Runs in `verl_environment`: the sender packs tensors into a bucket, the receiver copies each into a
parameter of its own before it lets the sender go on. Prints the seconds of each round. Without a GPU,
what verl asks of one beside the transfer (to synchronize, to free its cache) does nothing.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

BUCKET_MB = 512
"""verl's default (`update_weights_bucket_megabytes`)."""


def _transfer() -> ModuleType:
    """Return verl's module alone: its package wants vLLM."""
    import verl

    file = Path(verl.__path__[0]) / "workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
    spec = importlib.util.spec_from_file_location("bucketed_weight_transfer", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _prepare() -> None:
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        for name in ("synchronize", "ipc_collect", "empty_cache"):
            setattr(torch.cuda, name, lambda: None)


def _receive(handle: str, model: str, rounds: int, ready: Any) -> None:
    _prepare()
    transfer = _transfer()
    parameters = {name: torch.empty_like(t).zero_() for name, t in load_file(model).items()}

    def load(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        for name, tensor in weights:
            parameters[name].copy_(tensor)

    ready.set()
    for _ in range(rounds):
        receiver = transfer.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
        receiver.receive_weights(on_bucket_received=load)


def main(model: str, handle: str, rounds: int) -> None:
    """Send as often as asked."""
    _prepare()
    transfer = _transfer()
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    receiver = context.Process(target=_receive, args=(handle, model, rounds, ready), daemon=True)
    receiver.start()
    tensors = {name: tensor.clone() for name, tensor in load_file(model).items()}
    if not ready.wait(120):
        raise SystemExit("verl's receiver did not start")

    async def weights() -> Any:  # as verl's engines hand them over
        for item in _each(tensors):
            yield item

    seconds = []
    for _ in range(rounds):
        began = time.monotonic()
        sender = transfer.BucketedWeightSender(handle, BUCKET_MB, use_shm=True)
        asyncio.run(sender.async_send_weights(weights()))
        seconds.append(time.monotonic() - began)
    receiver.join(30)
    print(json.dumps(seconds))


def _each(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors.items()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
