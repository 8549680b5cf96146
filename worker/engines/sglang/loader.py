"""The weights of each of SGLang's schedulers: into the model, into a file while it sleeps, and back.

SGLang calls `load` with what `serving` put into an update: one tensor whose bytes are a command. `patches`
makes the functions with a `scheduler` methods of the schedulers, which the child calls in all of them, on
every node. The weights come from a file that the worker of the node holds open (memory without a name), so
that no byte of them passes a socket. A load that fails ends the scheduler: a model with half of its weights
must not serve. A sleeping rank keeps its weights in a file without a name, deleted when the process ends.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rollout_worker.engines.shared_memory import rank_mappings
from rollout_worker.engines.shared_memory.sinks import open_unnamed_file
from rollout_worker.engines.shared_memory.tensor_views import TensorPlace
from rollout_worker.sources.checkpoint_files import open_source

from .settings import SPILL_FOLDER_VARIABLE

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20

_spill_descriptors: list[int] = []  # descriptor of this rank's file, while it has one


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the sink that the command names, by its `path` or its `slot`, which is each node's own."""
    where = json.loads(bytes(named_tensors[0][1].cpu().tolist()))
    if "folder" in where:
        model.load_weights(_read_folder(Path(where["folder"])))
        return
    if (
        "ticket" in where
    ):  # a trainer's memory, which is not a file: the ticket says where each tensor is
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
    for file in sorted({place.file for place in open_source(folder).places.values()}):
        yield from _read_file(str(file))


def _read_file(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as source:
        for name in source.keys():  # noqa: SIM118 - it is not a mapping
            yield name, source.get_tensor(name)


def _read_mapped(ours: rank_mappings.RankMapping) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a safetensors file that is mapped already."""
    first = 8 + int.from_bytes(ours.first_bytes(8), "little")
    places: list[TensorPlace] = [
        (name, field["dtype"], field["shape"], first + field["data_offsets"][0])
        for name, field in json.loads(ours.first_bytes(first)[8:]).items()
    ]
    return ours.read_views(places)


def check_updatable(scheduler: Any) -> None:
    """Raise `ValueError` if SGLang refuses updates of this model: it would do so before touching anything."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    why = weight_updater._unsupported_derived_weight_cache_error(
        scheduler.tp_worker.model_runner.model
    )
    if why is not None:
        raise ValueError(why)


def map_sink(scheduler: Any, command: str) -> None:
    """Map a sink before it is loaded; `command` has the arguments of `rank_mappings.begin_mapping`."""
    rank_mappings.begin_mapping(**json.loads(command), gpu=torch.cuda.is_available())


def unmap_sink(scheduler: Any, command: str) -> None:
    """Unmap a sink; `command` has the arguments of `rank_mappings.close_mappings`."""
    rank_mappings.close_mappings(**json.loads(command))


def spill_weights(scheduler: Any) -> None:
    """Write this rank's weights to a file; if one rank has no room (`OSError`), none has a file."""
    drop_spilled_weights(scheduler)
    try:
        _run_in_all_ranks(scheduler, _write_weights)
    except OSError:
        drop_spilled_weights(scheduler)
        raise


def restore_weights(scheduler: Any) -> None:
    """Read this rank's weights from its file, and delete it; the model is useless if a rank can't (`OSError`)."""
    _run_in_all_ranks(scheduler, _read_weights)


def wait_for_ranks(scheduler: Any) -> None:
    """Do nothing: SGLang answers once all ranks have done what was asked before."""


def _run_in_all_ranks(scheduler: Any, work: Callable[[Any], None]) -> None:
    """Do it in all ranks; raise the first failure in all, as SGLang reports only what its first rank raises."""
    wrong = ""
    try:
        work(scheduler.tp_worker.model_runner.model)
    except Exception as error:  # whatever it was, the others wait below
        logger.exception("the weights of this rank could not be moved")
        wrong = (
            f"{os.environ[SPILL_FOLDER_VARIABLE]!r}: {getattr(error, 'strerror', None) or error}"
        )
    errors: list[str] = [""] * torch.distributed.get_world_size(scheduler.tp_cpu_group)
    torch.distributed.all_gather_object(errors, wrong, group=scheduler.tp_cpu_group)
    if any(errors):
        raise OSError(next(filter(None, errors)))


def _write_weights(model: Any) -> None:
    pieces = _model_bytes(model)
    _spill_descriptors.append(open_unnamed_file(Path(os.environ[SPILL_FOLDER_VARIABLE])))
    os.posix_fallocate(_spill_descriptors[0], 0, max(sum(len(tensor) for tensor in pieces), 1))
    with os.fdopen(os.dup(_spill_descriptors[0]), "r+b", buffering=0) as file:
        for part in _split_chunks(pieces):
            view = part.cpu().numpy().data
            while view:
                view = view[file.write(view) :]


def _read_weights(model: Any) -> None:
    with os.fdopen(_spill_descriptors.pop(), "rb", buffering=0) as file:
        file.seek(0)
        for part in _split_chunks(_model_bytes(model)):
            held = torch.empty(part.shape, dtype=torch.uint8)
            view = held.numpy().data
            while view:
                count = file.readinto(view)
                if not count:
                    raise OSError("the spilled weights end early")
                view = view[count:]
            part.copy_(held)


def drop_spilled_weights(_: Any) -> None:
    """Delete this rank's file, if there is one."""
    while _spill_descriptors:
        os.close(_spill_descriptors.pop())


def _model_bytes(model: Any) -> list[Tensor]:
    """Return the bytes of all that the model computes with, each piece of memory once: [n] uint8.

    In addition to parameters there are plain tensors made of them (MLA's `w_kc` and `w_vc`), some of
    them transposed. SGLang keeps buffers itself.
    """
    own = (value for module in model.modules() for value in vars(module).values())
    tensors = [*model.parameters(), *(value for value in own if isinstance(value, Tensor))]
    storages = {t.untyped_storage().data_ptr(): t for t in tensors if t.numel()}
    return [
        torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        for t in storages.values()
    ]


def _split_chunks(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the bytes, of at most `CHUNK_BYTES` each."""
    return [part for tensor in pieces for part in torch.split(tensor, CHUNK_BYTES)]
