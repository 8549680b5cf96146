"""Try each engine on one GPU in ten minutes, and print a table.

    python -m gpu_smoke                          every engine that is installed, on the first GPU
    python -m gpu_smoke hf --device cpu          one engine, on a machine without a GPU
    python -m gpu_smoke vllm --python vllm=/opt/rollout/bin/python --size 0.5b

Each engine's worker is started once and goes through all checks. The models have random weights
and are made on the spot. Logs, process tables and the results are kept in the folder `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rollout_worker.engine import ENGINES
from tests.support.engine.engine_kinds import engine_args

from .checks import CHECKS
from .scene import MOE, SIZES, Models, NotHere, Plan, Scene, Wrong

MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "-"}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `outcome`: passed, failed or skipped."""

    engine: str
    check: str
    outcome: str
    told: str
    seconds: float


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
"""Checks that need a worker of their own: another model, or more than one GPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if a check failed or none ran."""
    arguments = _parser().parse_args(argv)
    plan = Plan(
        device=arguments.device,
        size=arguments.size or ("tiny" if arguments.device == "cpu" else "0.5b"),
        out=arguments.out or Path(tempfile.mkdtemp(prefix="gpu-smoke-")),
        idle_seconds=arguments.idle,
        pythons={name: Path(path) for name, path in arguments.python},
    )
    plan.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for row in run(plan, arguments.engines or ENGINES, arguments.check or [*CHECKS, *VARIANTS]):
        rows.append(row)
        _keep(plan.out / "results.json", rows)  # after each check, as this process may be killed
    _say("\n" + table(rows))
    _say(f"\nlogs and results: {plan.out}")
    ran = any(row.outcome == "passed" for row in rows)
    return 0 if ran and not any(row.outcome == "failed" for row in rows) else 1


def run(plan: Plan, engines: Sequence[str], checks: Sequence[str]) -> Iterator[Row]:
    """Yield the result of each check of each engine as soon as it is known."""
    models = Models(plan.size, device=plan.device)
    for engine in engines:
        if plan.python(engine) is None:
            why = f"{engine} is not installed: give --python {engine}=PATH"
            yield _told(Row(engine, "start", "skipped", why, 0.0))
            continue
        usual = [name for name in checks if name in CHECKS]
        if usual:
            yield from _run_engine(plan, engine, models, usual)
        for name in checks:
            if name in VARIANTS:
                yield from _run_variant(plan, engine, name)


def _run_engine(
    plan: Plan, engine: str, models: Models, checks: Sequence[str], prefix: str = ""
) -> Iterator[Row]:
    began = time.monotonic()
    try:
        scene = Scene(plan, engine, models)
    except Exception as error:  # noqa: BLE001 - the other engines are tried all the same
        seconds = time.monotonic() - began
        yield _told(
            Row(engine, f"{prefix}start", "failed", f"{type(error).__name__}: {error}", seconds)
        )
        return
    try:
        for name in checks:
            row = _check(scene, name)
            yield _told(replace(row, check=prefix + row.check))
            if row.outcome == "failed":
                # Else each later check would fail of the same.
                with contextlib.suppress(Exception):
                    scene.settle()
    finally:
        scene.close()


def _run_variant(plan: Plan, engine: str, name: str) -> Iterator[Row]:
    """Yield the results of its checks, each under the variant's and the check's name."""
    try:
        own, models = VARIANTS[name].planned(plan, name, engine)
    except NotHere as error:
        yield _told(Row(engine, name, "skipped", str(error), 0.0))
        return
    yield from _run_engine(own, engine, models, VARIANTS[name].checks, f"{name}: ")


def _check(scene: Scene, name: str) -> Row:
    began = time.monotonic()
    try:
        outcome, told = "passed", CHECKS[name](scene)
    except NotHere as error:
        outcome, told = "skipped", str(error)
    except Wrong as error:
        outcome, told = "failed", str(error)
    except Exception as error:  # noqa: BLE001 - a worker that fails is what the table is for
        outcome, told = "failed", f"{type(error).__name__}: {error}"
    return Row(scene.engine, name, outcome, told, time.monotonic() - began)


def table(rows: Sequence[Row]) -> str:
    lines = ["| engine | check | | s | found |", "|---|---|---|---|---|"]
    for row in rows:
        told = " ".join(row.told.split())[:300]
        mark = MARKS[row.outcome]
        lines.append(f"| {row.engine} | {row.check} | {mark} | {row.seconds:.0f} | {told} |")
    return "\n".join(lines)


def _keep(file: Path, rows: Sequence[Row]) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    partial.replace(file)


def _told(row: Row) -> Row:
    _say(f"{row.engine:7} {row.check:20} {MARKS[row.outcome]:7} {row.told[:200]}")
    return row


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_smoke", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "engines", nargs="*", metavar="ENGINE", choices=[*ENGINES, []], help="hf, vllm, sglang"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--size", choices=SIZES, help="of the model (default: 0.5b on a GPU, else tiny)"
    )
    parser.add_argument(
        "--python", action="append", default=[], type=_pair, metavar="ENGINE=PATH",
        help="interpreter of an engine that is not in this environment",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="append", choices=[*CHECKS, *VARIANTS], help="only this one (repeatable)"
    )
    parser.add_argument("--idle", type=float, default=90, help="seconds (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder (default: a new one)")
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or name not in ENGINES:
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE=PATH")
    return name, path


if __name__ == "__main__":
    sys.exit(main())
