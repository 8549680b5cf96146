"""The operator's processes on a real cluster."""

from __future__ import annotations

from pathlib import Path

import rollout_local
from localkube import Cluster
from tests.support.api.apiclient import PODS, api_of


def operator_pids(cluster: Cluster) -> list[int]:
    """Processes of the operator's pods, as this machine numbers them."""
    pods = api_of(cluster).items(PODS.format(rollout_local.SYSTEM), fresh=True)
    uids = [pod["metadata"]["uid"].replace("-", "") for pod in pods]
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            group = (entry / "cgroup").read_text().replace("-", "").replace("_", "")
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"rollout-operator" in words and any(uid in group for uid in uids):
            found.append(int(entry.name))
    return found
