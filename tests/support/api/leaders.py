"""The operator that leads: who it is, its death, and its successor."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import rollout_local
from localkube import Cluster
from tests.support.api.apiclient import PODS, api_of
from tests.support.waiting import eventually

LEASE = (
    f"/apis/coordination.k8s.io/v1/namespaces/{rollout_local.SYSTEM}/leases/{rollout_local.RELEASE}"
)
TAKEOVER_SECONDS = 60.0
"""The Lease of a killed leader runs out after 15 s; then the standby reads everything anew."""


def leader(cluster: Cluster) -> str:
    """Identity of the operator that leads: `<pod>_<uuid>`; empty if nobody does."""
    holder: str = api_of(cluster).get(LEASE)["spec"].get("holderIdentity") or ""
    return holder


def kill_leader(cluster: Cluster) -> str:
    """Kill -9 the leading operator; returns its identity."""
    holder = leader(cluster)
    pod = api_of(cluster).get(f"{PODS.format(rollout_local.SYSTEM)}/{holder.split('_')[0]}")
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
    )
