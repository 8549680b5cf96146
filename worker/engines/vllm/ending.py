"""The end of vLLM's processes, whether it serves or is still starting. Everything here blocks."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

from rollout_worker.observe import processes

from . import leftovers
from .launch import Launched

logger = logging.getLogger(__name__)

STOP_SECONDS = 5
"""What vLLM's processes get to end by themselves."""


def end_start(before: Collection[processes.Process]) -> None:
    """End what began since `before`; without its processes a start fails at once."""
    began = processes.descendants(os.getpid()) - set(before)
    shared = leftovers.segments(began)
    processes.end(began, float(STOP_SECONDS))
    leftovers.remove(shared)


def shut_down(launched: Launched) -> None:
    """End vLLM and whatever it left."""
    mine = launched.processes
    mine |= {p for known in mine for p in processes.descendants(known.pid)}
    shared = launched.segments | leftovers.segments(mine)
    try:
        launched.llm.shutdown(timeout=STOP_SECONDS)
    except Exception:  # whatever it was, its processes are ended below
        logger.exception("vLLM did not shut down in order")
    left = processes.end(mine, float(STOP_SECONDS))
    if left:
        logger.error("processes of vLLM do not end: %s", sorted(p.pid for p in left))
    leftovers.remove(shared)
