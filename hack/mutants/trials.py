"""Run tests on mutants: each in a process of its own, in a copy of the tree.

The processes are forked from this one, which has imported the libraries and nothing of ours, so a
mutant costs what its tests cost and not another start of Python.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
COPIED = ("operator", "worker", "client", "tests", "hack", "src", "examples", "pyproject.toml")
LIBRARIES = (
    *("pytest", "pytest_asyncio", "hypothesis", "pydantic", "aiohttp", "httpx", "kopf"),
    *("prometheus_client", "numpy", "safetensors.numpy"),
)
ARGUMENTS = (
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)
POLL_SECONDS = 0.01

Outcome = Literal["killed", "survived", "timeout"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A module's text, and the tests that must notice it."""

    path: str
    text: str
    tests: tuple[str, ...]
    seconds: float


class Broken(Exception):
    """The tests can't be run, or they fail on the tree as it is."""


class Bench:
    """Copies of the tree, one for each process at a time."""

    def __init__(self, trees: Sequence[Path]) -> None:
        self._trees = list(trees)
        for name in LIBRARIES:
            importlib.import_module(name)

    def baseline(self, path: str, tests: tuple[str, ...]) -> float:
        """Run the tests on the tree as it is; return how many seconds they take."""
        began = time.monotonic()
        text = (ROOT / path).read_text()
        [(_, outcome)] = self.run([Trial(path, text, tests, 600.0)])
        if outcome != "survived":
            raise Broken(f"{' '.join(tests)} fail without a mutant")
        return time.monotonic() - began

    def run(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        """Run all; yields each as it ends."""
        waiting, free = iter(trials), list(self._trees)
        running: list[_Running] = []
        try:
            while True:
                while free and (trial := next(waiting, None)) is not None:
                    running.append(_Running(trial, free.pop()))
                if not running:
                    return
                time.sleep(POLL_SECONDS)
                for each in [r for r in running if r.has_ended()]:
                    running.remove(each)
                    free.append(each.tree)
                    yield each.trial, each.outcome()
        finally:
            for each in running:
                each.kill()


class _Running:
    def __init__(self, trial: Trial, tree: Path) -> None:
        self.trial, self.tree = trial, tree
        self._late = False
        self._end = time.monotonic() + trial.seconds
        (tree / trial.path).write_text(trial.text)
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_test, args=(tree, trial.tests), daemon=True)
        self._process.start()

    def has_ended(self) -> bool:
        if self._process.is_alive() and time.monotonic() > self._end:
            self._late = True
            self.kill()
        return not self._process.is_alive()

    def kill(self) -> None:
        if self._process.pid is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()
        self._process.join()

    def outcome(self) -> Outcome:
        (self.tree / self.trial.path).write_text((ROOT / self.trial.path).read_text())
        if self._late:
            return "timeout"
        if self._process.exitcode in (4, 5):
            raise Broken(f"pytest finds no tests in {self.trial.tests}")
        return "killed" if self._process.exitcode else "survived"


def _test(tree: Path, tests: tuple[str, ...]) -> None:
    """The child: run pytest on the copy, silently."""
    os.setsid()
    os.chdir(tree)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(tree / "src"))
    os.environ["PYTHONPATH"] = str(tree / "src")
    sink = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(sink, number)
    import pytest

    os._exit(int(pytest.main([*ARGUMENTS, *tests])))


@contextmanager
def bench(jobs: int) -> Iterator[Bench]:
    """Make the copies, and remove them at the end."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Path(folder, str(number)) for number in range(jobs)]
        for tree in trees:
            for name in COPIED:
                _copy(ROOT / name, tree / name)
        yield Bench(trees)


def _copy(source: Path, to: Path) -> None:
    to.parent.mkdir(exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, to, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy2(source, to)
