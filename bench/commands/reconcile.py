"""The operator with 200 pools of 4 pods, against as many StatefulSets: latency, CPU, writes.

The pods have no processes (kwok); one server answers at all their control ports in the workers' own
words, so the operator polls, lifts fences, sets gates and writes status as ever. Its requests are
counted in the API server's audit log. Baselines of the same run: as many Deployments and StatefulSets of as many
pods, StatefulSets with a pool's Services and PodDisruptionBudget, and a bare list of everything. `make bench-scale` measures a thousand pools of eight pods, against its goals.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from bench.figures import Figure, Goal, Options, Result, figure
from bench.rigs.phases import QUIET_SECONDS, Phase, histogram_figure, kinds, measure_restarts, phase
from bench.rigs.plain_workloads import PlainWorkload, measure_plain, ready_seconds
from bench.rigs.scale_parts import (
    create_pools,
    delete_pools,
    measure_one_pool,
    measure_shards,
    measure_small_pools,
    start_warm,
)
from tests.support.cluster.scalelab import Lab, scale_lab

REPLICAS = 4
LARGE_PODS = 4000
"""From so many pods on, the goals of a thousand pools of eight pods hold."""
MOST_STARTS = 3
"""So often at most do so many pods start and get new weights: each start takes ten minutes."""
CONTROL_PLANE = (
    "kube-apiserver",
    "kube-controller-manager",
    "etcd",
    "kube-scheduler",
    "kwok",
    "operator",
)
ALWAYS = ("… writes",)
"""What has the same goal at any size: nothing is written while nothing happens."""


def run(options: Options) -> Iterator[Result]:
    yield _measure_pools(options)
    if _is_large(*_size(options)):
        yield measure_small_pools(options)
        yield measure_one_pool(options)
        yield measure_shards(options)


def _size(options: Options) -> tuple[int, int]:
    """Return how many pools are measured, and how many replicas of each."""
    return options.pools or (50 if options.quick else 200), options.replicas or REPLICAS


def _is_large(pools: int, replicas: int) -> bool:
    return pools * replicas >= LARGE_PODS


def _measure_pools(options: Options) -> Result:
    pools, replicas = _size(options)
    window, rounds = 5 if options.quick else 10, options.count(5, 2)
    starts_wanted = min(rounds, MOST_STARTS) if _is_large(pools, replicas) else rounds
    with scale_lab("bench-reconcile") as lab:
        names = {f"pool-{index:03}" for index in range(pools)}
        start_warm(lab)
        lab.stop_operator()
        # No goal hangs on these two: once is enough.
        deployments = measure_plain(lab, "Deployment", pools, replicas)
        services = measure_plain(lab, "StatefulSet", pools, replicas, with_services=True)
        starts = []
        for number in range(starts_wanted):
            if number:
                delete_pools(lab, pools * replicas)
                lab.stop_operator()
            starts.append(_measure_start(lab, names, replicas))
        _await_silence(lab, pools)
        asked = lab.counts()["/v1/state"]
        steady = [phase(lab, partial(time.sleep, window)) for _ in range(rounds)]
        polls = (lab.counts()["/v1/state"] - asked) / sum(each.seconds for each in steady)
        updates = []
        for number in range(starts_wanted):
            updates.append(phase(lab, partial(_update, lab, names, number + 1)))
            _await_silence(lab, pools)
        restarts, took, writes = measure_restarts(lab, pools * replicas, rounds, 15)
        figures = [
            *_start_figures(starts, deployments, services, pools, replicas),
            *_memory_figures(starts, pools * replicas),
            *_steady_figures(steady, pools, polls),
            *_update_figures(updates, pools),
            took,
            figure("… CPU of the operator", [each.cpu for each in restarts]),
            writes,
            histogram_figure("… one pass, last restart", restarts[-1], "reconcile_duration"),
        ]
    used = starts[-1].used
    notes = [
        f"{pools} pools of {replicas} pods; everything, the API server too, on these cores.",
        f"CPU of the last start: {', '.join(f'{seconds:.1f} s {name}' for name, seconds in used.items())}.",
        *_describe_requests(starts[-1].phase, steady, restarts[-1], f"{rounds} x {window} s"),
    ]
    title = f"{pools} pools of {replicas} pods"
    if _is_large(pools, replicas):
        return Result("reconcile", title, figures, notes, part="scale")
    return Result("reconcile", title, [_without_goal(each) for each in figures], notes)


def _await_silence(lab: Lab, pools: int) -> None:
    lab.await_silence(QUIET_SECONDS, ready_seconds(pools))


@dataclass(frozen=True, slots=True)
class _Start:
    """One start of all pools by a fresh operator, next to StatefulSets; `empty`: bytes of the operator before it."""

    sets: PlainWorkload
    phase: Phase
    empty: int
    used: dict[str, float]
    """CPU seconds of each process of the control plane."""


def _measure_start(lab: Lab, names: set[str], replicas: int) -> _Start:
    sets = measure_plain(lab, "StatefulSet", len(names), replicas)
    lab.start_operator()
    lab.calls()
    empty, before = lab.usage().resident, _read_cpu(lab)
    start = phase(lab, partial(create_pools, lab, names, replicas))
    used = {name: seconds - before[name] for name, seconds in _read_cpu(lab).items()}
    return _Start(sets, start, empty, used)


def _read_cpu(lab: Lab) -> dict[str, float]:
    """Return the CPU seconds that each process of the control plane has used so far."""
    return {name: lab.usage(name).cpu for name in CONTROL_PLANE}


def _describe_requests(
    start: Phase, steady: list[Phase], restart: Phase, windows: str
) -> list[str]:
    quiet = [call for each in steady for call in each.calls]
    return [
        f"Requests of the last start, by kind: {kinds(start.calls)}.",
        f"Requests in steady state ({windows}): {kinds(quiet)}.",
        f"Requests of the last restart: {kinds(restart.calls)}.",
        "Quantiles of passes and waits are interpolated within the buckets of the operator's"
        " histograms, which know no least and no greatest.",
    ]


def _without_goal(found: Figure) -> Figure:
    """Return the figure without a goal that only many pods have."""
    return found if found.label in ALWAYS else replace(found, goal=None)


def _update(lab: Lab, names: set[str], version: int) -> None:
    target = {"epoch": 1, "version": version, "source": {"path": f"/models/{version}"}}
    for name in sorted(names):
        lab.patch(name, weights={"target": target})
    lab.await_condition("WeightsSynced", names, ready_seconds(len(names)))


def _start_figures(
    starts: list[_Start],
    deployments: PlainWorkload,
    services: PlainWorkload,
    pools: int,
    replicas: int,
) -> list[Figure]:
    """Return the figures of the starts; `services`: StatefulSets with what else a pool has."""
    phases = [each.phase for each in starts]
    seconds = [each.seconds for each in phases]
    writes = [len(each.writes) for each in phases]
    sets = [each.sets.seconds for each in starts]
    statuses = [
        sum(call.resource == "rolloutreplicas/status" for call in each.writes) for each in phases
    ]
    return [
        figure("all pools Ready, from the first create", seconds,
               baseline=sets, against="as many StatefulSets and pods",
               goal=Goal(2 * median(sets))),
        figure("… next to Deployments", seconds,
               baseline=[deployments.seconds],
               against="as many Deployments and pods"),
        figure("… next to what a pool has of Kubernetes", seconds,
               baseline=[services.seconds],
               against="StatefulSets, each with two Services and a PodDisruptionBudget"),
        figure("… CPU of the operator", [each.cpu for each in phases],
               baseline=[each.sets.cpu for each in starts],
               against="of the controller-manager for the StatefulSets"),
        figure("… CPU for each write", [1000 * each.cpu / len(each.writes) for each in phases],
               "ms", goal=Goal(2)),
        histogram_figure("… one pass, last start", phases[-1], "reconcile_duration", 0.25),
        histogram_figure("… wait in the queue, last start", phases[-1], "queue_wait", 1.0),
        figure("… writes of a pool", [count / pools for count in writes], "calls",
               baseline=2 + 2 * replicas, against=f"2 Services, {replicas} pods, {replicas} gates",
               goal=Goal(20)),
        figure("… of them to status", [count / pools for count in statuses], "calls"),
    ]  # fmt: skip


def _memory_figures(starts: list[_Start], pods: int) -> list[Figure]:
    resident = [each.phase.resident / 2**20 for each in starts]
    kept = [(each.phase.resident - each.empty) / pods / 2**10 for each in starts]
    return [
        figure("resident memory", resident, "MiB", goal=Goal(350)),
        figure("… of it for each pod", kept, "KiB", goal=Goal(6)),
    ]


def _steady_figures(steady: list[Phase], pools: int, asked: float) -> list[Figure]:
    cpu = [100 * each.cpu / each.seconds for each in steady]
    requests = [60 * len(each.calls) / each.seconds / pools for each in steady]
    return [
        figure(
            f"steady state: CPU share ({asked:.0f} questions to workers a second)",
            cpu,
            "%",
            goal=Goal(8),
        ),
        figure("… writes", [len(each.writes) for each in steady], "calls", goal=Goal(0, tail=0)),
        figure("… requests per pool and minute", requests, "calls"),
    ]


def _update_figures(updates: list[Phase], pools: int) -> list[Figure]:
    return [
        figure(
            "new weights in all pools at once, until all are synced",
            [each.seconds for each in updates],
            goal=Goal(30),
        ),
        figure("… CPU of the operator", [each.cpu for each in updates]),
        figure("… writes of a pool", [len(each.writes) / pools for each in updates], "calls"),
        histogram_figure("… one pass, last update", updates[-1], "reconcile_duration"),
    ]
