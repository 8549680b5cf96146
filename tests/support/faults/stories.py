"""What happens to a pool, one thing a story, and how it has to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollout_worker.schemas import WeightsId
from tests.support.faults.scenes import POOL, Scene, Story
from tests.support.unit.poolspecs import pushed, target

SPEC: dict[str, Any] = {
    "replicas": 2,
    "engine": {"type": "hf"},
    "model": {"source": {"path": "/models/tiny"}},
}
FOUR = SPEC | {"replicas": 4}
SURGE = SPEC | {"updateStrategy": {"maxUnavailable": 0, "maxSurge": 1}}
ROLLING = SPEC | {"weights": {"strategy": "Rolling"}}
BESIDE = SPEC | {
    "mode": "Colocated",
    "colocation": {"trainerSelector": {"matchLabels": {"job": "grpo"}}},
}
TEMPLATE = {"podTemplate": {"labels": {"team": "a"}}}
ONE = WeightsId(epoch=1, version=1)

Missing = Callable[[Scene], str]


def serving(replicas: int, weights: WeightsId | None = None, **labels: str) -> Missing:
    """The pool is Ready: exactly so many pods, which serve these weights and have these labels."""

    def missing(scene: Scene) -> str:
        if why := _status_lacks(
            scene, {"Ready": "True", "Progressing": "False", "Degraded": "False"}
        ):
            return why
        found = [pod["metadata"]["name"] for pod in scene.pods]
        if len(found) != replicas or scene.served() != replicas:
            return f"{replicas} pods that serve, not {found}"
        for pod in scene.pods:
            if not labels.items() <= pod["metadata"]["labels"].items():
                return f"labels of {pod['metadata']['name']}"
            worker = scene.nodes.worker_of(pod["metadata"]["name"])
            if weights is not None and worker.active != weights:
                return f"weights {weights} in {pod['metadata']['name']}"
        if (
            weights is not None
            and scene.pool["status"]["weights"]["lastUpdate"]["phase"] != "Complete"
        ):
            return "the end of the update"
        return ""

    return missing


def resting(condition: str, replicas: int) -> Missing:
    """The pool is asleep or suspended, with so many pods."""

    def missing(scene: Scene) -> str:
        if why := _status_lacks(
            scene, {condition: "True", "Progressing": "False", "Ready": "False"}
        ):
            return why
        return (
            "" if (len(scene.pods), scene.served()) == (replicas, 0) else f"{replicas} pods at rest"
        )

    return missing


def _status_lacks(scene: Scene, wanted: dict[str, str]) -> str:
    pool = scene.api.objects.get(POOL)
    if pool is None:
        return "the pool"
    status = pool.get("status") or {}
    if status.get("observedGeneration") != pool["metadata"]["generation"]:
        return "a status of this generation"
    found = {c["type"]: c["status"] for c in status["conditions"]}
    lacking = {kind: said for kind, said in wanted.items() if found.get(kind, "False") != said}
    return f"conditions {lacking}: {status['message']}" if lacking else ""


def _push(scene: Scene) -> None:
    """A trainer stages on all workers, and moves the pointer."""
    for process in scene.nodes.processes.values():
        assert process.worker.push(ONE)
    scene.edit(weights=pushed(1, 1))


def _push_asleep(scene: Scene) -> None:
    """A trainer pushes to a pool that sleeps, and wakes it once that is committed; it pushes again what got lost."""

    async def publish() -> None:
        while True:
            for process in scene.nodes.processes.values():
                if process.worker.staged is None and process.worker.active != ONE:
                    process.worker.push(ONE)
            spec, status = scene.pool["spec"], scene.pool.get("status") or {}
            committed = (status.get("weights") or {}).get("committed") or {}
            if "weights" not in spec:
                scene.edit(weights=pushed(1, 1))
            elif committed.get("version") == 1 and spec.get("state") == "Asleep":
                scene.edit(state="Active")
            await asyncio.sleep(1)

    scene.others.append(asyncio.create_task(publish()))


def _take_turn(scene: Scene) -> None:
    """A trainer puts the pool to sleep, and wakes it once it is asleep; whatever comes between, it wants it awake."""

    async def turn() -> None:
        while True:
            await asyncio.sleep(1)
            if not resting("Asleep", 2)(scene):
                scene.edit(state="Active")

    scene.edit(state="Asleep")
    scene.others.append(asyncio.create_task(turn()))


def _make_again(scene: Scene) -> None:
    scene.api.delete(POOL)
    scene.make_pool(SPEC)


def _edit(**spec: Any) -> Callable[[Scene], None]:
    return lambda scene: scene.edit(**spec)


STORIES = (
    Story("create", lambda scene: scene.make_pool(SPEC), serving(2), 0, None),
    Story("scale up", _edit(replicas=4), serving(4), 2, SPEC),
    Story("scale down", _edit(replicas=2), serving(2), 2, FOUR),
    Story("template", _edit(**TEMPLATE), serving(2, team="a"), 1, SPEC),
    Story("template with a surge", _edit(**TEMPLATE), serving(2, team="a"), 2, SURGE),
    Story("weights from a folder", _edit(weights=target(1, 1)), serving(2, ONE), 2, SPEC),
    Story("weights one by one", _edit(weights=target(1, 1)), serving(2, ONE), 2, ROLLING),
    Story("weights pushed", _push, serving(2, ONE), 2, SPEC),
    Story("weights pushed asleep", _push_asleep, serving(2, ONE), 0, SPEC | {"state": "Asleep"}),
    Story("sleep", _edit(state="Asleep"), resting("Asleep", 2), 0, SPEC),
    Story("wake", _edit(state="Active"), serving(2), 0, SPEC | {"state": "Asleep"}),
    Story("suspend", _edit(suspend=True), resting("Suspended", 0), 0, SPEC),
    Story("resume", _edit(suspend=False), serving(2), 0, SPEC | {"suspend": True}),
    Story("a pod crashes", lambda scene: scene.nodes.crash("math-0-0"), serving(2), 1, SPEC),
    Story("a node is lost", lambda scene: scene.nodes.lose("node-1"), serving(2), 1, SPEC),
    Story("a trainer's turn", _take_turn, serving(2), 0, BESIDE),
    Story("delete and make again", _make_again, serving(2), 0, SPEC),
)
