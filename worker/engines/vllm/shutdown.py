"""The start and the end of vLLM's processes, and what they leave: sockets, files and shared memory.

Sockets and files go to a folder of this process, which is removed with the engine. Segments of
shared memory are noted while their owners live: only their memory maps say whose they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rollout_common.wire import Progress
from rollout_worker.engine import EngineError
from rollout_worker.observe.processes import (
    PROC,
    ProcessHandle,
    find_descendants,
    kill_processes,
)
from rollout_worker.sources.source_reading import ReadCancelled

from .settings import PROCESS_STOP_SECONDS

if TYPE_CHECKING:
    from .launch import LaunchedVllm

logger = logging.getLogger(__name__)

ReportProgress = Callable[[Progress], None]
T = TypeVar("T")

SOCKET_FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
FOLDER_PREFIX = "rollout-vllm-"
SHM_FOLDER = "/dev/shm/"
SEGMENT_PATTERN = re.compile(SHM_FOLDER + r"(?:psm_|torch_|sem\.mp-)[^/]+")
"""Names that Python and torch give; other files there, such as weights, are not vLLM's."""


async def start_in_thread(
    work: Callable[[ReportProgress, Callable[[], bool]], T],
    report: ReportProgress,
    give_up: threading.Event,
    before: Collection[ProcessHandle],
) -> T:
    """Start vLLM in a thread, by `work(report, cancelled)`; a cancelled caller leaves no process behind."""
    starting = asyncio.get_running_loop().run_in_executor(None, work, report, give_up.is_set)
    try:
        return await asyncio.shield(starting)
    except ReadCancelled:
        raise EngineError("the engine was stopped while it loaded") from None
    except asyncio.CancelledError:
        give_up.set()
        await asyncio.to_thread(end_started_processes, before)
        done, _ = await asyncio.wait([starting], timeout=PROCESS_STOP_SECONDS)
        for future in done:
            future.exception()  # retrieved, so that asyncio does not log it as an error
        raise


def prepare_folder() -> None:
    """Give vLLM a folder for its sockets and files; remove those of workers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        owner = folder.name.removeprefix(FOLDER_PREFIX)
        if owner.isdigit() and not (PROC / owner).exists():
            shutil.rmtree(folder, ignore_errors=True)
    _process_folder().mkdir(mode=0o700, exist_ok=True)
    # vLLM may remember the value, so it is the same for every engine of this process.
    os.environ[SOCKET_FOLDER_VARIABLE] = str(_process_folder())


@contextlib.contextmanager
def use_process_folder() -> Iterator[None]:
    """Have processes that start inside the block keep their temporary files in that folder.

    vLLM's executor makes one through which its processes connect, and never removes it.
    """
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(_process_folder())
    try:
        yield
    finally:
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before


def find_shared_memory(processes: Iterable[ProcessHandle]) -> set[str]:
    """Return the paths of the shared memory that these processes map."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = (PROC / str(process.pid) / "maps").read_text()
            found.update(word for word in maps.split() if SEGMENT_PATTERN.fullmatch(word))
    return found


def _remove_leftovers(shared: Iterable[str]) -> None:
    shutil.rmtree(_process_folder(), ignore_errors=True)
    for path in shared:
        # By Python's own way first: its tracker would miss a segment that it knows.
        with contextlib.suppress(OSError, ValueError):
            segment = SharedMemory(path.removeprefix(SHM_FOLDER))
            segment.close()
            segment.unlink()
        with contextlib.suppress(OSError):
            os.unlink(path)


def _process_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}{os.getpid()}"


def end_started_processes(before: Collection[ProcessHandle]) -> None:
    """End what was started since `before`; a start whose processes are gone fails at once."""
    began = find_descendants(os.getpid()) - set(before)
    shared = find_shared_memory(began)
    kill_processes(began, float(PROCESS_STOP_SECONDS))
    _remove_leftovers(shared)


def shut_down_vllm(launched: LaunchedVllm) -> None:
    """End vLLM, its processes, and remove what they left."""
    mine = launched.processes
    mine |= {p for known in mine for p in find_descendants(known.pid)}
    shared = launched.segments | find_shared_memory(mine)
    try:
        launched.llm.shutdown(timeout=PROCESS_STOP_SECONDS)
    except Exception:  # whatever it was, its processes are ended below
        logger.exception("vLLM did not shut down in order")
    left = kill_processes(mine, float(PROCESS_STOP_SECONDS))
    if left:
        logger.error("processes of vLLM do not end: %s", sorted(p.pid for p in left))
    _remove_leftovers(shared)
