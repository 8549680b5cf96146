"""LoRA adapters of random numbers for the tiny model, as PEFT saves them, and transformers with one merged as the judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.engine.reference import Reference

LORA_FLAGS = {
    "hf": (),
    "vllm": ("--enable-lora", "--max-loras=2", "--max-lora-rank=16"),
    "sglang": (
        *("--enable-lora", "--max-loras-per-batch=4", "--max-lora-rank=16"),
        *("--lora-target-modules=all", "--lora-backend=torch_native"),
    ),
}
"""What each engine's own command line needs for adapters."""
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_tensors(
    model: Path, seed: int, rank: int = 8, modules: Sequence[str] = EVERY, std: float = 0.1
) -> dict[str, torch.Tensor]:
    """The tensors of an adapter of all layers of a model folder, by PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        weights |= load_file(file)
    found = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            out, width = weight.shape
            key = f"base_model.model.{module}"
            found[f"{key}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * std
            found[f"{key}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * std
    return found


def config_of(rank: int = 8, alpha: float = 16, **more: Any) -> dict[str, Any]:
    """The fields of `adapter_config.json` as PEFT writes them, with those that change nothing."""
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "target_modules": list(EVERY),
        "modules_to_save": None,
        "rank_pattern": {},
        "base_model_name_or_path": "tiny",
        "inference_mode": True,
        **more,
    }


def save_adapter(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None
) -> Path:
    """Write an adapter as PEFT's `save_pretrained` does."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config or config_of()))
    return folder


def merged_reference(
    model: Path, tensors: dict[str, torch.Tensor], scaling: float = 2
) -> Reference:
    """Transformers with `W + scaling B A` in each of the adapter's modules."""
    judge = Reference(model)
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            module = judge.model.get_submodule(stem.removeprefix("base_model.model."))
            module.weight.data += scaling * tensors[f"{stem}.lora_B.weight"] @ tensors[name]
    return judge
