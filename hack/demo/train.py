"""Train a policy on a real cluster: examples/grpo beside a pool of workers, until it can count.

    make demo-train                    40 steps, about two minutes after the first run
    STEPS=10 make demo-train           fewer

Leaves the table and the learning curve in the cache; the cluster stays up, `make clean` removes it.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from typing import Any

import yaml

import rollout_local
from demo.scene import Scene, local_scene
from demo.stage import DemoError
from localkube import ClusterError, volumes
from localkube.home import REPOSITORY

NAMESPACE = "train"
POOL = "counting"
# Narrow weights: a policy that is sure of nothing yet.
SHAPE = (
    *("--vocab", "512", "--hidden", "64", "--intermediate", "128", "--heads", "2"),
    *("--kv-heads", "1", "--max-length", "256", "--std", "0.05"),
)
EXAMPLE = REPOSITORY / "examples" / "grpo"
JOB_SECONDS = 900.0
GOAL, ENOUGH_STEPS = 0.9, 30


def main() -> int:
    """Command line."""
    if "-h" in sys.argv or "--help" in sys.argv:
        print(__doc__)
        return 0
    try:
        scene = local_scene(NAMESPACE, SHAPE)
        tell(scene, int(os.environ.get("STEPS", "40")))
    except (DemoError, ClusterError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    return 0


def tell(scene: Scene, steps: int) -> None:
    """Apply pool and Job, follow the trainer, and show what came of it."""
    stage = scene.stage
    assert scene.models is not None
    folder = scene.models / "weights" / "grpo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    folder.chmod(0o777)  # the trainer is nobody of this machine
    with stage.step("A pool of two workers and the account of its trainer"):
        for kind, name in (("job", "grpo"), ("rr", POOL)):
            stage.kubectl("delete", kind, name, "--ignore-not-found", "--timeout=120s")
        stage.kubectl("apply", "-f", str(EXAMPLE / "pool.yaml"), show=True)
        stage.kubectl("wait", "rr", POOL, "--for=condition=Ready", "--timeout=240s")
        stage.kubectl("get", "rr", POOL, "-o", "wide", show=True)
    with stage.step(f"GRPO for {steps} steps, as a Job"):
        script = stage.kubectl(
            "create", "configmap", "grpo", f"--from-file={EXAMPLE / 'train.py'}",
            "--dry-run=client", "-o", "json",
        )  # fmt: skip
        stage.kubectl("apply", "-f", "-", text=script)
        stage.kubectl("apply", "-f", "-", text=json.dumps(job(steps)))
        follow(scene)
        stage.kubectl("get", "rr", POOL, "-o", "wide", show=True)
    with (folder / "result" / "table.csv").open() as file:
        earned = [float(row["reward"]) for row in csv.DictReader(file)]
    for path in sorted((folder / "result").iterdir()):
        stage.say(str(path))
    if steps >= ENOUGH_STEPS and earned[-1] < GOAL:
        raise DemoError(f"the reward is {earned[-1]:.2f} after {steps} steps, not {GOAL}")
    stage.say(f"reward {earned[0]:.2f} -> {earned[-1]:.2f}: the policy can count")


def job(steps: int) -> dict[str, Any]:
    """The Job of the example, with the local image and the environment that is mounted into it."""
    body: dict[str, Any] = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    pod = body["spec"]["template"]["spec"]
    local = rollout_local.LOCAL_VALUES["engines"]["hf"]
    container = pod["containers"][0]
    container["image"], container["imagePullPolicy"] = local["image"], "Never"
    container["args"].append(f"--steps={steps}")
    container["volumeMounts"] += local["podTemplate"]["volumeMounts"]
    pod["volumes"] += local["podTemplate"]["volumes"]
    assert pod["volumes"][-1]["persistentVolumeClaim"]["claimName"] == volumes.environment_claim(
        "hf"
    )
    return body


def follow(scene: Scene) -> None:
    """Print the trainer's lines until it has ended.

    Raises:
        DemoError: it failed, or did not end in time.
    """
    stage = scene.stage
    words = ["kubectl", "-n", stage.namespace]
    started = [*words, "wait", "pod", "-l", "job-name=grpo", "--for=condition=Ready"]
    stage.run(*started, "--timeout=120s")
    try:
        subprocess.run(
            [*words, "logs", "-f", "job/grpo"],
            env=stage.environment, timeout=JOB_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DemoError(f"the trainer did not end within {JOB_SECONDS:.0f} s") from None

    def ended() -> str:
        kinds = stage.get("job", "grpo").get("status", {}).get("conditions", ())
        return next((c["type"] for c in kinds if c["type"] in ("Complete", "Failed")), "")

    if stage.until("the Job to end", ended, 60) != "Complete":
        raise DemoError("the trainer failed: its last lines above say why")


if __name__ == "__main__":
    sys.exit(main())
