"""Checks that need a worker of their own: another model, or more than one GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.support.engine.engine_kinds import engine_args

from .scene import MOE, Models, NotHere, Plan


@dataclass(frozen=True, slots=True)
class Variant:
    """Some of the checks with another worker. `flags`: its flags by engine; other engines can't run it.

    `size`: of a model other than the plan's. `gpus`: how many it needs.
    """

    checks: Sequence[str]
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    size: str | None = None
    gpus: int = 1

    def planned(self, plan: Plan, name: str, engine: str) -> tuple[Plan, Models]:
        """Return the plan and the models of its worker; `NotHere` if the engine or the machine can't run it."""
        if engine not in self.flags:
            raise NotHere(f"{engine} can't")
        if plan.device == "cpu" and (self.gpus > 1 or (self.size == MOE and engine == "sglang")):
            raise NotHere("needs GPUs")
        if self.gpus > 1 and (found := gpus()) < self.gpus:
            raise NotHere(f"needs {self.gpus} GPUs, here is {found}")
        own = replace(plan, out=plan.out / name.replace(" ", "-"), size=self.size or plan.size)
        dtype = "float32" if plan.device == "cpu" else "bfloat16"
        own = replace(own, extra=tuple(self.flags[engine]))
        return own, Models(own.size, dtype, plan.device)


def gpus() -> int:
    """Return how many GPUs CUDA may use here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip()])
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    return len(done.stdout.splitlines()) if done.returncode == 0 else 0


VARIANTS: dict[str, Variant] = {
    "two GPUs": Variant(
        ("start", "outputs", "there and back", "held ahead", "sleep"),
        {
            "vllm": engine_args("--tensor-parallel-size=2"),
            "sglang": engine_args("--tp-size=2"),
        },
        gpus=2,
    ),
    MOE: Variant(("start", "there and back", "sleep"), {"vllm": (), "sglang": ()}, size=MOE),
}
