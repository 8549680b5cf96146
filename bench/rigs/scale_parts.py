"""What a thousand equal pools do not show: one huge pool, two shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from bench.figures import Goal, Options, Result, figure
from bench.rigs.phases import QUIET_SECONDS, phase
from bench.rigs.plain_workloads import READY_SECONDS, ready_seconds
from rollout_operator.settings import LAG_WINDOW_SECONDS
from tests.support.api.apiclient import POOLS
from tests.support.cluster.scalelab import (
    NAMESPACE,
    SYSTEM,
    Lab,
    processless_pool,
    scale_lab,
)
from tests.support.waiting import eventually

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
    lab.api.delete(POOLS.format(NAMESPACE))
    lab.await_pods(0, ready_seconds(pods))


def start_warm(lab: Lab) -> None:
    """Start the operator and let one pool come and go: an API server is slow with a resource that it has just learned."""
    lab.start_operator()
    create_pools(lab, {"warm-up"}, 1)
    delete_pools(lab, 1)
    lab.await_silence(QUIET_SECONDS, READY_SECONDS)
    lab.calls()


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
    """Start the same pools with one operator, and with two that have a shard each."""
    pools, replicas = (20 if options.quick else 200), 4
    names = {f"pool-{index:03}" for index in range(pools)}
    with scale_lab("bench-shards") as lab:
        start_warm(lab)
        lab.stop_operator()
        seconds, cpus = [], []
        for operators in (["operator"], ["first", "second"]):
            lab.api.delete(LEASES)  # who was killed still holds one
            for name in operators:
                lab.start_operator(f"--shards={len(operators)}", name=name, elect=True)
            _await_leaders(lab, len(operators))
            before = [lab.usage(name).cpu for name in operators]
            seconds.append(_seconds(partial(create_pools, lab, names, replicas)))
            cpus.append(
                [lab.usage(name).cpu - then for name, then in zip(operators, before, strict=True)]
            )
            delete_pools(lab, pools * replicas)
            for name in operators:
                lab.stop_operator(name)
    (one,), two = cpus
    figures = [
        figure("CPU of the busier of two shards' processes", max(two), baseline=[one],
               against="one process for all", goal=Goal(one / 1.7)),
        figure("both together", sum(two), baseline=[one], against="one process for all"),
        figure("all Ready, two processes", seconds[1], baseline=[seconds[0]], against="one process for all"),
    ]  # fmt: skip
    notes = [
        f"{pools} pools of {replicas}. The API server takes more of these cores than both operators, so the time until all"
        " are Ready can't show what shards give; the CPU of the busier process is the time that they would take with cores"
        " of their own."
    ]
    return Result("reconcile", "Two shards on two processes", figures, notes, part="shards")


def _await_leaders(lab: Lab, count: int) -> None:
    def held() -> bool:
        leases = lab.api.items(LEASES, fresh=True)
        return sum(bool(lease["spec"].get("holderIdentity")) for lease in leases) >= count

    eventually("every shard is led", held, 60)


def _seconds(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began
