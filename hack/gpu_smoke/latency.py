"""How long a reader waits for a token while weights are staged."""

from __future__ import annotations

import time

from bench.rigs.worker import streaming

from .scene import Scene, Wrong

STAGED_BYTES = 32 << 30
"""Staged on a GPU while a reader waits, version after version."""
FEW_VERSIONS = 3
"""How many versions are staged without a GPU."""
MOST_SECONDS = 120.0
GAP_SECONDS = 0.5
"""On a GPU a token may take this much longer than twice the longest wait without staging."""


def latency_while_staging(scene: Scene) -> str:
    """Tokens come no later than before while ranks map 32 GiB of staged weights."""
    size = sum(file.stat().st_size for file in scene.next_folder.glob("*.safetensors"))
    on_gpu = scene.plan.device == "cuda"
    with streaming(scene.worker, 1, scene.plan.length) as streams:
        began = time.monotonic()
        time.sleep(2 if on_gpu else 1)
        quiet = streams.longest(began, time.monotonic())
        began, staged = time.monotonic(), 0
        wanted = STAGED_BYTES if on_gpu else FEW_VERSIONS * size
        while staged < wanted and time.monotonic() - began < MOST_SECONDS:
            scene.stage()
            scene.worker.call_verb("weights/discard", epoch=1, version=scene.version + 1)
            staged += size
        busy = streams.longest(began, time.monotonic())
    if on_gpu and busy > 2 * quiet + GAP_SECONDS:
        raise Wrong(
            f"a token took {busy:.2f} s while {staged / 2**30:.1f} GiB were staged, {quiet:.2f} s before"
        )
    return (
        f"longest wait for a token {busy * 1000:.0f} ms while {staged / 2**30:.1f} GiB were staged, "
        f"{quiet * 1000:.0f} ms before"
    )
