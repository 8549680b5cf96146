"""Weights into and out of the model, inside each of SGLang's schedulers.

SGLang calls `load` with what `serving` put into an update: one tensor whose bytes are a command.
The weights themselves come from files that the worker holds open (memory without a name, or an
unnamed file), so that no byte of them passes a socket. A failure ends the scheduler: a model with
half of its weights must not serve.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

CHUNK_BYTES = 64 << 20


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Do what the command says: `load`, `spill` or `restore`."""
    command = json.loads(bytes(named_tensors[0][1].cpu().tolist()))
    paths = command["paths"]
    if command["op"] == "load":
        model.load_weights(_read(paths[0]))
        return
    with torch.no_grad():
        path = paths[_rank()]
        _spill(model, path) if command["op"] == "spill" else _restore(model, path)


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel()
    return int(ranks.pp_rank) * int(ranks.tp_size) + int(ranks.tp_rank)


def _read(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as source:
        for name in source.keys():  # noqa: SIM118 - no mapping
            yield name, source.get_tensor(name)


def _held(model: Any) -> list[Tensor]:
    """Return the bytes of all that the model computes with, each piece of memory once: [n] uint8.

    Besides parameters there are plain tensors made of them (MLA's `w_kc` and `w_vc`), some of them
    transposed. Buffers are SGLang's own to keep.
    """
    own = (value for module in model.modules() for value in vars(module).values())
    tensors = [*model.parameters(), *(value for value in own if isinstance(value, Tensor))]
    storages = {t.untyped_storage().data_ptr(): t for t in tensors if t.numel()}
    return [
        torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        for t in storages.values()
    ]


def _chunks(held: Tensor) -> Sequence[Tensor]:
    """Return bytes in parts, which share their memory."""
    return torch.split(held, CHUNK_BYTES)


def _spill(model: Any, path: str) -> None:
    with open(path, "r+b", buffering=0) as file:
        for tensor in _held(model):
            for part in _chunks(tensor):
                file.write(part.cpu().numpy().data)


def _restore(model: Any, path: str) -> None:
    with open(path, "rb", buffering=0) as file:
        for tensor in _held(model):
            for part in _chunks(tensor):
                held = torch.empty(part.shape, dtype=torch.uint8)
                view = held.numpy().data
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise OSError("the spilled weights end early")
                    view = view[count:]
                part.copy_(held)
