"""Benchmarks: one command each, every figure with a baseline measured in the same run.

`python -m bench --help` lists them. Each module has a `SUMMARY` and `run(options)`, which
returns a `Result`, or several one by one.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT / folder) for folder in ("tests/support", "hack", "hack/cluster")]
