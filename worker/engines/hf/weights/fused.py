"""Tensors that transformers makes of several tensors of a checkpoint, such as the experts of a layer.

To find where each of the checkpoint's tensors is in such a fused one, the elements of the fused one are numbered
and split by the code of `save_pretrained`: the numbers in a part say where it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout_common.transfer.layout import layer_of


@dataclass(frozen=True, slots=True)
class FusedPart:
    """Where a tensor of the checkpoint is in `home`, a tensor of the model that has the shape `whole`.

    `shape`: of the checkpoint's tensor; `strides` and `offset`: of its elements in the home, in elements.
    """

    home: Tensor
    whole: torch.Size
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


def find_fused_parts(
    model: Any, held: Mapping[str, Tensor], names: Collection[str]
) -> dict[str, FusedPart]:
    """Return, by the checkpoint's names, what these tensors of a model are made of; empty if that is unknown.

    `held`: the model's tensors by its own names; `names`: those that its checkpoint does not have.
    """
    try:
        # `save_pretrained` uses it; it is not a public name.
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return {}
    layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name in names:
        layers[layer_of(name)][name] = held[name]
    parts: dict[str, FusedPart] = {}
    for homes in layers.values():
        numbers, start = {}, 0
        starts: dict[str, int] = {}
        for name, home in homes.items():
            starts[name] = start
            numbers[name] = torch.arange(start, start + home.numel()).view(home.shape)
            start += home.numel()
        for name, where in revert_weight_conversion(model, dict(numbers)).items():
            made = (_locate_part(where, homes[home], starts[home]) for home in homes)
            if (part := next(filter(None, made), None)) is None:
                return {}
            parts[name] = part
    return parts


def _locate_part(where: Tensor, home: Tensor, start: int) -> FusedPart | None:
    """Return where a tensor is in a home whose numbers begin at `start`; None if not all of it is, or not in order."""
    if not where.numel():
        return None
    offset = int(where.reshape(-1)[0]) - start
    strides = tuple(
        int(where.select(dim, 1).reshape(-1)[0]) - start - offset if size > 1 else 0
        for dim, size in enumerate(where.shape)
    )
    last = offset + sum((size - 1) * step for size, step in zip(where.shape, strides, strict=True))
    if min(offset, *strides) < 0 or last >= home.numel():
        return None
    # Only as many numbers as the part has: a home may have those of a hundred experts.
    numbers = torch.tensor(start + offset)
    for size, step in zip(where.shape, strides, strict=True):
        numbers = numbers.unsqueeze(-1) + torch.arange(size) * step
    if not torch.equal(numbers, where):
        return None
    return FusedPart(home, home.shape, where.shape, strides, offset)


def fuse_tensors(
    parts: Mapping[str, FusedPart], tensors: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return each of the model's fused tensors with its new value, made of the checkpoint's tensors."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for name, part in parts.items():
        tensor = tensors[name]
        key = id(part.home)
        if key not in made:
            made[key] = part.home, torch.empty(part.whole, dtype=tensor.dtype, device=tensor.device)
        torch.as_strided(made[key][1], part.shape, part.strides, part.offset).copy_(tensor)
    return list(made.values())
