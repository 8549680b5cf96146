"""Ranks of a trainer as processes: forked from one that has imported torch, which takes each of them seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch.distributed.tensor"])


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


def _become(main: Callable[..., None], said: Path, *arguments: object) -> None:
    file = os.open(said, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(file, 2)
    main(*arguments)
