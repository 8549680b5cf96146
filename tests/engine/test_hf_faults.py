"""A GPU that is lost to the process: the worker ends, and says so. Torch's errors stand in for a GPU's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from rollout_worker.engine import EngineError, ProcessSpent
from rollout_worker.engines.hf import hf_engine
from rollout_worker.engines.hf.thread import find_lasting_fault
from rollout_worker.ports.server import EXIT_SPENT
from tests.support.engine.engines import serving
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import Command
from tests.support.waiting import until_sync

ILLEGAL = "CUDA error: an illegal memory access was encountered"
LOST = f"""
import sys, torch
from rollout_worker.__main__ import main
from rollout_worker.engines.hf.forward import ForwardRunner

def lost(*_, **__):
    raise torch.AcceleratorError({ILLEGAL!r} + "\\nFor debugging consider CUDA_LAUNCH_BLOCKING=1")

ForwardRunner.run_pass = lost
main(["serve", *sys.argv[1:]])
"""
LOSES = f"the GPU's context of this process is lost: {ILLEGAL}; only a new process"


def test_an_error_of_the_gpu_in_a_step_ends_the_process(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    """An engine of the same process would meet the same error, for ever."""
    log, flags = tmp_path / "log", ("--shutdown-grace", "0")
    worker = Command(tiny_models.model(1), log, flags, None, serve=("-c", LOST))
    try:
        until_sync(worker.ready, 120, what="the engine")
        [output] = worker.generate().json()["outputs"]
        assert worker.process.wait(60) == EXIT_SPENT
    finally:
        worker.end_all()
    assert output["abort_reason"] == "engine"
    assert any(LOSES in json.dumps(line) for line in worker.logged())


async def test_an_error_of_the_gpu_at_the_start_leaves_no_engine_for_this_process(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise torch.AcceleratorError(ILLEGAL + "\nFor debugging consider CUDA_LAUNCH_BLOCKING=1")

    monkeypatch.setattr(hf_engine, "load_model", lost)
    with pytest.raises(ProcessSpent, match=re.escape(LOSES)):
        async with serving(tiny_models.model(1)):
            pass


def chained() -> Exception:
    error = EngineError("the step failed")
    error.__cause__ = torch.AcceleratorError(ILLEGAL)
    return error


@pytest.mark.parametrize("error", [RuntimeError(ILLEGAL), chained()], ids=["by text", "as cause"])
def test_what_cuda_reports_lasts(error: Exception) -> None:
    assert find_lasting_fault(error) == ILLEGAL


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        EngineError("no room"),
    ],
    ids=["memory", "memory elsewhere", "memory of cuBLAS", "shapes", "ours"],
)
def test_what_passes_is_no_end_of_the_process(error: Exception) -> None:
    assert find_lasting_fault(error) is None
