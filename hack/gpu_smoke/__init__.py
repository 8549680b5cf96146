"""Ten minutes on one GPU: each engine's worker is started and tried where only a GPU can tell.

`python -m gpu_smoke` runs it (`make gpu-smoke`). It uses what the tests use to start workers and to
judge tokens; nothing in here is imported by what is shipped.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "support" / "engine")]
