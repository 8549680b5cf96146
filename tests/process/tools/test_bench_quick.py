"""A benchmark runs from end to end, in a few seconds: it needs no cluster and no engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_benchmark_runs_quickly_and_prints_ratios() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "client", "--quick"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    table, _ = done.stdout.split("\nTook ")
    assert "`python -m bench client --quick`" in table
    assert re.search(r" \d[\d.]*x\b", table), "no ratio"
    assert ": met" not in table, "a verdict on fewer than five rounds"
    assert ": MISSED" not in table
