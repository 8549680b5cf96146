"""Benchmarks: one command each, every figure next to a baseline measured in the same run.

    commands/   one file for each `python -m bench NAME`: what it measures, and against what
    rigs/       what a measurement is set up with: models, workers, servers, clusters
    figures.py  what is asked for; figures with their spread and verdict
    tables.py   their tables, and docs/benchmarks.md

`python -m bench --help` lists the commands by the first lines of their files. Each has a
`run(options)` that returns a `Result`, or yields several.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in (".", "hack", "hack/cluster")]
