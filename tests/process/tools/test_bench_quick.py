"""Two benchmarks run from end to end, in a few seconds: they need no cluster and no engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("client", "turn")


def test_benchmarks_run_quickly_and_print_ratios() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", *NAMES, "--quick"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    *tables, _ = done.stdout.split("\nTook ")
    for name, table in zip(NAMES, tables, strict=True):
        assert f"`python -m bench {name} --quick`" in table
        assert re.search(r" \d[\d.]*x\b", table), "no ratio"
        assert ": met" not in table, "a verdict on fewer than five rounds"
        assert ": MISSED" not in table
