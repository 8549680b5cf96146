"""How long things may take in this package's own modules, in seconds, and why."""

STOP_TRACING_SECONDS = 3.0
"""What a process gives its last spans: a collector that does not answer must not cost a pod its grace period."""
