"""The engines that the contract suite runs, and how each is started here: small, on CPU.

`make` gives an engine that the development environment can't hold an environment of its own. An
engine is tried as soon as the worker can create it (`rollout_worker.engines.ENGINES`).
ROLLOUT_ENGINES=hf,vllm restricts the list; otherwise a missing environment is a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollout_worker.engine import ENGINES

ROOT = Path(__file__).resolve().parents[3]
CACHE = Path(os.environ.get("ROLLOUT_CACHE", ROOT / ".cache"))

HANG_SECONDS = 8
"""Step deadline: one engine is stopped on purpose, and no other step of a busy machine takes so long."""
ROWS = 32
"""Most outputs in one step: what tests run side by side fits, and a few more fill the queue."""
QUEUE = 40
"""Most outputs that wait: with those that run, more than any test of load has at once."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How to run one engine.

    `flags` of every worker; those of the suite's are `narrow`, so that at most `ROWS` outputs run
    at once, and `impatient`: a step of `HANG_SECONDS` counts as hung. `parser`: of tool calls, one of the engine's own for
    the format that the tiny model's template shows; the suite names it in a flag. `in_process`: it has no
    process that could die alone. `serve`: what Python runs, with the flags of `rollout-worker serve`.
    """

    name: str
    python: Path
    flags: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    impatient: tuple[str, ...] = ()
    parser: str = "hermes"
    env: Mapping[str, str] = field(default_factory=dict)
    in_process: bool = False
    start_seconds: float = 480.0
    serve: tuple[str, ...] = ("-m", "rollout_worker", "serve")

    def __str__(self) -> str:
        return self.name

    @property
    def engine(self) -> str:
        """What the worker calls it."""
        return self.name.partition("-")[0]


def engine_args(*words: str) -> tuple[str, ...]:
    """The engine's own flags as flags of the worker."""
    return tuple(f"--engine-arg={word}" for word in words)


KINDS = {
    kind.name: kind
    for kind in (
        EngineKind(
            "hf",
            Path(sys.executable),
            narrow=engine_args(f"--max-batch-size={ROWS}"),
            impatient=engine_args(f"--step-deadline-seconds={HANG_SECONDS}"),
            in_process=True,
        ),
        EngineKind(
            "vllm",
            CACHE / "env-vllm" / "bin" / "python",
            parser="qwen3_json",
            narrow=engine_args(f"--max-num-seqs={ROWS}"),
            impatient=engine_args(f"--step-deadline-seconds={HANG_SECONDS}"),
        ),
        EngineKind(
            "sglang",
            CACHE / "env-sglang" / "bin" / "python",
            parser="qwen25",
            narrow=engine_args(f"--max-running-requests={ROWS}"),
            impatient=engine_args(f"--step-deadline-seconds={HANG_SECONDS}"),
        ),
    )
}


EMBEDDED = tuple(
    replace(
        kind,
        name=f"{kind.name}-embedded",
        serve=(str(Path(__file__).with_name("embedded_serve.py")),),
    )
    for kind in KINDS.values()
)
"""Each in a trainer's process: the whole contract but what ends or can't load an engine, which ends that worker."""


def kinds() -> list[EngineKind]:
    """Every engine of the worker, in its order."""
    return [KINDS[name] for name in ENGINES]


def left_out(kind: EngineKind) -> str | None:
    """Why this run leaves an engine out on purpose, or None."""
    chosen = os.environ.get("ROLLOUT_ENGINES", "")
    if not chosen or kind.name in chosen.replace(",", " ").split():
        return None
    return f"ROLLOUT_ENGINES={chosen} leaves {kind.name} out"


def read_program_answer(
    words: Sequence[str | Path], seconds: float = 240, folder: Path | None = None, **env: str
) -> Any:
    """Run a program, perhaps in a folder, which must succeed, and return the JSON of its last line."""
    done = subprocess.run(
        words, env={**os.environ, **env}, cwd=folder, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
