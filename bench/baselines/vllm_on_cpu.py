"""vLLM's own transfers of weights without a GPU: gloo does what NCCL would, shared memory what CUDA's would.

vLLM's worker imports it (`--worker-extension-cls`), and so does the trainer. vLLM's code stays in
charge at both ends: its trainer's and its worker's engine of either backend, its routes, its packing
and its loading. Only what has no meaning without a GPU is another here: who carries the bytes, streams
that are waited for, and the name of a GPU. vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import BroadcastOptions
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import layerwise

PATIENCE = timedelta(seconds=120)


class Group:
    """A group of two that broadcasts as vLLM's communicator of NCCL does."""

    def __init__(self, info: Any, rank: int) -> None:
        self._group = stateless_init_torch_distributed_process_group(
            info.master_address, info.master_port, rank, info.world_size, "gloo", timeout=PATIENCE
        )

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        options = BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self._group.shutdown()


def share(tensor: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
    """Return a handle of a tensor, as `reduce_tensor` does; it must lie in shared memory already, as a GPU's does."""
    manager, handle, size = tensor.untyped_storage()._share_filename_cpu_()
    where = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return None, (manager, handle, size, tensor.dtype, where, None, "the seventh is the GPU's")


def mapped(
    manager: bytes, handle: bytes, size: int, dtype: torch.dtype, where: Any, *_: Any
) -> Any:
    """Return a tensor of another process, as `rebuild_cuda_tensor` does."""
    storage = torch.UntypedStorage._new_shared_filename_cpu(manager, handle, size)
    return torch.empty(0, dtype=dtype).set_(storage, *where)


def _with_heads(finalize: Callable[..., None]) -> Callable[..., None]:
    """Let a reload pack tied output heads again, without which every answer would be wrong on a CPU."""

    def finalized(model: torch.nn.Module, config: Any) -> None:
        finalize(model, config)
        for module in model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    return finalized


def _no_stream(_: object) -> AbstractContextManager[None]:
    return nullcontext()


def _put_in_place() -> None:
    still = SimpleNamespace(synchronize=lambda: None)
    cuda: Any = torch.cuda
    cuda.stream, cuda.current_stream, cuda.ipc_collect = _no_stream, lambda: still, lambda: None
    cuda.get_device_properties = lambda _: SimpleNamespace(uuid="no GPU")
    torch.accelerator.current_device_index = lambda: 0
    packed_tensor._get_streams = lambda _, count: (still,) * count
    nccl_engine.worker_init_process_group = lambda info, _: Group(info, info.rank_offset)
    nccl_engine.open_trainer_endpoint = lambda info: Group(info, 0)
    ipc_engine.reduce_tensor, ipc_engine.rebuild_cuda_tensor = share, mapped
    layerwise.finalize_layerwise_processing = _with_heads(layerwise.finalize_layerwise_processing)


_put_in_place()


class Extension:
    """What vLLM mixes into its worker: nothing. It is there to be imported."""
