"""The weights of sleeping ranks: each keeps its own in a file without a name, on its own node.

Runs inside SGLang's schedulers; `patches` makes these functions methods of theirs, which the child
calls in all of them, on every node (`collective_rpc`). The file is deleted when the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_worker.engines.shared_memory.spill_file import SpillFile

from .settings import SPILL_FOLDER_VARIABLE

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20

_spill_files: list[SpillFile] = []  # this rank's file, while it has one


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
