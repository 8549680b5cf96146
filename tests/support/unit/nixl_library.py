"""NIXL for a test: its package next to the environment's, over TCP on loopback."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_common.transfer.connections.transfer_loop import run_on_loop
from rollout_common.transfer.nixl.memory_serving import memory_server
from rollout_common.transfer.nixl.piece_reading import piece_reader

CACHE = Path(os.environ.get("ROLLOUT_CACHE", Path(__file__).parents[3] / ".cache"))
FOLDER = CACHE / "env-nixl"


@contextlib.contextmanager
def nixl_installed() -> Iterator[None]:
    """Install it for the block, for this process and those that it starts; its processes end with the block."""
    assert (FOLDER / "nixl_cu12").is_dir(), f"make {FOLDER}/.installed"
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(FOLDER))
        patched.setenv("UCX_TLS", "tcp")
        patched.setenv("UCX_NET_DEVICES", "lo")
        try:
            yield
        finally:
            run_on_loop(end_processes()).result(10)


async def end_processes() -> None:
    """End the processes with NIXL that the running loop has started."""
    for process in (memory_server().process, piece_reader().process):
        if process is not None:
            process.end("the test is over")
