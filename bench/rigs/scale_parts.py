"""What a thousand equal pools do not show: small pools, a scale-up next door, one huge pool, two shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

from bench.figures import SAMPLES_FOR_P99, Figure, Goal, Options, Result, figure, p99
from bench.rigs.phases import QUIET_SECONDS, histogram_figure, measure_restarts, phase
from bench.rigs.plain_workloads import (
    READY_SECONDS,
    await_no_endpoints,
    delete_objects,
    ready_seconds,
)
from rollout_operator.settings import LAG_WINDOW_SECONDS
from tests.support.api.apiclient import POOLS, Seen, Watch, watching
from tests.support.cluster.scalelab import (
    NAMESPACE,
    SYSTEM,
    Lab,
    holds,
    processless_pool,
    scale_lab,
)
from tests.support.waiting import eventually

SMALL_PODS = 2
NEXT_DOOR = "next-door"
NEXT_DOOR_PODS = 500
MOST_SCALE_UPS = 6
UPDATE_SECONDS = 60.0
LAG = "rollout_operator_event_loop_lag_seconds"
LAG_SECONDS = 10.0
FORGOTTEN_SECONDS = LAG_WINDOW_SECONDS + 5
"""After so long the gauge, which shows the worst lag of its window, knows nothing of what was before."""
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases"
HUGE = "huge"


def create_pools(lab: Lab, names: set[str], replicas: int) -> None:
    lab.create(*(processless_pool(name, replicas=replicas) for name in sorted(names)))
    lab.await_condition("Ready", names, ready_seconds(len(names) * replicas))


def delete_pools(lab: Lab, pods: int) -> None:
    """Delete all pools, and wait until their pods and endpoints are gone: what still goes would disturb what is measured next."""
    delete_objects(lab, POOLS.format(NAMESPACE))
    lab.await_pods(0, ready_seconds(pods))
    await_no_endpoints(lab, ready_seconds(pods))


def start_warm(lab: Lab) -> None:
    """Start the operator and let one pool come and go: an API server is slow with a resource that it has just learned."""
    lab.start_operator()
    create_pools(lab, {"warm-up"}, 1)
    delete_pools(lab, 1)
    lab.await_silence(QUIET_SECONDS, READY_SECONDS)
    lab.calls()


def measure_small_pools(options: Options) -> Result:
    """Pools of two: their start, the operator's restart, and what a scale-up next door adds to their updates."""
    pools, rounds = (50 if options.quick else 500), options.count(5, 2)
    names = {f"small-{index:03}" for index in range(pools)}
    with scale_lab("bench-small") as lab:
        start_warm(lab)
        starts = []
        for number in range(rounds):
            if number:
                delete_pools(lab, pools * SMALL_PODS)
            starts.append(_seconds(partial(create_pools, lab, names, SMALL_PODS)))
        _, restart, writes = measure_restarts(lab, pools * SMALL_PODS, rounds, 2)
        figures = [
            figure(f"{pools} pools of {SMALL_PODS} Ready", starts, goal=Goal(15)),
            restart,
            writes,
            *_measure_neighbours(lab, sorted(names), 10 if options.quick else SAMPLES_FOR_P99),
        ]
    notes = [
        f"Next door, a pool goes from 1 to {NEXT_DOOR_PODS} pods while other pools are updated."
    ]
    return Result(
        "reconcile", "Small pools, and a large one next door", figures, notes, part="small"
    )


class _Updates:
    """Moves pools to new weights, one after the other."""

    def __init__(self, lab: Lab, pools: Watch, names: list[str]) -> None:
        self._lab, self._pools, self._names = lab, pools, names
        self._version = 0

    def move_next(self) -> float:
        """Move the next pool; returns the seconds until its status shows that all workers have the weights."""
        self._version += 1
        version, name = self._version, self._names[self._version % len(self._names)]
        began = time.monotonic()
        source = {"path": f"/models/{version}"}
        self._lab.patch(
            name, weights={"target": {"epoch": 1, "version": version, "source": source}}
        )

        def shown(seen: Seen) -> bool:
            weights: dict[str, Any] = (seen.obj.get("status") or {}).get("weights") or {}
            done = (weights.get("committed") or {}).get("version") == version
            return (
                done and seen.obj["metadata"]["name"] == name and holds(seen.obj, "WeightsSynced")
            )

        what = f"{name} has version {version}"
        return self._pools.first(what, shown, began, UPDATE_SECONDS).at - began


def _measure_neighbours(lab: Lab, names: list[str], samples: int) -> list[Figure]:
    """Update pools in peace, then while another pool is scaled up, as often as that takes for enough samples."""
    create_pools(lab, {NEXT_DOOR}, 1)
    busy: list[float] = []
    with watching(lab.cluster, POOLS.format(NAMESPACE)) as (pools,):
        updates = _Updates(lab, pools, names)
        quiet = [updates.move_next() for _ in range(samples)]
        passes = phase(lab, partial(_scale_up, lab, updates, busy))
        for _ in range(MOST_SCALE_UPS):
            if len(busy) >= samples:
                break
            lab.patch(NEXT_DOOR, replicas=1)
            lab.await_pods(len(names) * SMALL_PODS + 1, 120)
            _scale_up(lab, updates, busy)
    against = "the same in peace"
    found = [
        figure(
            "an update of one pool while another is scaled up",
            busy,
            baseline=quiet,
            against=against,
        ),
        histogram_figure("… one pass", passes, "reconcile_duration", 0.25),
    ]
    if min(len(busy), len(quiet)) >= SAMPLES_FOR_P99:
        added = max(0.0, p99(busy) - p99(quiet))
        found.append(figure("… what it adds to the 99th percentile", added, goal=Goal(1)))
    return found


