"""What the start of many pools writes, over an API server in memory: docs/scaling.md has the numbers."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from rollout_operator.api import names
from tests.support.faults.scenes import QUIET_SECONDS, Scene, play
from tests.support.faults.stories import SPEC

STAGGER_SECONDS = 1.0
"""Between the nodes of two pods of a pool: each of its workers is heard, loads and serves by itself."""


def _start_pools(pools: int, replicas: int) -> tuple[Counter[str], list[str]]:
    """Let so many pools start at once; returns how often each kind was written, and what was wrong."""

    async def part() -> tuple[Counter[str], list[str]]:
        scene = Scene(None)
        scene.nodes.stagger = STAGGER_SECONDS
        scene.start_operator()
        await asyncio.sleep(1)
        scene.acts.clear()
        for number in range(pools):
            meta = {"namespace": "rl", "name": f"pool-{number}"}
            spec = {**SPEC, "replicas": replicas}
            body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "spec": spec}
            scene.api.create("rolloutreplicas", body | {"metadata": meta})
        async with asyncio.timeout(60):
            while _waiting(scene):  # noqa: ASYNC110 - bounded
                await asyncio.sleep(1)
        await asyncio.sleep(QUIET_SECONDS)
        await scene.end()
        return Counter(" ".join(each.split()[:2]) for each in scene.acts), scene.problems

    found: tuple[Counter[str], list[str]] = play(part)
    return found


def _waiting(scene: Scene) -> list[str]:
    """Return the pools that are not Ready by their status."""
    return [
        pool["metadata"]["name"]
        for pool in scene.api.of("rolloutreplicas")
        if not any(
            (c["type"], c["status"]) == ("Ready", "True")
            for c in (pool.get("status") or {}).get("conditions", ())
        )
    ]


@pytest.mark.parametrize(("pools", "statuses"), [(10, 3), (40, 2)])
def test_a_pool_among_many_tells_its_start_and_its_end(pools: int, statuses: int) -> None:
    replicas = 4
    written, problems = _start_pools(pools, replicas)
    assert problems == []
    wanted = {
        "create services": 2,
        "create poddisruptionbudgets": 1,
        "create pods": replicas,
        "patch pods": replicas,
        "patch rolloutreplicas": statuses,
    }
    made = {kind: count / pools for kind, count in written.items() if "require" not in kind}
    assert made == wanted, "statuses: new, Ready, and in between one at the most"
