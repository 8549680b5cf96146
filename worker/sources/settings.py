"""Numbers of this package, each with its reason."""

from __future__ import annotations

import os

HASHING_THREADS = min(4, os.cpu_count() or 1)
"""How many threads read and hash one version at most. One that copies and hashes reaches
two thirds of what memory gives, so a few are enough; more would take processors from requests that are served."""
