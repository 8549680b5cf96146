"""Where things are kept, how progress is printed, and the one error that a user sees."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
SOURCES = Path(__file__).resolve().parents[1]
"""The folder `hack/cluster`."""

DEFAULT_NAME = "rollout"
TAIL_LINES = 8


class ClusterError(Exception):
    """The surroundings or the request can't work; the text is one sentence with the way out."""


def cache() -> Path:
    """Return the folder of all heavy things: `$ROLLOUT_CACHE`, or `.cache` of the repository."""
    return Path(os.environ.get("ROLLOUT_CACHE") or REPOSITORY / ".cache").absolute()


def binaries() -> Path:
    return cache() / "bin"


def images() -> Path:
    """Return the folder of OCI archives that nodes import."""
    return cache() / "images"


def clusters() -> Path:
    """Return the folder whose children are the clusters' states."""
    return cache() / "clusters"


def say(text: str) -> None:
    """Print progress; results go to stdout, progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def read_tail(log: Path) -> str:
    """Return the last lines of a log, for an error or as progress."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


@contextmanager
def step(name: str) -> Iterator[None]:
    """Print how long a step took; nothing is printed for a step that fails."""
    began = time.monotonic()
    yield
    say(f"  {name:<34} {time.monotonic() - began:6.1f} s")


@contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Let one process at a time make this part of the cache, while others wait for its result."""
    with (cache() / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"  waiting for another process of this cache ({name})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
