"""A change of spec until three workers have acted on it, against a bare PATCH.

What counts is the worker's own answer on its data port, which this process asks for without a pause:
`/ready` for the state, `/v1/weights` for the version. The last of the three replicas stops the
clock. The baseline is the least that any controller can take: the same PATCH until a watch shows it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx

from apiclient import PODS, POOLS, Api, Obj, Seen, Watch, watching
from bench.options import Options
from bench.reporting.figures import Figure, Goal, Result, figure
from bench.rigs.cluster import NAMESPACE, apply, pool_manifest, real_cluster, remove
from scalelab import holds

NAME = "reaction"
REPLICAS = 3
READY_SECONDS = 300.0
ACT_SECONDS = 30.0
LOOK_SECONDS = 0.01
GOAL = Goal(median=0.3, tail=1.0)


class Workers:
    """The data ports of the pool's head pods, asked in parallel."""

    def __init__(self, addresses: list[str]) -> None:
        self._clients = [
            httpx.Client(base_url=f"http://{address}:8000", timeout=5, trust_env=False)
            for address in addresses
        ]
        self._threads = ThreadPoolExecutor(len(addresses))

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        for client in self._clients:
            client.close()

    def after(self, change: Callable[[], object], acted: Callable[[httpx.Client], bool]) -> float:
        """Make the change; return the seconds until the last worker had acted on it."""
        begun = threading.Event()
        futures = [self._threads.submit(_first, c, acted, begun) for c in self._clients]
        began = time.monotonic()
        begun.set()
        change()
        return max(future.result(timeout=2 * ACT_SECONDS) for future in futures) - began


def _first(
    client: httpx.Client, acted: Callable[[httpx.Client], bool], begun: threading.Event
) -> float:
    begun.wait(ACT_SECONDS)
    end = time.monotonic() + ACT_SECONDS
    while not acted(client):
        if time.monotonic() > end:
            raise RuntimeError(f"{client.base_url} did not act within {ACT_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)
    return time.monotonic()


def _serves(client: httpx.Client, wanted: bool) -> bool:
    return (client.get("/ready").status_code == 200) == wanted


def _has_version(client: httpx.Client, version: int) -> bool:
    active: Obj = client.get("/v1/weights").raise_for_status().json()["active"]
    return (active["epoch"], active["version"]) == (1, version)


def run(options: Options) -> Result:
    """Measure."""
    runs = options.count(30, 8)
    path = POOLS.format(NAMESPACE)
    with real_cluster() as cluster, Api(cluster) as api, watching(cluster, path) as (pools,):
        began = time.monotonic()
        apply(cluster, pool_manifest(NAME, replicas=REPLICAS))
        pools.first("the pool is Ready", _ready, began, READY_SECONDS)
        heads = api.items(PODS.format(NAMESPACE), f"rollout.dev/pool={NAME}")
        workers = Workers([head["status"]["podIP"] for head in heads])
        try:
            figures = _measure(runs, api, pools, workers)
        finally:
            workers.close()
            remove(api, NAME)
    note = f"{REPLICAS} replicas, idle workers, weights of a tiny model."
    return Result("reaction", "Reaction to a change of spec", figures, [note])


def _measure(runs: int, api: Api, pools: Watch, workers: Workers) -> list[Figure]:
    samples: dict[str, list[float]] = {}

    def note(what: str, seconds: float) -> None:
        samples.setdefault(what, []).append(seconds)

    for index in range(runs):
        note("floor", _round_trip(api, pools, index))
        before = "Active"
        for state in ("Paused", "Active", "Asleep", "Active"):
            word = state if state != "Active" else f"Active after {before}"
            before = state
            serves = partial(_serves, wanted=state == "Active")
            note(word, workers.after(partial(_patch, api, state=state), serves))
            _settle(api)
        version = index + 1
        source = {"path": f"/rollout/weights/{1 + index % 2}"}
        target = {"epoch": 1, "version": version, "source": source}
        change = partial(_patch, api, weights={"target": target})
        note("version", workers.after(change, partial(_has_version, version=version)))
        _settle(api)
    return _figures(samples)


def _figures(samples: dict[str, list[float]]) -> list[Figure]:
    labels = {
        "Paused": "state Paused until no worker serves",
        "Active after Paused": "state Active until all serve, after Paused",
        "Asleep": "state Asleep until no worker serves",
        "Active after Asleep": "state Active until all serve, after Asleep",
        "version": "a higher version until all serve it (staged, committed)",
    }
    floor = samples["floor"]
    made = [
        figure(label, samples[name], baseline=floor, against="a bare PATCH", goal=GOAL)
        for name, label in labels.items()
    ]
    return [*made, figure("a PATCH until a watch shows it", floor)]


def _patch(api: Api, **spec: Any) -> None:
    api.patch(f"{POOLS.format(NAMESPACE)}/{NAME}", {"spec": spec})


def _round_trip(api: Api, pools: Watch, index: int) -> float:
    began = time.monotonic()
    mark = {"bench.example/mark": str(index)}
    api.patch(f"{POOLS.format(NAMESPACE)}/{NAME}", {"metadata": {"annotations": mark}})

    def shown(seen: Seen) -> bool:
        notes = seen.obj["metadata"].get("annotations") or {}
        return bool(notes.get("bench.example/mark") == str(index))

    return pools.first("the mark", shown, began, ACT_SECONDS).at - began


def _settle(api: Api) -> None:
    """Wait until status says that the change is complete, so that the next one meets a quiet pool."""
    end = time.monotonic() + 2 * ACT_SECONDS
    path = f"{POOLS.format(NAMESPACE)}/{NAME}"
    while not _is_done(api.get(path)):
        if time.monotonic() > end:
            raise RuntimeError(f"{NAME} has not settled: {api.get(path).get('status')}")
        time.sleep(0.05)


def _is_done(pool: Obj) -> bool:
    status = pool.get("status") or {}
    moved = (status.get("lastTransition") or {}).get("completedAt")
    update = (status.get("weights") or {}).get("lastUpdate") or {"phase": "Complete"}
    current = status.get("observedGeneration") == pool["metadata"]["generation"]
    return bool(current and moved and update["phase"] == "Complete")


def _ready(seen: Seen) -> bool:
    return seen.obj["metadata"]["name"] == NAME and holds(seen.obj, "Ready")
