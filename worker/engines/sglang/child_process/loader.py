"""Weights into the model, and to a file while it sleeps, inside each of SGLang's schedulers.

SGLang calls `load` with what `serving` put into an update: one tensor whose bytes are a command.
The weights themselves come from a file that the worker of this node holds open (memory without a
name), so that no byte of them passes a socket. A failure ends the scheduler: a model with half of
its weights must not serve.

At sleep level 1 each rank keeps its own weights in a file without a name on its own node, which is deleted when the process
ends. `patches` makes these functions methods of the schedulers, which the child calls in all of them, on every node
(`collective_rpc`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rollout_worker.engines.sglang.settings import SPILL_FOLDER_VARIABLE
from rollout_worker.engines.shared_memory import rank_mappings
from rollout_worker.engines.shared_memory.copy_plan import (
    CopyList,
    CopyRecorder,
    NotRecordable,
    SourceIndex,
    TensorMemory,
    TensorRows,
    check_method,
    open_tensor_memory,
    repeat_copies,
    source_names,
)
from rollout_worker.engines.shared_memory.copy_ring import open_ring
from rollout_worker.engines.shared_memory.lent_reading import read_lent
from rollout_worker.engines.shared_memory.spill_file import SpillFile
from rollout_worker.sources.checkpoint_files import open_source

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20

_spill_files: list[SpillFile] = []  # this rank's file, while it has one

TensorReader = Callable[[], Iterator[tuple[str, Tensor]]]
ExpertPlaces = list[list[int]]
"""By layer, which expert lies in which place; some lie in several."""


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the sink of which the command is the ticket, or a folder."""
    sink = json.loads(named_tensors[0][1].cpu().numpy().tobytes())
    _forget_features()
    if "folder" in sink:
        model.load_weights(_read_folder(Path(sink["folder"])))
        return
    if "loaded" in sink:  # lent values, which came before
        return
    if "lent" in sink:
        model.load_weights(read_lent(sink, next(model.parameters()).device))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the KV cache, which wakes next, would lack what torch keeps
        return
    rows = [row[:3] for row in sink["tensors"]]
    memory = open_tensor_memory(sink, rows)
    read = partial(rank_mappings.read_tensors, sink)
    _load_recorded(model, rows, memory, read, _expert_places())
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # it may still copy from the ring


def _forget_features() -> None:
    """Drop what the former weights made of pictures: requests that run have their prefix computed again."""
    from sglang.srt.managers import mm_schedule

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()


def _expert_places() -> ExpertPlaces | None:
    """Return which expert lies where; SGLang moves them while it serves where it balances them (`--enable-eplb`)."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    found = get_global_expert_location_metadata()
    return None if found is None else found.physical_to_logical_map_cpu.tolist()


class RecordedLoad:
    """The recorded load of one model.

    `rows`: the tensors of the version. `copies`: None if the load does more than copy. `parameters`: the
    tensors that are written. `experts`: where they lay.
    """

    def __init__(self, model: Any, rows: TensorRows, experts: ExpertPlaces | None) -> None:
        self.rows = rows
        self.experts = experts
        self.copies: CopyList | None = None
        self.parameters = _tensors_of(model)
        self._places = {name: _place_of(tensor) for name, tensor in self.parameters.items()}

    def is_of(self, model: Any, rows: TensorRows, experts: ExpertPlaces | None) -> bool:
        """Whether the copies fit these tensors and this model: every parameter and expert is where it was."""
        now = _tensors_of(model)
        places = {name: _place_of(tensor) for name, tensor in now.items()}
        return rows == self.rows and places == self._places and experts == self.experts

    def record(self, model: Any, read: TensorReader) -> None:
        """Load the model by its own loaders and record the copies; after `NotRecordable`, load it again."""
        for module in model.modules():
            check_method(module)
        sources = SourceIndex()
        plain = {name: tensor.data for name, tensor in self.parameters.items()}
        with CopyRecorder(sources, plain) as recorder:
            model.load_weights(sources.track_tensors(read()))
        recorder.check_copies()
        # Loaders of some models copy in other threads, which are not recorded.
        seen: Counter[str] = Counter()
        for copy in recorder.copies:
            seen[copy.parameter] += math.prod(copy.target.size)
        for name, parameter in model.named_parameters():
            if seen[name] < parameter.numel():
                raise NotRecordable(f"not all copies to {name} were recorded")
        self.copies = CopyList(recorder.copies)


_last_load: RecordedLoad | None = None


def _load_recorded(
    model: Any,
    rows: TensorRows,
    memory: TensorMemory,
    read: TensorReader,
    experts: ExpertPlaces | None,
) -> None:
    """Load a version by the recorded copies, or by the model's own loaders."""
    global _last_load
    known = _last_load
    if known is None or not known.is_of(model, rows, experts):
        known = _last_load = RecordedLoad(model, rows, experts)
        try:
            known.record(model, read)
            # This commit is slow anyway: the next one finds its buffers locked.
            open_ring(next(model.parameters()).device, memory.nbytes)
            return
        except NotRecordable as error:
            logger.info("commits load the weights as SGLang does, tensor by tensor: %s", error)
    if known.copies is None or not memory.has_tensors(source_names(known.copies.recorded)):
        model.load_weights(read())
        return
    with torch.no_grad():
        repeat_copies(known.copies, known.parameters, memory)