def _scale_up(lab: Lab, updates: _Updates, samples: list[float]) -> None:
    """Scale a pool up; until it is Ready, others are updated."""
    lab.patch(NEXT_DOOR, replicas=NEXT_DOOR_PODS)
    while not holds(lab.pool(NEXT_DOOR), "Ready"):
        samples.append(updates.move_next())


def measure_one_pool(options: Options) -> Result:
    """Let one pool of 4,000 start, and take an update whose pushed bytes half of its workers lack for a while."""
    replicas = 400 if options.quick else 4000
    with scale_lab("bench-large") as lab:
        start_warm(lab)
        with _worst_lag(lab) as start_lags:
            start = phase(lab, partial(create_pools, lab, {HUGE}, replicas))
        time.sleep(FORGOTTEN_SECONDS)
        with _worst_lag(lab) as waiting_lags:
            waiting = phase(lab, partial(_push_to_half, lab))
        with _worst_lag(lab) as update_lags:
            moved = phase(lab, partial(_push_to_all, lab, replicas))
    goal = Goal(0.25)
    hold = "… the longest hold of the event loop"
    figures = [
        figure(f"one pool of {replicas} Ready", start.seconds),
        figure("… CPU of the operator", start.cpu),
        figure("… its resident memory", start.resident / 2**20, "MiB"),
        figure(hold, max(start_lags), goal=goal),
        figure(
            "pushed bytes missing on half: CPU of the operator",
            100 * waiting.cpu / waiting.seconds,
            "%",
        ),
        figure(hold, max(waiting_lags), goal=goal),
        figure("the bytes come, until all serve them", moved.seconds),
        figure("… CPU of the operator", moved.cpu),
        figure(hold, max(update_lags), goal=goal),
    ]
    notes = [
        "A hold: how late a timer of the loop came, which other processes on these cores delay, too."
    ]
    title = f"One pool of {replicas} replicas"
    return Result("reconcile", title, figures, notes, part="large")


def _push_to_half(lab: Lab) -> None:
    lab.push(1, nth=2)
    target = {"epoch": 1, "version": 1, "source": {"pushed": {}}}
    lab.patch(HUGE, weights={"target": target})
    time.sleep(FORGOTTEN_SECONDS)


def _push_to_all(lab: Lab, replicas: int) -> None:
    lab.push(1, nth=1)
    lab.await_condition("WeightsSynced", {HUGE}, ready_seconds(replicas))


@contextmanager
def _worst_lag(lab: Lab) -> Iterator[list[float]]:
    """Collect the operator's own measure of its event loop, in a thread, until the block ends."""
    found: list[float] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LAG_SECONDS):
            found.append(max(lab.samples(LAG)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        found.append(max(lab.samples(LAG)))


def measure_shards(options: Options) -> Result:
    """Start the same pools with one operator, and with two that have a shard each, in turn."""
    pools, replicas = (20 if options.quick else 200), 4
    names = {f"pool-{index:03}" for index in range(pools)}
    whole, parts = [], []
    with scale_lab("bench-shards") as lab:
        start_warm(lab)
        lab.stop_operator()
        for _ in range(options.count(5, 1)):
            whole.append(_start_with(lab, ["operator"], names, replicas))
            parts.append(_start_with(lab, ["first", "second"], names, replicas))
    one = [sum(cpus) for _, cpus in whole]
    against = "one process for all"
    figures = [
        figure("CPU of the busier of two shards' processes", [max(cpus) for _, cpus in parts],
               baseline=one, against=against, goal=Goal(median(one) / 1.7)),
        figure("both together", [sum(cpus) for _, cpus in parts], baseline=one, against=against),
        figure("all Ready, two processes", [seconds for seconds, _ in parts],
               baseline=[seconds for seconds, _ in whole], against=against),
    ]  # fmt: skip
    notes = [
        f"{pools} pools of {replicas}. The API server takes more of these cores than both operators, so the time until all"
        " are Ready can't show what shards give; the CPU of the busier process is the time that they would take with cores"
        " of their own."
    ]
    return Result("reconcile", "Two shards on two processes", figures, notes, part="shards")


def _start_with(
    lab: Lab, operators: list[str], names: set[str], replicas: int
) -> tuple[float, list[float]]:
    """Start pools with these operators, a shard each; returns the seconds until all are Ready and each one's CPU seconds."""
    lab.api.delete(LEASES)  # who was killed still holds one
    for name in operators:
        lab.start_operator(f"--shards={len(operators)}", name=name, elect=True)
    _await_leaders(lab, len(operators))
    before = [lab.usage(name).cpu for name in operators]
    seconds = _seconds(partial(create_pools, lab, names, replicas))
    cpus = [lab.usage(name).cpu - then for name, then in zip(operators, before, strict=True)]
    delete_pools(lab, len(names) * replicas)
    for name in operators:
        lab.stop_operator(name)
    return seconds, cpus


def _await_leaders(lab: Lab, count: int) -> None:
    def held() -> bool:
        leases = lab.api.items(LEASES, fresh=True)
        return sum(bool(lease["spec"].get("holderIdentity")) for lease in leases) >= count

    eventually("every shard is led", held, 60)


def _seconds(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began
