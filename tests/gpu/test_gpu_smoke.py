"""The engines on a real GPU, each through every check of `make gpu-smoke`; skipped where there is none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpu_smoke.__main__ import Row, main, run, table
from gpu_smoke.checks import CHECKS
from gpu_smoke.scene import Plan
from rollout_worker.engine import ENGINES

QUICK = ["start", "outputs", "limits", "abort asleep"]
"""Checks that need no load."""


def missing() -> str | None:
    """Why there is no GPU here, None if there is one."""
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA GPU here: nvidia-smi is not installed"
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    return None if done.returncode == 0 else f"no NVIDIA GPU here: {done.stderr or done.stdout}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_on_a_gpu(engine: str, tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    plan = Plan(device="cuda", size="0.5b", out=tmp_path, idle_seconds=90)
    if plan.python(engine) is None:
        pytest.skip(f"{engine} is not installed in this environment")
    rows = list(run(plan, [engine], list(CHECKS)))
    assert "failed" not in {row.outcome for row in rows}, table(rows)


def test_the_checks_run_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [word for name in QUICK for word in ("--check", name)]
    status = main(["hf", "--device", "cpu", "--out", str(tmp_path), *checks])
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert shown.count("| hf |") == len(QUICK)
    assert "64 greedy tokens right" in shown
    assert {"results.json", "hf"} <= {path.name for path in tmp_path.iterdir()}


def test_an_engine_that_is_not_installed_is_told_and_nothing_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(device="cuda", size="tiny", out=tmp_path, idle_seconds=0)
    if plan.python("sglang") is not None:
        pytest.skip("sglang is installed in this environment")
    assert main(["sglang", "--out", str(tmp_path)]) == 1
    assert "sglang is not installed: give --python sglang=PATH" in capsys.readouterr().out


def test_a_failure_is_told_in_the_table() -> None:
    rows = [
        Row("hf", "start", "passed", "Ready", 3.2),
        Row("hf", "sleep", "failed", "asleep at level 1\nit holds 9,000 MiB", 1.0),
    ]
    assert table(rows).splitlines()[2:] == [
        "| hf | start | ok | 3 | Ready |",
        "| hf | sleep | FAILED | 1 | asleep at level 1 it holds 9,000 MiB |",
    ]
