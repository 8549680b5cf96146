"""Folders of LoRA adapters as PEFT saves them, as a source of weights.

`save_pretrained` writes the adapter `default` into the folder itself, and each other one into a folder of its name below.
Their tensors become those of a version (`rollout_common.wire.adapters`). A push by the client has other root hashes: its
configurations name the checkpoint, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollout_common.wire.adapters import (
    CONFIG_KEY,
    MAX_CONFIG_BYTES,
    TENSORS_FILE,
    AdapterConfig,
    AdapterRefused,
    entry_name,
    split_key,
    tensor_key,
)
from rollout_worker.engine import WeightsRejected

DEFAULT_NAME = "default"


def find_adapter_folders(path: Path) -> dict[str, Path]:
    """Return the folder of each adapter that a source holds, by name; none if it is a model's.

    Raises:
        OSError: It can't be read.
    """
    own = (path / CONFIG_KEY).exists()
    if not own and any(path.glob("*.safetensors")):
        return {}
    found = {each.parent.name: each.parent for each in sorted(path.glob(f"*/{CONFIG_KEY}"))}
    return {DEFAULT_NAME: path, **found} if own else found


def read_config(name: str, folder: Path, confine: Callable[[Path], Path]) -> bytes:
    """Return an adapter's configuration as versions hold it; `confine` follows the links of a path.

    Raises:
        WeightsRejected: It is missing, or asks for more than plain LoRA.
        OSError: It can't be read.
    """
    if not (folder / TENSORS_FILE).exists():
        raise WeightsRejected(
            f"{str(folder)!r} has {CONFIG_KEY} but no {TENSORS_FILE}: save the adapter with safetensors"
        )
    with confine(folder / CONFIG_KEY).open("rb") as stream:
        content = stream.read(MAX_CONFIG_BYTES + 1)
    try:
        return AdapterConfig.decode(content).encode()
    except AdapterRefused as error:
        raise WeightsRejected(f"adapter {name!r} in {str(folder)!r}: {error}") from error


def version_name(adapter: str, key: str) -> str:
    """Return the name in a version of a tensor in an adapter's file.

    Raises:
        WeightsRejected: It is not a tensor of plain LoRA.
    """
    try:
        module, half = split_key(key)
    except AdapterRefused as error:
        raise WeightsRejected(f"adapter {adapter!r}: {error}", tensor=key) from error
    return entry_name(adapter, tensor_key(module, half))