def _tensors_of(model: Any) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _place_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted({place.file for place in open_source(folder).places.values()}):
        with safe_open(str(file), framework="pt") as source:
            for name in source.keys():  # noqa: SIM118 - it is not a mapping
                yield name, source.get_tensor(name)


def check_updatable(scheduler: Any) -> None:
    """Raise `ValueError` if SGLang refuses updates of this model: it would do so before touching anything."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    model = scheduler.tp_worker.model_runner.model
    why = weight_updater._unsupported_derived_weight_cache_error(model) or _hidden_weights(model)
    if why is not None:
        raise ValueError(why)


def _hidden_weights(model: Any) -> str | None:
    """Return why loaders would pass over weights, such as those of experts, without an error; None: they find all.

    SGLang 0.5.23 wraps the layers that take adapters, and only weight and bias keep their names then.
    """
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    for name, module in model.named_modules():
        if isinstance(module, BaseLayerWithLoRA):
            own = {each for each, _ in module.base_layer.named_parameters(recurse=False)}
            if hidden := own - {"weight", "bias"}:
                return (
                    f"{name} takes adapters, and SGLang would leave its {min(hidden)} as it is: name layers without it in "
                    "--lora-target-modules, such as q_proj k_proj v_proj o_proj"
                )
    return None


def map_sink(scheduler: Any, command: str) -> None:
    """Map a sink before it is loaded; `command` has the arguments of `rank_mappings.begin_mapping`."""
    rank_mappings.begin_mapping(**json.loads(command))


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
    _spill_files.append(SpillFile(Path(os.environ[SPILL_FOLDER_VARIABLE]), _model_chunks(model)))


def _read_weights(model: Any) -> None:
    with contextlib.closing(_spill_files.pop()) as file:
        for part, held in zip(_model_chunks(model), file.read_tensors(), strict=True):
            part.copy_(held)


def drop_spilled_weights(_: Any) -> None:
    """Delete this rank's file, if there is one."""
    while _spill_files:
        _spill_files.pop().close()


def _model_chunks(model: Any) -> list[Tensor]:
    """Return the bytes of all that the model computes with, each once, in views of at most `CHUNK_BYTES`: [n] uint8.

    In addition to parameters there are plain tensors made of them (MLA's `w_kc` and `w_vc`), some of
    them transposed. SGLang keeps buffers itself.
    """
    own = (value for module in model.modules() for value in vars(module).values())
    tensors = [*model.parameters(), *(value for value in own if isinstance(value, Tensor))]
    storages = {t.untyped_storage().data_ptr(): t for t in tensors if t.numel()}
    pieces = (
        torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        for t in storages.values()
    )
    return [part for tensor in pieces for part in torch.split(tensor, CHUNK_BYTES)]
