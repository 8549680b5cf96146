"""Dtypes of safetensors as those of torch, for whatever makes tensors of bytes."""

from __future__ import annotations

import torch

from rollout_worker.transfer.layout import TORCH_NAMES

TORCH_DTYPES: dict[str, torch.dtype] = {
    dtype: getattr(torch, name) for dtype, name in TORCH_NAMES.items() if hasattr(torch, name)
}
