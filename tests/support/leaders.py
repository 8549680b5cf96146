"""The operator that leads: who it is, its death, and its successor."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import rollout_local
from localkube import Cluster
from pools import eventually

TAKEOVER_SECONDS = 60.0
"""The Lease of a killed leader runs out after 15 s; then the standby reads everything anew."""


def leader(cluster: Cluster) -> str:
    """Identity of the operator that leads: `<pod>_<uuid>`."""
    return cluster.kubectl(
        "-n", rollout_local.SYSTEM, "get", "lease", "rollout-operator",
        "-o", "jsonpath={.spec.holderIdentity}",
    ).strip()  # fmt: skip


def kill_leader(cluster: Cluster) -> str:
    """Kill -9 the leading operator; returns its identity."""
    holder = leader(cluster)
    pod = json.loads(
        cluster.kubectl(
            "-n", rollout_local.SYSTEM, "get", "pod", holder.split("_")[0], "-o", "json"
        )
    )
    uid = pod["metadata"]["uid"].replace("-", "")
    found = [e for e in Path("/proc").iterdir() if e.name.isdigit() and _is_operator(e, uid)]
    assert found, f"no process of {holder}"
    for entry in found:
        os.kill(int(entry.name), signal.SIGKILL)
    return holder


def _is_operator(process: Path, uid: str) -> bool:
    try:
        words = (process / "cmdline").read_bytes()
        group = (process / "cgroup").read_text().replace("-", "").replace("_", "")
    except OSError:
        return False
    return b"rollout-operator" in words and uid in group


def taken_over(cluster: Cluster, before: str) -> None:
    """Wait until another operator leads."""
    eventually(
        f"somebody but {before} leads",
        lambda: leader(cluster) not in (before, ""),
        seconds=TAKEOVER_SECONDS,
        every=0.5,
    )
