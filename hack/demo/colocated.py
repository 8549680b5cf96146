"""Let a trainer and its worker share the devices of a node: examples/colocated, before a judge.

    make demo-colocated                8 turns on two fake devices, about four minutes after the first run
    STEPS=3 make demo-colocated        fewer

The devices exist on paper; claims, driver, kubelet, locks and engine are real. The judge looks each
millisecond which pod has memory, and decides the outcome. The cluster stays up, `make clean` removes it.
"""

from __future__ import annotations

import sys
from typing import Any

import yaml

from demo.judge import Judge, Report
from demo.scene import SHAPE, Scene, local_scene, run_story, wanted_steps
from demo.stage import DemoError, Stage
from demo.train import follow, localized, make_empty
from localkube.home import REPOSITORY

NAMESPACE = "colocated"
POOL, JOB, CLAIM = "shared", "colocated", "colocated-gpus"
DEVICES, STEPS = 2, 8
EXAMPLES = REPOSITORY / "examples"
SCRIPTS = (
    "colocated/turns.py",
    "grpo/grpo.py",
    "grpo/lora.py",
    "grpo/publishing.py",
    "grpo/train.py",
)


def tell(scene: Scene, steps: int) -> Report:
    stage = scene.stage
    assert scene.state is not None
    _clear(scene)
    with Judge(scene.state) as judge:
        _wait_for_a_trainer(stage)
        _meet(stage, steps)
        with stage.step(
            f"{steps} turns: it samples from the pool, has the devices, learns, publishes"
        ):
            follow(scene, JOB, lambda line: None)
            stage.kubectl("get", "rr", POOL, "-o", "wide", show=True)
        report = judge.report(judge.asleep_mib())
    with stage.step("The judge, who looked at the node's processes and locks alone"):
        for line in report.lines():
            stage.say(line)
        _check(report, steps)
    return report


def _clear(scene: Scene) -> None:
    assert scene.models is not None
    scene.stage.delete(("job", JOB), ("rr", POOL), ("resourceclaim", CLAIM))
    make_empty(scene.models / "weights" / JOB)


def _wait_for_a_trainer(stage: Stage) -> None:
    with stage.step("A pool that is to share a trainer's devices waits for the trainer"):
        stage.apply_shown(EXAMPLES / JOB / "pool.yaml")
        stage.watch_pool(POOL, "a message", lambda: stage.pool_status(POOL).get("message"), 30)


def _meet(stage: Stage, steps: int) -> None:
    with stage.step(
        "The trainer comes with a ResourceClaim of two devices; the worker joins it there"
    ):
        stage.apply_files(JOB, *(EXAMPLES / name for name in SCRIPTS))
        stage.apply(*manifests(steps))
        words = ("get", "pods", "-l", f"rollout.dev/pool={POOL}", "-o", "name")
        stage.watch_pool(
            POOL, "the worker's pod next to the trainer's", lambda: stage.kubectl(*words), 120
        )
        stage.kubectl("get", "resourceclaims", show=True)
        stage.kubectl("get", "pods", "-o", "wide", show=True)


def manifests(steps: int) -> list[dict[str, Any]]:
    """Return the example's trainer with its claim and rights, its Job with the local image and namespace."""
    text = (EXAMPLES / JOB / "trainer.yaml").read_text()
    items = list(yaml.safe_load_all(text.replace("rollout.dev/rl/", f"rollout.dev/{NAMESPACE}/")))
    for item in items:
        if item["kind"] == "Job":
            # On a CPU pushed weights serve from where they came, in shared memory: the judge would
            # miss them, since it takes a worker's own memory for a device's.
            localized(item, steps)["spec"]["template"]["spec"]["containers"][0]["args"] += [
                "--transport=files"
            ]
    return items


def _check(report: Report, steps: int) -> None:
    for device, seconds in report.overlap.items():
        if seconds:
            raise DemoError(f"two pods had memory of {device} for {seconds:.3f} s")
    if not report.turns or min(report.turns.values()) < 2 * steps:
        raise DemoError(f"{steps} turns must change hands twice each, not {dict(report.turns)}")


if __name__ == "__main__":
    sys.exit(
        run_story(
            __doc__,
            lambda: tell(
                steps=wanted_steps(STEPS), scene=local_scene(NAMESPACE, SHAPE, devices=DEVICES)
            ),
        )
    )
