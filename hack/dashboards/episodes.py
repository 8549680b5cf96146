"""What happens while Prometheus records: traffic, updates, an update that fails, a crash loop, a device's turns.

The API server, the operator, the workers and their engines are the real ones, as processes of this machine; a thread
plays the kubelet. So every number on the pictures was measured, on a busy CPU.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import httpx

from demo.monitoring import run_prometheus
from localkube.debian import unpack_prometheus
from localkube.home import REPOSITORY, cache
from rollout_client.turn import local_turn
from rollout_local import make_models
from tests.support.api.poollab import PoolLab, pool_lab
from tests.support.cluster.scalelab import holds
from tests.support.clusters import await_crd, control_plane

from .fleet import Fleet

NAMESPACE = "rl"
MATH, SHARED = "math", "shared"
DEVICE = "gpu-0"
"""What the workers of `shared` take turns for; it exists on paper."""
SHAPE = ("--hidden", "256", "--intermediate", "1024", "--layers", "4")
"""Of the model: an output of 100 tokens takes a second or two."""
SCRAPE_SECONDS = 2
CALLERS = 3
"""Requests at once to each pool; more would only queue on two cores."""
READY_SECONDS = 300.0
"""Until a pool serves or sleeps: a worker imports torch, and the machine may be busy."""
STEPS = 6
"""Updates of the episode in which all is well."""
STEP_SECONDS = 5.0
SPEC = {
    "drainSeconds": 30,
    # The update that can't succeed then counts as failed.
    "weights": {"deadlineSeconds": 15},
    # The cluster is without nodes, and its scheduler would report that.
    "podTemplate": {"schedulerName": "none"},
}
FAIL_SECONDS = 30.0
"""How long weights that are not there stay the target."""
CRASHES = 3
TURNS = 3
TURN_SECONDS = 8.0
CALM_SECONDS = 10.0
"""Between episodes, so that they can be told apart."""


@dataclass
class Run:
    """A recording that runs."""

    lab: PoolLab
    fleet: Fleet
    models: Path
    locks: Path
    version: int = 0

    async def publish(self, pool: str, path: str | None = None) -> None:
        """Set the pool's next target: one of three versions, or another path."""
        self.version += 1
        source = path or str(self.models / "weights" / str(self.version % 3 + 1))
        target = {"epoch": 1, "version": self.version, "source": {"path": source}}
        await asyncio.to_thread(self.lab.patch, pool, weights={"target": target})

    async def steps(self, pool: str, count: int) -> None:
        """Publish so many versions, each committed before the next."""
        for _ in range(count):
            await self.publish(pool)
            await self.lab.committed(pool, 1, self.version)
            await asyncio.sleep(STEP_SECONDS)


async def generate_always(run: Run, pool: str, seed: int) -> None:
    """Ask a worker of the pool for outputs, one after the other, as a trainer does; refusals are tried again."""
    random = Random(seed)
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        while True:
            urls = run.fleet.serving_urls(pool)
            tokens = [random.randrange(3000) for _ in range(random.randrange(8, 64))]
            sampling = {"max_tokens": random.randrange(16, 128), "ignore_eos": True}
            body = {"token_ids": tokens, "sampling": sampling}
            answer = None
            with suppress(httpx.TransportError):
                if urls:
                    url = f"{random.choice(urls)}/v1/generate"
                    answer = await client.post(url, json=body)
            if answer is None or answer.status_code != 200:
                await asyncio.sleep(0.5)


async def fail_update(run: Run) -> None:
    """Set a target whose files are not there; later set one that is."""
    await run.publish(MATH, str(run.models / "weights" / "lost"))
    await asyncio.sleep(FAIL_SECONDS)
    await run.steps(MATH, 1)


async def crash_replica(run: Run) -> None:
    """Kill the process of one replica again and again, as the kernel does when memory is short."""
    pod = f"{MATH}-1-0"
    for _ in range(CRASHES):
        await run.lab.until(f"{pod} runs", lambda: run.fleet.kill_worker(pod), READY_SECONDS)
        await run.lab.until(f"{pod} is missed", lambda: not is_true(run, MATH), READY_SECONDS)
    await serves(run, MATH)


