"""How long things may take in this package, in seconds, and why."""

from __future__ import annotations

READ_SECONDS = 10.0
"""An API server that has not answered a read by then is reported: somebody waits at a terminal."""

WAIT_SECONDS = 600.0
"""Default of `--timeout`: a large model loads for minutes."""

LOOK_SECONDS = 1.0
"""`wait` and `status --watch` look this often; status itself changes once a second at most."""

UNSEEN_SECONDS = 30.0
"""An operator looks at a new object within a second; after this long without a status it is not there."""
