"""How long a reader waits for a token while weights are staged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

from tests.support.engine.workers import PROMPT, events
from tests.support.waiting import until_sync

from .scene import CALL_SECONDS, Scene, Wrong

STAGED_BYTES = 32 << 30
"""Staged on a GPU while a reader waits, version after version."""
FEW_VERSIONS = 3
"""How many versions are staged without a GPU."""
MOST_SECONDS = 120.0
GAP_SECONDS = 0.5
"""On a GPU a token may take this much longer than twice the longest wait without staging."""


def latency_while_staging(scene: Scene) -> str:
    """Tokens come no later than before while ranks map 32 GiB of staged weights."""
    reader = Reader(scene)
    quiet = reader.longest(lambda: time.sleep(2 if scene.plan.device == "cuda" else 1))
    staged = 0

    def stage() -> None:
        nonlocal staged
        began, size = time.monotonic(), scene.version_bytes
        wanted = STAGED_BYTES if scene.plan.device == "cuda" else FEW_VERSIONS * size
        while staged < wanted and time.monotonic() - began < MOST_SECONDS:
            scene.stage()
            scene.discard()
            staged += size

    busy = reader.longest(stage)
    if scene.plan.device == "cuda" and busy > 2 * quiet + GAP_SECONDS:
        raise Wrong(
            f"a token took {busy:.2f} s while {staged / 2**30:.1f} GiB were staged, {quiet:.2f} s before"
        )
    return (
        f"longest wait for a token {busy * 1000:.0f} ms while {staged / 2**30:.1f} GiB were staged, "
        f"{quiet * 1000:.0f} ms before"
    )


class Reader:
    """Streams one request after the other and notes when tokens come."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def longest(self, work: Callable[[], object]) -> float:
        """Return the longest time between two tokens of one output while `work` runs."""
        over = threading.Event()
        gaps: list[float] = []

        def read() -> None:
            while not over.is_set():
                times = list(self._times(over))
                gaps.extend(later - earlier for earlier, later in pairwise(times))

        reading = self._scene.worker.in_background(read)
        try:
            until_sync(
                lambda: self._scene.worker.state()["in_flight"] > 0, CALL_SECONDS, what="it to run"
            )
            work()
        finally:
            over.set()
        reading.result(CALL_SECONDS)
        if not gaps:
            raise Wrong("no two tokens came while weights were staged: nothing was measured")
        return max(gaps)

    def _times(self, over: threading.Event) -> Iterator[float]:
        sampling = {"max_tokens": self._scene.plan.length, "ignore_eos": True}
        body = {"token_ids": PROMPT, "stream": True, "sampling": sampling}
        with self._scene.worker.data.stream("POST", "/v1/generate", json=body) as answer:
            for event, _ in events(answer.iter_lines()):
                if event == "delta":
                    yield time.monotonic()
                if over.is_set():
                    return
