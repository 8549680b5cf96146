"""A trainer that hands its weights to vLLM's own server by vLLM's own code, once for each line that it reads.

    python -m bench.baselines.vllm_transfer BACKEND URL FILE

`BACKEND`: `nccl` or `ipc`, each with vLLM's defaults, see `vllm_on_cpu`. For each line it prints the
seconds from its call until the new weights serve, all of them inside the server's pause, as in vLLM's examples.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import requests
import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.utils.network_utils import get_open_port

from . import vllm_on_cpu  # noqa: F401

SECONDS = 120


class Tensors:
    """A source of vLLM's trainers: the tensors of a file."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


def _source(backend: str, file: str) -> Tensors:
    """Load a file; for `ipc` into memory that another process can map, as it can a GPU's."""
    tensors = load_file(file)
    if backend == "ipc":
        sharing: Any = torch.multiprocessing
        sharing.set_sharing_strategy("file_system")
        tensors = {name: tensor.share_memory_() for name, tensor in tensors.items()}
    return Tensors(tensors)


def _told(backend: str) -> Any:
    if backend == "ipc":
        return IPCTrainerInitInfo(rank=0)
    return NCCLTrainerInitInfo("127.0.0.1", get_open_port(), 2, rank=0)


def main(backend: str, url: str, file: str) -> None:
    torch.set_num_threads(1)
    trainer = WeightTransferTrainerFactory.trainer_init(
        _told(backend),
        client=HTTPVLLMWeightSyncClient(url, SECONDS),
        source=_source(backend, file),
    )
    for _ in sys.stdin:
        began = time.monotonic()
        _post(f"{url}/pause?mode=keep")
        trainer.send_weights()
        _post(f"{url}/resume")
        print(time.monotonic() - began, flush=True)
    trainer.shutdown()


def _post(url: str) -> None:
    requests.post(url, timeout=SECONDS).raise_for_status()


if __name__ == "__main__":
    main(*sys.argv[1:])
