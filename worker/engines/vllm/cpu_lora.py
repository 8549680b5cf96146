"""Mends vLLM's LoRA on CPUs, in its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def mend_lora_operations() -> None:
    """Let rows without an adapter get none.

    vLLM's operations for CPUs (0.32) index the adapters' slots by -1 for a row without one, which is the last slot: its
    output was another request's adapter's as soon as that slot was in use.
    """
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in ("bgmv_expand", "bgmv_expand_slice"):
        mended = _without_bare_rows(getattr(lora_ops, name))
        for module in (lora_ops, torch_ops, punica_cpu):
            setattr(module, name, mended)


def _without_bare_rows(expand: Callable[..., None]) -> Callable[..., None]:
    def expand_rows(
        inputs: Tensor, weights: Tensor, output: Tensor, indices: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        bare = (indices < 0).unsqueeze(1)
        expand(
            inputs.masked_fill(bare[: len(inputs)], 0), weights, output, indices, *args, **kwargs
        )

    return expand_rows
