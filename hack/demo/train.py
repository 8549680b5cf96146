"""Train a policy on a real cluster: an example's trainer next to a pool of workers, until it reaches its goal.

    make demo-train                    40 steps, about two minutes after the first run: weights go
                                       straight into the workers' memory
    STEPS=10 make demo-train           fewer
    TASK=lora make demo-train          a LoRA adapter learns, and is published alone
    TASK=tools make demo-train         until it asks a calculator, in conversations, while the pool
                                       grows and a worker is killed
    TASK=vision make demo-train        a model that sees learns to count squares
    TASK=distill make demo-train       a student learns from a frozen teacher, a pool of its own

Leaves the table, and the learning curve of examples/grpo, in the cache; the cluster stays up, `make clean` removes it.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import rollout_local
from demo.scene import Scene, local_scene, run_story, wanted_steps
from demo.stage import DemoError, Stage
from localkube.home import REPOSITORY
from localkube.processes import process_in

NAMESPACE = "train"
POOL = "policy"
# Narrow weights: a policy that is sure of nothing yet.
SHAPE = (
    *("--vocab", "512", "--hidden", "64", "--intermediate", "128", "--heads", "2"),
    *("--kv-heads", "1", "--max-length", "256", "--std", "0.05"),
)
EXAMPLES = REPOSITORY / "examples"
EXAMPLE = EXAMPLES / "grpo"
JOB_SECONDS, HEAL_SECONDS = 900.0, 180.0
STOPPED_SECONDS = 2.0
"""Less than any probe or client waits for a worker that stands still."""
GOAL = 0.8
"""Chance is 0.1. Some policies stay at 0.86 for long, with one wrong number in ten: they have learned, too."""


@dataclass(frozen=True)
class Task:
    """One of the example's trainers.

    Attributes:
        manifest: of its Job.
        folder: that it writes into, below `weights`; also the name of the Job.
        steps: unless said otherwise.
        enough: steps that reach the goal.
        trouble: whether the pool grows and loses a worker during the training.
        arguments: of the trainer, in addition to those of its Job.
        goal: the reward to reach.
        example: folder of all its files.
        pools: names of its RolloutReplicas.
        manifests: of these, and of the trainer's account.
        writer: the script that writes the models of its pools; none: they have the demo's.
    """

    manifest: str
    folder: str
    steps: int
    enough: int
    trouble: bool = False
    arguments: tuple[str, ...] = ()
    goal: float = GOAL
    example: str = "grpo"
    pools: tuple[str, ...] = (POOL,)
    manifests: tuple[str, ...] = ("pool.yaml",)
    writer: str = ""

    @property
    def home(self) -> Path:
        return EXAMPLES / self.example


TASKS = {
    "counting": Task("job.yaml", "grpo", steps=40, enough=30),
    "lora": Task("job.yaml", "grpo", steps=40, enough=30, arguments=("--lora=16",), goal=0.6),
    "tools": Task("tools-job.yaml", "grpo-tools", steps=20, enough=15, trouble=True),
    "vision": Task(
        *("job.yaml", "vision"),
        steps=15,
        enough=12,
        goal=0.7,
        example="vision",
        pools=("sight",),
        writer="squares.py",
    ),
    "distill": Task(
        *("job.yaml", "distill"),
        steps=25,
        enough=20,
        example="distill",
        pools=("teacher", "student"),
        manifests=("teacher.yaml", "pool.yaml"),
        writer="distill.py",
    ),
}


def run_task() -> None:
    name = os.environ.get("TASK", "counting")
    if name not in TASKS:
        raise DemoError(f"TASK={name!r} is none of {sorted(TASKS)}")
    steps = wanted_steps(TASKS[name].steps)
    tell(local_scene(NAMESPACE, SHAPE), TASKS[name], steps)


def tell(scene: Scene, task: Task, steps: int) -> Path:
    """Apply pool and Job, follow the trainer and print its result; return its folder."""
    stage = scene.stage
    assert scene.models is not None
    folder = scene.models / "weights" / task.folder
    make_empty(folder)
    with stage.step("The workers and the account of their trainer"):
        stage.delete(("job", task.folder), *(("rr", pool) for pool in task.pools))
        if task.writer:
            script = str(task.home / task.writer)
            stage.run(sys.executable, script, "--write-models", str(scene.models / "models"))
        for manifest in task.manifests:
            stage.kubectl("apply", "-f", str(task.home / manifest), show=True)
        for pool in task.pools:
            stage.kubectl("wait", "rr", pool, "--for=condition=Ready", "--timeout=240s")
        stage.kubectl("get", "rr", *task.pools, "-o", "wide", show=True)
    with stage.step(f"{steps} steps of training, as a Job"):
        stage.apply_files(task.example, task.home)
        stage.apply(job(task, steps))
        trouble = Trouble(stage, task.pools[0])
        follow(scene, task.folder, trouble.saw if task.trouble else lambda line: None)
        if task.trouble:
            trouble.over(HEAL_SECONDS)
        else:
            stage.kubectl("get", "rr", *task.pools, "-o", "wide", show=True)
    with (folder / "result" / "table.csv").open() as file:
        earned = [float(row["reward"]) for row in csv.DictReader(file)]
    for path in sorted((folder / "result").iterdir()):
        stage.say(str(path))
    if steps >= task.enough and earned[-1] < task.goal:
        raise DemoError(f"the reward is {earned[-1]:.2f} after {steps} steps, not {task.goal}")
    stage.say(f"reward {earned[0]:.2f} -> {earned[-1]:.2f}")
    return folder / "result"


def make_empty(folder: Path) -> None:
    """Make an empty folder that the trainer, a user unknown to this machine, can write."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    folder.chmod(0o777)


