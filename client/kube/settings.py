"""How long things may take in this package, and why."""

from __future__ import annotations

# cluster_client.py

REQUEST_TIMEOUT_SECONDS = 30.0

WATCH_TIMEOUT_SECONDS = 240
"""After so long the API server ends a watch, and everything is listed again: nothing that a watch
missed stays unknown for longer."""

WATCH_SLACK_SECONDS = 15.0

MIN_RETRY_PAUSE_SECONDS = 0.2

MAX_RETRY_PAUSE_SECONDS = 10.0


# exec_plugin.py

PLUGIN_TIMEOUT_SECONDS = 60.0

EXPIRY_MARGIN_SECONDS = 30.0
"""How long before its end a credential is not used any more: clocks differ, requests take time."""

UNDATED_LIFETIME_SECONDS = 300.0
"""How long one without an end is used."""
