"""Ranks of a trainer as processes: forked from one that has imported what they need, which takes each of them seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

_SERVER = multiprocessing.get_context("forkserver")
_PROGRAMS = (
    "tests.support.unit.rank_publish",
    "tests.support.engine.delta_rank",
    "tests.support.engine.moe_rank",
)
"""Where the `main` of ranks is."""
_LIBRARIES = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "httpcore",
    "xxhash",
)
"""What they import only when they first use it."""


class Rank:
    """A process; what it says to stderr is in a file."""

    def __init__(self, process: ForkServerProcess, said: Path) -> None:
        self._process, self._said = process, said

    @property
    def said(self) -> str:
        return self._said.read_text() if self._said.exists() else ""

    def status(self, seconds: float = 0.0) -> int | None:
        """Its exit status, negative for a signal; None: it has not ended within so many seconds."""
        self._process.join(seconds)
        return self._process.exitcode

    def send(self, signal: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal)


@contextlib.contextmanager
def ranks(main: Callable[..., None], count: int, folder: Path, *words: str) -> Iterator[list[Rank]]:
    """Run `main(rank, count, folder, *words)` for each rank; all have ended afterwards."""
    _start_server()
    made = []
    for rank in range(count):
        said = folder / f"said-{rank}"
        process = _SERVER.Process(target=_become, args=(main, said, rank, count, folder, *words))
        process.start()
        made.append((process, said))
    try:
        yield [Rank(process, said) for process, said in made]
    finally:
        for process, _ in made:
            process.kill()
            process.join(30)
            process.close()


def _start_server() -> None:
    """Start the process that ranks are forked from, unless it runs; it knows no path but that of its environment."""
    needed = [name for name in _PROGRAMS if name in sys.modules]
    _SERVER.set_forkserver_preload([*_LIBRARIES, *needed])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()


def _become(main: Callable[..., None], said: Path, *arguments: object) -> None:
    file = os.open(said, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(file, 2)
    main(*arguments)
