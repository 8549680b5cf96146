"""How vLLM starts its processes where no platform of its own decides, as on GPUs: by its own context, from our loop."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.engine.engine_kinds import KINDS, ROOT, left_out

KIND = KINDS["vllm"]

pytestmark = pytest.mark.skipif(left_out(KIND) is not None, reason=str(left_out(KIND)))

WORKER = """
import asyncio, os, signal, socket, sys, time

from rollout_worker.engine import TensorEntry, TensorSpec
from rollout_worker.engines.shared_memory.sinks import MappedSink
from rollout_worker.engines.vllm.launch import prepare_environment

prepare_environment()


def files(pid):
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            pass
    return {name for name in found if name.startswith(("socket:", "/memfd:"))}


def begin():
    from vllm.utils.system_utils import get_mp_context

    child = get_mp_context().Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    return child


async def main():
    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.set)
    port = socket.create_server(("127.0.0.1", 0))
    sink = MappedSink([TensorEntry("w", TensorSpec("U8", (1 << 20,)))])
    child = await asyncio.to_thread(begin)
    shared = files(child.pid) & files(os.getpid())
    assert not shared, f"the engine's process has {shared} of ours"
    child.terminate()
    await asyncio.to_thread(child.join, 20)
    await asyncio.sleep(0.1)
    assert child.exitcode is not None
    assert not heard.is_set(), "what ended the engine's process arrived in our loop"
    sink.close()
    port.close()


if __name__ == "__main__":
    asyncio.run(main())
"""


def test_vllms_processes_share_nothing_with_the_worker(tmp_path: Path) -> None:
    """Whatever the environment says."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    ours = {"PYTHONPATH": str(ROOT / "src"), "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    done = subprocess.run(
        [KIND.python, script], env={**os.environ, **ours}, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