async def take_turns(run: Run) -> None:
    """Put a pool to sleep and compute on its device; it is asked to wake before the device is free."""
    for _ in range(TURNS):
        await asyncio.to_thread(run.lab.patch, SHARED, state="Asleep")
        await serves(run, SHARED, "Asleep")
        async with local_turn([DEVICE], run.locks, seconds=60):
            await asyncio.sleep(TURN_SECONDS / 2)
            await asyncio.to_thread(run.lab.patch, SHARED, state="Active")
            await asyncio.sleep(TURN_SECONDS / 2)
        await serves(run, SHARED)
        await run.steps(SHARED, 1)


def is_true(run: Run, pool: str, condition: str = "Ready") -> bool:
    return holds(run.lab.get(pool), condition)


async def serves(run: Run, pool: str, condition: str = "Ready") -> None:
    """Wait until a condition of the pool is True."""
    await run.lab.until(
        f"{pool} is {condition}", partial(is_true, run, pool, condition), READY_SECONDS
    )


@asynccontextmanager
async def running_pools(folder: Path) -> AsyncIterator[Run]:
    """Start a control plane, the operator and both pools; yields once all serve."""
    models = make_models(cache() / "models" / "dashboards", *SHAPE)
    locks = folder / "locks"
    locks.mkdir()
    shown = ["--engine", "hf", "--model", str(models / "models/tiny"), "--dtype", "float32"]
    shown += ["--weights-roots", str(models / "weights"), "--restart-delays", "1"]
    shown += ["--max-batch-tokens", "2048"]  # a small KV cache, so that its use is seen
    turn = ["--turn-directory", str(locks), "--turn-devices", DEVICE]
    flags = {MATH: shown, SHARED: [*shown, *turn]}
    with control_plane("dashboards") as cluster:
        cluster.kubectl("apply", "--server-side", "-f", REPOSITORY / "operator" / "crd.yaml")
        await_crd(cluster)
        with Fleet(cluster, NAMESPACE, flags, folder) as fleet:
            async with pool_lab(cluster, NAMESPACE, fleet.workers) as lab:
                for pool, replicas in ((MATH, 2), (SHARED, 1)):
                    lab.create(pool, replicas=replicas, **SPEC)
                run = Run(lab, fleet, models, locks)
                await lab.until("the operator listens", lambda: lab.operator.port)
                fleet.operator = f"127.0.0.1:{lab.operator.port}"
                for pool in (MATH, SHARED):
                    await serves(run, pool)
                yield run


async def play_episodes(run: Run, note: list[tuple[str, float]]) -> None:
    """Let everything happen in order; `note` gets the name and the start of each episode."""
    traffic = [
        asyncio.create_task(generate_always(run, pool, seed))
        for seed, pool in enumerate((MATH, SHARED) * CALLERS)
    ]
    episodes: dict[str, Callable[[], Awaitable[None]]] = {
        "updates": lambda: run.steps(MATH, STEPS),
        "an update that fails": lambda: fail_update(run),
        "a crash loop": lambda: crash_replica(run),
        "turns for a device": lambda: take_turns(run),
    }
    try:
        await asyncio.sleep(CALM_SECONDS)
        for name, play in episodes.items():
            note.append((name, time.time()))
            print(name, flush=True)
            await play()
            await asyncio.sleep(CALM_SECONDS)
    finally:
        for task in traffic:
            task.cancel()


async def record_run(folder: Path) -> None:
    """Record all episodes into an empty `folder`: `data` for Prometheus, `recorded.json` with from, to and episodes."""
    scrape = {
        "job_name": "rollout",
        "honor_labels": True,
        "file_sd_configs": [{"files": [str(folder / "targets.json")], "refresh_interval": "1s"}],
    }
    period = f"{SCRAPE_SECONDS}s"
    settings = {
        "global": {"scrape_interval": period, "scrape_timeout": period},
        "scrape_configs": [scrape],
    }
    note: list[tuple[str, float]] = []
    (folder / "targets.json").write_text("[]")
    async with running_pools(folder) as run:
        with run_prometheus(unpack_prometheus() / "prometheus", folder, settings):
            begin = time.time()
            await play_episodes(run, note)
            end = time.time()
    told = {"from": int(begin), "to": int(end), "scrape": SCRAPE_SECONDS, "episodes": note}
    (folder / "recorded.json").write_text(json.dumps(told))
