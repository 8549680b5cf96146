"""Imports an engine once, and forks for each program that is to have it.

    python program_nursery.py vllm|sglang

Takes a line of JSON from stdin for each program, `{"program": file, "words": […], "folder": …, "env": {…}}`, and runs one
after the other: in the folder, with `in` as its stdin, `out` and `err` as what it says; `status` has its exit status.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from rollout_common.parent_death import die_with_parent
from rollout_worker.engines import find_parsers

MODULES = {
    "vllm": ("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
    "sglang": ("sglang.srt.managers.scheduler",),
}


def import_engine(engine: str) -> None:
    before = dict(os.environ)
    find_parsers(engine)
    if engine == "sglang":  # a worker in a trainer's process imports its parsers
        assert dict(os.environ) == before, "the import of SGLang's parsers changes variables"
    for name in MODULES[engine]:
        importlib.import_module(name)


def become(order: dict[str, Any]) -> NoReturn:
    """Run a program as the main one of this process."""
    status = 1
    try:
        die_with_parent()
        os.chdir(order["folder"])
        for target, (name, flags) in enumerate(
            [
                ("in", os.O_RDONLY),
                ("out", os.O_WRONLY | os.O_CREAT),
                ("err", os.O_WRONLY | os.O_CREAT),
            ]
        ):
            os.dup2(os.open(name, flags, 0o600), target)
        os.environ.update(order["env"])
        sys.stdin = open(0)  # noqa: SIM115 - this process' own
        sys.argv = [order["program"], *order["words"]]
        runpy.run_path(order["program"], run_name="__main__")
        status = 0
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(engine: str) -> None:
    import_engine(engine)
    for line in sys.stdin.buffer:
        order = json.loads(line)
        sys.stdout.flush()  # else its child says it once more
        if (pid := os.fork()) == 0:
            become(order)
        _, status = os.waitpid(pid, 0)
        told = Path(order["folder"], "told")
        told.write_text(str(status))
        told.rename(told.with_name("status"))


if __name__ == "__main__":
    main(sys.argv[1])