def job(task: Task, steps: int) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load((task.home / task.manifest).read_text())
    body["spec"]["template"]["spec"]["containers"][0]["args"] += task.arguments
    return localized(body, steps)


def localized(job: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return an example's Job with the local image and the mounted environment."""
    local = rollout_local.LOCAL_VALUES["engines"]["hf"]
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    container["image"], container["imagePullPolicy"] = local["image"], "Never"
    container["args"].append(f"--steps={steps}")
    container["volumeMounts"] += local["podTemplate"]["volumeMounts"]
    pod["volumes"] += local["podTemplate"]["volumes"]
    claim = pod["volumes"][-1]["persistentVolumeClaim"]["claimName"]
    assert claim == rollout_local.environment_claim("hf")
    return job


def follow(scene: Scene, name: str, saw: Callable[[str], None]) -> None:
    """Print the trainer's lines until it has ended, and hand them to `saw`."""
    stage = scene.stage
    labels = ("-l", f"job-name={name}")
    stage.kubectl("wait", "pod", *labels, "--for=condition=Ready", "--timeout=120s")
    for line in stage.log_lines(f"job/{name}", JOB_SECONDS):
        saw(line)

    def ended() -> str:
        kinds = stage.get("job", name).get("status", {}).get("conditions", ())
        return next((c["type"] for c in kinds if c["type"] in ("Complete", "Failed")), "")

    if stage.until(f"the Job to end within {JOB_SECONDS:.0f} s", ended, 60) != "Complete":
        raise DemoError("the trainer failed: its last lines above say why")


class Trouble:
    """Reads the trainer's lines and acts after some of its steps.

    Args:
        stage: with the cluster.
        pool: name of a pool with two replicas.
    """

    GROWS_AFTER, DIES_AFTER = 1, 4
    BUSY = 4
    """Requests in flight of a worker that is killed."""

    def __init__(self, stage: Stage, pool: str) -> None:
        self.stage, self.pool = stage, pool
        self.waiting: dict[int, Callable[[], None]] = {
            self.GROWS_AFTER: self.grow,
            self.DIES_AFTER: self.kill,
        }

    def saw(self, line: str) -> None:
        """Act on a line of the trainer's log."""
        step = re.match(r"step +([0-9]+) ", line)
        if step and (act := self.waiting.pop(int(step[1]), None)):
            act()

    def grow(self) -> None:
        self.stage.kubectl("scale", "rr", self.pool, "--replicas=3", show=True)

    def kill(self) -> None:
        """Kill -9 the first worker while requests are in flight."""
        pod = self.stage.get("pod", f"{self.pool}-0-0")
        pid = process_in(pod["metadata"]["uid"], "rollout-worker")
        counts: list[int] = []

        def stopped_with_requests() -> int:
            """Stop it until enough requests wait in it: it stands still, so they stay and others join them."""
            os.kill(pid, signal.SIGSTOP)
            end = time.monotonic() + STOPPED_SECONDS
            while time.monotonic() < end:
                time.sleep(0.2)  # the answers that it was about to send are out by now
                counts.append(unanswered_requests(pid))
                if counts[-1] >= self.BUSY:
                    return counts[-1]
            os.kill(pid, signal.SIGCONT)
            return 0

        try:
            running = self.stage.until(f"{self.BUSY} requests in flight", stopped_with_requests, 60)
        except DemoError as error:
            pool = self.stage.kubectl("get", "rr", self.pool, "-o", "wide")
            raise DemoError(f"{error}; it had {counts}\n{pool}") from None
        finally:
            os.kill(pid, signal.SIGKILL)
        self.stage.say(f"$ kill -9 {self.pool}-0-0, which had {running} requests in flight")

    def over(self, seconds: float) -> None:
        self.stage.kubectl(
            "wait", "rr", self.pool, "--for=condition=Ready", f"--timeout={seconds:.0f}s"
        )
        self.stage.kubectl("get", "rr", self.pool, "-o", "wide", show=True)


def unanswered_requests(pid: int) -> int:
    """Return how many connections to the data port of a process brought bytes after it last sent any."""
    network = ("nsenter", "-t", str(pid), "-n")
    sockets = ("ss", "-tinH", "state", "established", "sport", "=", ":8000")
    found = subprocess.run([*network, *sockets], check=True, text=True, capture_output=True).stdout
    ages = re.findall(r"lastsnd:(\d+) lastrcv:(\d+)", found)
    return sum(int(received) < int(sent) for sent, received in ages)


if __name__ == "__main__":
    sys.exit(run_story(__doc__, run_task))
