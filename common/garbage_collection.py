"""What Python's garbage collector may do, and when: a collection stops all threads of a process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keep Python from collecting garbage inside the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze_heap() -> None:
    """Collect new garbage, and exclude the objects that are alive from every later collection.

    A collection stops all threads. Over the objects of torch, transformers and an engine it takes a quarter of a second
    and more, and a worker over vLLM that answered short requests spent two fifths of its CPU so; without them it takes
    milliseconds. They stay excluded for the engines that follow in this process: an engine that leaves much in cycles
    thaws the heap when it stops.
    """
    gc.collect()
    gc.freeze()
