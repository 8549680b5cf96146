"""A GPU that is lost to the process: the worker ends, and says so. Torch's errors stand in for a GPU's."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import torch

from rollout_worker.engine import EngineError, ProcessSpent
from rollout_worker.engines.hf import hf_engine
from rollout_worker.engines.hf.thread import find_lasting_fault
from rollout_worker.ports.server import EXIT_SPENT
from tests.support.engine.engines import serving
from tests.support.engine.tinymodels import TinyModels
from tests.support.waiting import until_sync

ILLEGAL = "CUDA error: an illegal memory access was encountered"
SERVE = f"""
import sys, torch
from rollout_worker.__main__ import main
from rollout_worker.engines.hf.forward import ForwardRunner

def lost(*_, **__):
    raise torch.AcceleratorError({ILLEGAL!r} + "\\nFor debugging consider CUDA_LAUNCH_BLOCKING=1")

ForwardRunner.run_pass = lost
main(["serve", *sys.argv[1:]])
"""


class Lines:
    """What a process says, read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.text = ""
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.text += line

    def rest(self) -> str:
        self._reader.join(10)
        return self.text

    def data_port(self) -> int | None:
        _, found, rest = self.text.partition('"data_port": ')
        return int(rest.partition(",")[0].partition("}")[0]) if found else None


def worker(model: Path) -> subprocess.Popen[str]:
    ports = ["--data-port", "0", "--control-port", "0", "--control-host", "127.0.0.1"]
    return subprocess.Popen(
        [
            *[sys.executable, "-c", SERVE, "--model", str(model)],
            *[*ports, "--auth", "none", "--shutdown-grace", "0"],
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_an_error_of_the_gpu_in_a_step_ends_the_process(tiny_models: TinyModels) -> None:
    """An engine of the same process would meet the same error, for ever."""
    with worker(tiny_models.model(1)) as process:
        try:
            said = Lines(process)
            until_sync(said.data_port, 120, what="the ports")
            with httpx.Client(base_url=f"http://127.0.0.1:{said.data_port()}") as data:
                until_sync(lambda: data.get("/ready").is_success, 120, what="the engine")
                answer = data.post("/v1/generate", json={"token_ids": [5]}, timeout=60).json()
            assert process.wait(60) == EXIT_SPENT
        finally:
            process.kill()
    assert answer["outputs"][0]["abort_reason"] == "engine"
    assert (
        f"the GPU's context of this process is lost: {ILLEGAL}; only a new process" in said.rest()
    )


async def test_an_error_of_the_gpu_at_the_start_leaves_no_engine_for_this_process(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise torch.AcceleratorError(ILLEGAL + "\nFor debugging consider CUDA_LAUNCH_BLOCKING=1")

    monkeypatch.setattr(hf_engine, "load_model", lost)
    lasts = re.escape(f"the GPU's context of this process is lost: {ILLEGAL}; only a new process")
    with pytest.raises(ProcessSpent, match=lasts):
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
