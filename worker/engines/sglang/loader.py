"""Weights into the model, inside each of SGLang's schedulers.

SGLang calls `load` with what `serving` put into an update: one tensor whose bytes are a command.
The weights themselves come from a file that the worker of this node holds open (memory without a
name), so that no byte of them passes a socket. A failure ends the scheduler: a model with half of
its weights must not serve.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rollout_worker.engines.shared_memory import rank_mappings
from rollout_worker.engines.shared_memory.tensor_views import TensorPlace
from rollout_worker.sources.checkpoint_files import open_source


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the file that the command names: by its `path`, or by its `slot`, on every node its own."""
    where = json.loads(bytes(named_tensors[0][1].cpu().tolist()))
    if "folder" in where:
        model.load_weights(_read_folder(Path(where["folder"])))
        return
    if "ticket" in where:  # memory that was given: no file, but places
        ticket = Path(where["ticket"]).read_text()
        model.load_weights(rank_mappings.read_tensors(ticket))
        where = json.loads(ticket)
    else:
        ours = rank_mappings.find_mapping(where)
        model.load_weights(
            _read_file(rank_mappings.sink_path(where)) if ours is None else _read_mapped(ours)
        )
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # it may still read locked memory
    rank_mappings.check_unchanged(where)


def _read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield what the files of a checkpoint have, as a version of it would have it."""
    for file in sorted({place.file for place in open_source(folder).places.values()}):
        yield from _read_file(str(file))


def _read_file(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as source:
        for name in source.keys():  # noqa: SIM118 - no mapping
            yield name, source.get_tensor(name)


def _read_mapped(ours: rank_mappings.RankMapping) -> Iterator[tuple[str, Tensor]]:
    """Yield what a file of safetensors has, from memory that is mapped already."""
    first = 8 + int.from_bytes(ours.first_bytes(8), "little")
    places: list[TensorPlace] = [
        (name, field["dtype"], field["shape"], first + field["data_offsets"][0])
        for name, field in json.loads(ours.first_bytes(first)[8:]).items()
    ]
    return ours.read_views(places)


def check_updatable(scheduler: Any) -> None:
    """Refuse what SGLang itself refuses to update: it answers so at every update, before it touches anything.

    Raises:
        ValueError: in its own words.
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater

    why = weight_updater._unsupported_derived_weight_cache_error(
        scheduler.tp_worker.model_runner.model
    )
    if why is not None:
        raise ValueError(why)


def map_sink(scheduler: Any, command: str) -> None:
    """Map a sink before it is loaded, in a scheduler: `command` has the arguments of `rank_mappings.begin_mapping`."""
    rank_mappings.begin_mapping(**json.loads(command), gpu=torch.cuda.is_available())


def unmap_sink(scheduler: Any, command: str) -> None:
    """Unmap a sink: `command` has the arguments of `rank_mappings.close_mappings`."""
    rank_mappings.close_mappings(**json.loads(command))
