#!/usr/bin/env python3
"""`make test`: every test, in three lanes side by side. See `lanes`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "cluster"))

from lanes.command import main

if __name__ == "__main__":
    sys.exit(main())
