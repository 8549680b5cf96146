"""Train a policy in the process that serves it: examples/hybrid, as the one member of a pool.

    make demo-hybrid                   12 steps, about two minutes after the first run
    STEPS=30 make demo-hybrid          more

The operator makes no pod: it takes the trainer's own for the pool's replica. The cluster stays up,
`make clean` removes it.
"""

from __future__ import annotations

import sys
from typing import Any

import yaml

from demo.scene import Scene, local_scene, run_story, wanted_steps
from demo.stage import DemoError, Stage
from demo.train import SHAPE, localized
from localkube.home import REPOSITORY

NAMESPACE = "hybrid"
POOL, TRAINER = "counting", "hybrid"
POD = f"{TRAINER}-0"
STEPS, LEARN_SECONDS = 12, 600.0
EXAMPLE = REPOSITORY / "examples" / "hybrid"


def tell(scene: Scene, steps: int) -> list[float]:
    stage = scene.stage
    with stage.step("A pool whose replicas are the pods of a trainer that is not there yet"):
        stage.delete(("statefulset", TRAINER), ("rr", POOL))
        stage.apply_shown(EXAMPLE / "pool.yaml")
        stage.watch_pool(POOL, "a message", lambda: stage.pool_status(POOL).get("message"), 30)
    with stage.step("The trainer comes, a StatefulSet of its own, and the pool has a replica"):
        stage.apply_files(TRAINER, EXAMPLE / "train.py")
        stage.apply(*manifests())
        stage.kubectl("wait", "rr", POOL, "--for=condition=Ready", "--timeout=240s")
        stage.kubectl("get", "rr,pods,endpointslices", "-o", "wide", show=True)
    with stage.step(f"GRPO for {steps} steps: it samples from itself, learns, publishes"):
        rewards = _follow(stage, steps)
        stage.kubectl("get", "rr", POOL, "-o", "wide", show=True)
        _check(stage, rewards, steps)
    stage.say(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    return rewards


def manifests() -> list[dict[str, Any]]:
    """Return the example's trainer in the demo's namespace, with the local image."""
    text = (EXAMPLE / "trainer.yaml").read_text()
    text = text.replace("rollout.dev/demo/", f"rollout.dev/{NAMESPACE}/")
    text = text.replace("namespace: demo", f"namespace: {NAMESPACE}")
    # More steps than the demo follows: a trainer that ends is started again.
    items = list(yaml.safe_load_all(text))
    return [localized(item, 1000) if item["kind"] == "StatefulSet" else item for item in items]


def _follow(stage: Stage, steps: int) -> list[float]:
    """Follow the trainer for this many steps; return their rewards."""
    rewards: list[float] = []
    for line in stage.log_lines(POD, LEARN_SECONDS, "step"):
        rewards.append(float(line.split()[3]))
        if len(rewards) == steps:
            break
    return rewards


def _check(stage: Stage, rewards: list[float], steps: int) -> None:
    if len(rewards) < steps:
        raise DemoError(
            f"the trainer did {len(rewards)} of {steps} steps within {LEARN_SECONDS:.0f} s: see"
            f" kubectl -n {NAMESPACE} logs {POD}"
        )
    committed = stage.get("rr", POOL)["status"]["weights"]["committed"]
    if committed["version"] < steps - 1:
        raise DemoError(f"the pool is at version {committed['version']} after {steps} steps")
    if steps >= STEPS and rewards[-1] < rewards[0] + 0.1:
        raise DemoError(f"nothing was learned: reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")


if __name__ == "__main__":
    sys.exit(
        run_story(
            __doc__, lambda: tell(steps=wanted_steps(STEPS), scene=local_scene(NAMESPACE, SHAPE))
        )
    )
