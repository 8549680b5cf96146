"""What vLLM's processes leave behind when they are killed: sockets, files and shared memory.

Sockets and files go to a folder of this process, which is removed with the engine. Segments of
shared memory are noted while their owners live: only their memory maps tell whose they are.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from rollout_worker.observe.processes import PROC, Process

VARIABLE = "VLLM_RPC_BASE_PATH"
FOLDER = "rollout-vllm-"
SHM = "/dev/shm/"
OURS = re.compile(SHM + r"(?:psm_|torch_|sem\.mp-)[^/]+")
"""Names that Python and torch give; weights that lie there, too, are somebody else's."""


def prepare() -> None:
    """Give vLLM a folder for its sockets and files; remove those of workers that were killed."""
    home = Path(tempfile.gettempdir())
    for folder in home.glob(f"{FOLDER}*"):
        owner = folder.name.removeprefix(FOLDER)
        if owner.isdigit() and not (PROC / owner).exists():
            shutil.rmtree(folder, ignore_errors=True)
    _folder().mkdir(mode=0o700, exist_ok=True)
    # vLLM may remember the value, so it is the same for every engine of this process.
    os.environ[VARIABLE] = str(_folder())


@contextlib.contextmanager
def temporary_files() -> Iterator[None]:
    """Let processes that are started meanwhile keep their temporary files in that folder, too.

    vLLM's executor makes one for its processes to meet, and removes it never.
    """
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(_folder())
    try:
        yield
    finally:
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before


def segments(processes: Iterable[Process]) -> set[str]:
    """Return the paths of the shared memory that these processes map."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = (PROC / str(process.pid) / "maps").read_text()
            found.update(word for word in maps.split() if OURS.fullmatch(word))
    return found


def remove(shared: Iterable[str]) -> None:
    """Remove sockets and files, and these segments as far as they are still there. Blocks."""
    shutil.rmtree(_folder(), ignore_errors=True)
    for path in shared:
        # By Python's own way first: its tracker would miss a segment that it knows.
        with contextlib.suppress(OSError, ValueError):
            segment = SharedMemory(path.removeprefix(SHM))
            segment.close()
            segment.unlink()
        with contextlib.suppress(OSError):
            os.unlink(path)


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"{FOLDER}{os.getpid()}"
