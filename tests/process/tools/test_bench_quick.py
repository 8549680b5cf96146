"""Three benchmarks run from end to end, in a few seconds: they need no cluster and no engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["balancer", "client", "turn"])
def test_a_benchmark_runs_quickly_and_prints_ratios(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", name, "--quick"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"python -m bench {name} --quick" in done.stdout
    assert re.search(r" \d[\d.]*x\b", done.stdout), "no ratio"
    assert ": met" not in done.stdout, "a verdict on fewer than five rounds"
    assert ": MISSED" not in done.stdout
