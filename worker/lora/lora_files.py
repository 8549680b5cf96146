"""Writes adapters to files, for engines that read them from there."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_common.wire.adapters import CONFIG_KEY, TENSORS_FILE, tensor_key
from rollout_worker.engine import EngineError

from .lora_sink import LoraAdapter


def write_adapters(
    adapters: Sequence[LoraAdapter], parent: Path | None
) -> tuple[Path, dict[str, Path]]:
    """Write adapters into a new folder below `parent` (None: the system's own for temporary files).

    Returns the folder, and by name each adapter's folder in it, which has what PEFT writes.

    Raises:
        EngineError: They do not fit there.
    """
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="rollout-adapters-", dir=parent))
        return folder, {
            each.name: _write_adapter(folder / str(n), each) for n, each in enumerate(adapters)
        }
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        where = parent or tempfile.gettempdir()
        raise EngineError(
            f"the adapters can't be written to {where}: {error}; free space there, or set another spill_dir"
        ) from error


def _write_adapter(folder: Path, adapter: LoraAdapter) -> Path:
    folder.mkdir()
    config = adapter.config
    fields = {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rslora,
        "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in adapter.pairs}),
    }
    (folder / CONFIG_KEY).write_text(json.dumps(fields))
    halves = [
        (tensor_key(module, half), tensor)
        for module, pair in adapter.pairs.items()
        for half, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
    ]
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in halves:
        begin, end = end, end + tensor.spec.nbytes
        shape = list(tensor.spec.shape)
        header[name] = {"dtype": tensor.spec.dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / TENSORS_FILE).open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in halves:
            stream.write(tensor.content)
    return folder
