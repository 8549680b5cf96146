"""Weights into the model, inside each of SGLang's schedulers.

SGLang calls `load` with what `serving` put into an update: one tensor whose bytes are a command.
The weights themselves come from a file that the worker of this node holds open (memory without a
name), so that no byte of them passes a socket. A failure ends the scheduler: a model with half of
its weights must not serve.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from safetensors import safe_open
from torch import Tensor

from rollout_worker.engines.mapped import located
from rollout_worker.engines.mappings import tensors_told


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the file that the command names: by its `path`, or by its `slot`, on every node its own."""
    command = json.loads(bytes(named_tensors[0][1].cpu().tolist()))
    slot = command.get("slot")
    if "told" in command:  # memory that was given: no file, but places
        model.load_weights(tensors_told(command["told"]))
        return
    model.load_weights(_read(located(slot) if slot else command["path"]))


def _read(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as source:
        for name in source.keys():  # noqa: SIM118 - no mapping
            yield name, source.get_tensor(name)
