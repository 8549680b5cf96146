"""vLLM's ranks as actors of Ray: they are Ray's children, and the worker watches over them all the same.

It can because they run on its own node: they read staged weights from its memory, and it sees them die.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
from typing import Any

from rollout_common.turn.sharing import SOCKET
from rollout_worker.engine import EngineError
from rollout_worker.observe.processes import ProcessHandle, find_process

RAY_FLAG = "engine.args: --distributed-executor-backend ray"
HEAD_VARIABLE = "ROLLOUT_VLLM_HEAD"
"""The worker's process id and start time, for ranks that Ray started: they end with that process."""
EXECUTOR_VARIABLE = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"


def check_executor(parsed: argparse.Namespace) -> None:
    """Refuse ranks that the worker can't watch over, and what doesn't work under Ray."""
    executor = parsed.distributed_executor_backend
    if executor not in (None, "mp", "ray"):
        raise EngineError(
            f"engine.args: --distributed-executor-backend {executor!r} runs the model inside vLLM's "
            "core, where the worker can't watch over it: use mp (the default) or ray"
        )
    if parsed.data_parallel_backend == "ray":
        raise EngineError(
            "engine.args: --data-parallel-backend ray makes vLLM's cores actors, which the worker"
            " can't watch over: leave it out"
        )
    if executor != "ray":
        return
    if SOCKET in os.environ:
        raise EngineError(
            f"{RAY_FLAG}: ranks that Ray starts can't share the turn for the devices (--turn-devices): use mp"
        )
    if parsed.data_parallel_size > 1:
        raise EngineError(f"{RAY_FLAG}: set parallelism.data to 1 and raise spec.replicas")
    if os.environ.get(EXECUTOR_VARIABLE, "1") == "0":
        raise EngineError(
            f"engine.env: {EXECUTOR_VARIABLE}=0 chooses an executor that notices no dead rank:"
            " leave it out"
        )
    if importlib.util.find_spec("ray") is None:
        raise EngineError(f"{RAY_FLAG}: Ray is not installed here: add it to the image, or use mp")


def prepare_ray(platform: Any) -> None:
    """Refuse a device that Ray doesn't schedule, and let ranks know the process to end with."""
    if not platform.ray_device_key:
        raise EngineError(
            f"{RAY_FLAG}: vLLM has no ranks under Ray on {platform.device_name}: leave it out"
        )
    own = find_process(os.getpid())
    assert own is not None, "this process is there"
    os.environ[HEAD_VARIABLE] = f"{own.pid}.{own.started}"


async def find_rank_processes(llm: Any) -> set[ProcessHandle]:
    """Return the processes of all ranks, once each has read this process's memory.

    Raises:
        EngineError: one can't, so no staged weights would reach it.
    """
    secret = secrets.token_hex()
    handle = os.memfd_create("rollout-reach", os.MFD_CLOEXEC)
    try:
        os.write(handle, secret.encode())
        path = f"/proc/{os.getpid()}/fd/{handle}"
        pids: list[int | None] = await llm.collective_rpc("rollout_reach", args=(path, secret))
    finally:
        os.close(handle)
    found: set[ProcessHandle] = set()
    for rank, pid in enumerate(pids):
        process = None if pid is None else find_process(pid)
        if process is None:
            raise EngineError(
                f"{RAY_FLAG}: Ray put rank {rank} where it can't read the worker's memory: have all"
                " ranks in the worker's own container, of as many GPUs, or set parallelism.nodes and"
                " use mp"
            )
        found.add(process)
    return found
