"""Durations of what the engines share, each with its reason."""

from __future__ import annotations

RESOLVE_RETRY_SECONDS = 1.0
"""Between two look-ups of the head's name: the cluster's DNS learns of a pod seconds after its start."""

RANK_CALL_SECONDS = 30.0
"""For a call of an engine's ranks, which first finish the step under way."""

MIN_MAPPING_SECONDS = 10.0
"""For ranks to map a sink, however small: a busy rank may need seconds to begin. Locking of pages adds to it."""

TALLY_POLL_SECONDS = 0.005
"""Between two looks at how many ranks have mapped a sink: a stage lasts so much longer at the most."""

STOP_POLL_SECONDS = 0.2
"""Between two looks of a waiting call at whether the engine was stopped: a stop waits so long at the most."""

FREEING_WAIT_SECONDS = 10.0
"""For memory that is being freed before more is taken: a thread frees gigabytes in less."""
