"""LoRA adapters of a trainer as the tensors of a version: `publish_weights(adapters=…)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from rollout_common.wire.adapters import (
    CONFIG_KEY,
    MAX_ADAPTERS,
    TENSORS_FILE,
    AdapterConfig,
    AdapterRefused,
    check_name,
    entry_name,
    split_key,
    tensor_key,
)

if TYPE_CHECKING:
    from torch import Tensor

GivenAdapter = Any
"""A PEFT model, the path of a folder that `save_pretrained` wrote, or (configuration, tensors by PEFT's names)."""


def adapter_tensors(
    adapters: Mapping[str, GivenAdapter], base_root_hash: str | None
) -> dict[str, Tensor]:
    """Return the tensors of a version with these adapters, by name.

    Args:
        adapters: By the name by which requests will ask for them. Of a PEFT model, the adapter of that name is taken, or
            its active one.
        base_root_hash: Of the checkpoint that the pool serves; the adapters are bound to it.

    Raises:
        ValueError: Names the adapter, and what can't be published.
    """
    import torch

    if not adapters or len(adapters) > MAX_ADAPTERS:
        raise ValueError(f"adapters must have 1 to {MAX_ADAPTERS} entries, not {len(adapters)}")
    found: dict[str, Tensor] = {}
    for name, given in adapters.items():
        try:
            check_name(name)
            config, tensors = _read_adapter(name, given)
            bound = AdapterConfig(config.rank, config.alpha, config.rslora, base_root_hash)
            content = bytearray(bound.encode())
            found[entry_name(name, CONFIG_KEY)] = torch.frombuffer(content, dtype=torch.uint8)
            for key, tensor in tensors.items():
                found[entry_name(name, tensor_key(*split_key(key)))] = tensor
        except AdapterRefused as error:
            raise ValueError(f"adapter {name!r}: {error}") from error
    return found


def _read_adapter(name: str, given: GivenAdapter) -> tuple[AdapterConfig, Mapping[str, Tensor]]:
    if isinstance(given, str | PurePath):
        return _read_folder(Path(given))
    if hasattr(given, "peft_config") and hasattr(given, "state_dict"):
        return _read_model(name, given)
    if isinstance(given, tuple) and len(given) == 2:
        return AdapterConfig.of_fields(_config_fields(given[0])), given[1]
    raise AdapterRefused(
        f"{type(given).__name__} is not an adapter: give a PEFT model, a folder, or (configuration, tensors)"
    )


def _read_folder(folder: Path) -> tuple[AdapterConfig, Mapping[str, Tensor]]:
    from safetensors.torch import load_file

    try:
        config = AdapterConfig.decode((folder / CONFIG_KEY).read_bytes())
        return config, load_file(folder / TENSORS_FILE)
    except OSError as error:
        raise AdapterRefused(f"can't be read: {error}") from error


def _read_model(name: str, model: Any) -> tuple[AdapterConfig, Mapping[str, Tensor]]:
    """Return one adapter of a PEFT model: the one of this name, or the active one."""
    configs = model.peft_config
    mine = name if name in configs else _active_adapter(model)
    ending = re.compile(rf"\.(lora_[AB])\.{re.escape(mine)}\.weight$")
    tensors = {
        ending.sub(r".\1.weight", key): tensor.detach()
        for key, tensor in model.state_dict().items()
        if ending.search(key)
    }
    if not tensors:
        raise AdapterRefused(f"the model has no LoRA tensors of its adapter {mine!r}")
    return AdapterConfig.of_fields(_config_fields(configs[mine])), tensors


def _active_adapter(model: Any) -> str:
    active = getattr(model, "active_adapter", None)
    if isinstance(active, str) and active in model.peft_config:
        return active
    raise AdapterRefused(f"the model has {', '.join(model.peft_config)}: name one of them")


def _config_fields(config: Any) -> Mapping[str, Any]:
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(fields, Mapping):
        raise AdapterRefused("its configuration is not a mapping: give LoraConfig or its fields")
    kind = fields.get("peft_type")
    return {**fields, "peft_type": getattr(kind, "value", kind)}
