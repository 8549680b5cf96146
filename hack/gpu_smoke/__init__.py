"""Ten minutes on one GPU: start each engine's worker, and check what only a GPU can show.

`python -m gpu_smoke` runs it (`make gpu-smoke`), with the tests' own code to start workers and to judge tokens.
Nothing that is shipped imports it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "support" / "engine")]
