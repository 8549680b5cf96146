"""Whether a commit through a rank's ring pays on this GPU (`ring_speed`)."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from .scene import CALL_SECONDS, NotHere, Scene, Wrong

WAYS = ("ring", "locked", "plain")


def compare_ways(scene: Scene) -> str:
    """A share goes through a ring in less time than by locking the version, and than by neither."""
    if scene.kind.in_process or scene.plan.device != "cuda":
        raise NotHere("no rank copies to a GPU")
    command = [str(scene.kind.python), "-m", "gpu_smoke.ring_speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_SECONDS)
    if done.returncode:
        raise Wrong(f"ring_speed: {done.stderr[-300:]}")
    return judge_ways(json.loads(done.stdout))


def judge_ways(found: dict[str, Any]) -> str:
    """Return in a few words what `ring_speed` has printed.

    Raises:
        Wrong: The ring is not the fastest way.
    """
    rates = {
        way: [found["nbytes"] / 2e9 / found[way][kind] for kind in ("rows", "columns")]
        for way in WAYS
    }
    told = ", ".join(
        f"{way} {rows:.1f} and {columns:.1f}" for way, (rows, columns) in rates.items()
    )
    told = (
        f"GB/s of rows and columns: {told}; locking takes {found['locking'] / found['nbytes'] * 1e9:.3f} s"
        f" a GB, the ring {found['making']:.2f} s once"
    )
    for kind in ("rows", "columns"):
        others = found["locking"] + found["locked"][kind], found["plain"][kind]
        if found["ring"][kind] > min(others):
            raise Wrong(f"a ring is slower for {kind}: {told}")
    return told
