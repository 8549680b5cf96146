"""A low-rank adapter (LoRA, arXiv:2106.09685) as what learns: the model stays, a step publishes a few percent of its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo import Policy

NAME = "policy"
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Module):
    """A linear layer that doesn't learn, and `scaling · B (A x)` that does; B begins as zeros."""

    def __init__(self, base: nn.Linear, rank: int, scaling: float) -> None:
        super().__init__()
        self.base, self.scaling = base, scaling
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out_features] for x [..., in_features]."""
        found: Tensor = self.base(x) + self.scaling * self.lora_B(self.lora_A(x))
        return found


class LoraPolicy(Policy):
    """A policy whose adapter learns; trainers with PEFT pass their model to `publish_weights` as it is."""

    learning_rate = 5e-3

    def __init__(self, model: Path, allowed: Sequence[int], rank: int) -> None:
        self.rank = rank
        super().__init__(model, allowed)

    def prepare(self) -> None:
        """Put the adapter into the model."""
        self.model.requires_grad_(False)
        linear = [(n, m) for n, m in self.model.named_modules() if n.endswith(LAYERS)]
        for name, module in linear:
            adapted = LoraLinear(module, self.rank, scaling=2.0)
            self.model.set_submodule(name, adapted)

    def state(self) -> dict[str, Tensor]:
        """Return what learns, by name."""
        return {n: value for n, value in self.model.state_dict().items() if ".lora_" in n}

    def published(self) -> dict[str, Any]:
        """Return the adapter, as `publish_weights` takes it."""
        config = {"peft_type": "LORA", "r": self.rank, "lora_alpha": 2 * self.rank}
        return {"adapters": {NAME: (config, self.state())}}

    def report(self) -> str:
        """Return how large an update is."""
        adapter = sum(value.nbytes for value in self.state().values())
        whole = sum(value.nbytes for value in self.model.state_dict().values()) - adapter
        return f"an update has {adapter} bytes, {adapter / whole:.1%} of the model's {whole}"


def rank_of(text: str) -> int:
    """Return a rank from the command line."""
    if not (text.isdecimal() and 0 < int(text) <= torch.iinfo(torch.int16).max):
        raise ValueError("a rank is a number above 0")
    return int(text)
