"""How long things may take in this package, and why."""

from __future__ import annotations

# builder.py

NODE_TOLERATION_SECONDS = 30
"""A pod on a lost node is given up this soon (Kubernetes' default is 300 s)."""


# gang_pods.py

GANG_TOKEN_SECONDS = 3600
"""The kubelet renews the token when four fifths of this have passed."""
