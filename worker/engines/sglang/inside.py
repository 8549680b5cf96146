"""What is changed in each process of SGLang: where it lets itself be extended, or has a fault."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from sglang.srt.managers import load_snapshot
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

from . import sampler
from .child import die_with_parent

_installed = False


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Be a scheduler of SGLang, changed."""
    die_with_parent()
    install()
    return run_scheduler_process(*args, **kwargs)


def install() -> None:
    """Change this process, before SGLang starts in it."""
    global _installed
    if _installed:
        return
    _installed = True
    sampler.register()
    _rest_while_paused()
    # Segments in /dev/shm outlive a killed process; our folder goes with the engine.
    load_snapshot.shm_path_for = _snapshot_path


def _snapshot_path(ipc_name: str) -> str:
    return os.path.join(tempfile.gettempdir(), f"loads-{os.path.basename(ipc_name)}")


def _rest_while_paused() -> None:
    """Wait for commands while paused: SGLang's loop would turn as fast as it can."""
    record = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_rest(self: Any) -> None:
        record(self)
        if self.idle_sleeper is not None:
            self.idle_sleeper.maybe_sleep()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_rest
