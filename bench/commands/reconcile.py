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

from bench.figures import Figure, Goal, Options, Result, figure
from bench.rigs.phases import QUIET_SECONDS, Phase, histogram_figure, kinds, measure_restarts, phase
from bench.rigs.plain_workloads import PlainWorkload, measure_plain, ready_seconds
from bench.rigs.scale_parts import (
    create_pools,
    measure_one_pool,
    measure_shards,
    measure_small_pools,
    start_warm,
)
from tests.support.cluster.scalelab import Lab, scale_lab

REPLICAS = 4
LARGE_PODS = 4000
"""From so many pods on, the goals of a thousand pools of eight pods hold."""
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
    """Measure; steady state and restarts are repeated, the rest happens once."""
    pools, replicas = _size(options)
    window, rounds = 5 if options.quick else 10, options.count(5, 2)
    with scale_lab("bench-reconcile") as lab:
        names = {f"pool-{index:03}" for index in range(pools)}
        start_warm(lab)
        lab.stop_operator()
        plain = _measure_baselines(lab, pools, replicas)
        lab.start_operator()
        lab.calls()
        empty = lab.usage().resident
        used = _read_cpu(lab)
        start = phase(lab, partial(create_pools, lab, names, replicas))
        used = {name: seconds - used[name] for name, seconds in _read_cpu(lab).items()}
        lab.await_silence(QUIET_SECONDS, ready_seconds(pools))
        asked = lab.counts()["/v1/state"]
        steady = [phase(lab, partial(time.sleep, window)) for _ in range(rounds)]
        polls = (lab.counts()["/v1/state"] - asked) / sum(each.seconds for each in steady)
        update = phase(lab, partial(_update, lab, names))
        restarts, took, writes = measure_restarts(lab, pools * replicas, rounds, 15)
        figures = [
            *_start_figures(start, plain, pools, replicas),
            *_memory_figures(start.resident, empty, pools * replicas),
            *_steady_figures(steady, pools, polls),
            *_update_figures(update, pools),
            took,
            figure("… CPU of the operator", [each.cpu for each in restarts]),
            writes,
            histogram_figure("… one pass, last restart", restarts[-1], "reconcile_duration"),
        ]
    notes = [
        f"{pools} pools of {replicas} pods; everything, the API server too, on these cores.",
        f"CPU of the start: {', '.join(f'{seconds:.1f} s {name}' for name, seconds in used.items())}.",
        *_describe_requests(start, steady, restarts[-1], f"{rounds} x {window} s"),
    ]
    title = f"{pools} pools of {replicas} pods"
    if _is_large(pools, replicas):
        return Result("reconcile", title, figures, notes, part="scale")
    return Result("reconcile", title, [_without_goal(each) for each in figures], notes)


@dataclass(frozen=True, slots=True)
class _Baselines:
    """As many pods by Kubernetes' own kinds; `services`: StatefulSets with what else a pool has."""

    deployments: PlainWorkload
    sets: PlainWorkload
    services: PlainWorkload


def _measure_baselines(lab: Lab, pools: int, replicas: int) -> _Baselines:
    deployments = measure_plain(lab, "Deployment", pools, replicas)
    sets = measure_plain(lab, "StatefulSet", pools, replicas)
    services = measure_plain(lab, "StatefulSet", pools, replicas, with_services=True)
    return _Baselines(deployments, sets, services)


def _read_cpu(lab: Lab) -> dict[str, float]:
    """Return the CPU seconds that each process of the control plane has used so far."""
    return {name: lab.usage(name).cpu for name in CONTROL_PLANE}


def _describe_requests(
    start: Phase, steady: list[Phase], restart: Phase, windows: str
) -> list[str]:
    quiet = [call for each in steady for call in each.calls]
    return [
        f"Requests of the start, by kind: {kinds(start.calls)}.",
        f"Requests in steady state ({windows}): {kinds(quiet)}.",
        f"Requests of the last restart: {kinds(restart.calls)}.",
        "Quantiles of passes and waits are interpolated within the buckets of the operator's"
        " histograms, which know no least and no greatest.",
    ]


def _without_goal(found: Figure) -> Figure:
    """Return the figure without a goal that only many pods have."""
    return found if found.label in ALWAYS else replace(found, goal=None)


def _update(lab: Lab, names: set[str]) -> None:
    target = {"epoch": 1, "version": 1, "source": {"path": "/models/next"}}
    for name in sorted(names):
        lab.patch(name, weights={"target": target})
    lab.await_condition("WeightsSynced", names, ready_seconds(len(names)))


def _start_figures(start: Phase, plain: _Baselines, pools: int, replicas: int) -> list[Figure]:
    needed = 2 + 2 * replicas
    statuses = sum(call.resource == "rolloutreplicas/status" for call in start.writes) / pools
    return [
        figure("all pools Ready, from the first create", start.seconds,
               baseline=[plain.sets.seconds], against="as many StatefulSets and pods",
               goal=Goal(2 * plain.sets.seconds)),
        figure("… next to Deployments", start.seconds,
               baseline=[plain.deployments.seconds], against="as many Deployments and pods"),
        figure("… next to what a pool has of Kubernetes", start.seconds, baseline=[plain.services.seconds],
               against="StatefulSets, each with two Services and a PodDisruptionBudget"),
        figure("… CPU of the operator", start.cpu,
               baseline=[plain.sets.cpu], against="of the controller-manager for the StatefulSets"),
        figure("… CPU for each write", 1000 * start.cpu / len(start.writes), "ms", goal=Goal(2)),
        histogram_figure("… one pass", start, "reconcile_duration", 0.25),
        histogram_figure("… wait in the queue", start, "queue_wait", 1.0),
        figure("… writes of a pool", len(start.writes) / pools, "calls",
               baseline=needed, against=f"2 Services, {replicas} pods, {replicas} gates",
               goal=Goal(20)),
        figure("… of them to status", statuses, "calls"),
    ]  # fmt: skip


def _memory_figures(resident: int, empty: int, pods: int) -> list[Figure]:
    return [
        figure("resident memory", resident / 2**20, "MiB", goal=Goal(350)),
        figure("… of it for each pod", (resident - empty) / pods / 2**10, "KiB", goal=Goal(6)),
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


def _update_figures(update: Phase, pools: int) -> list[Figure]:
    return [
        figure(
            "new weights in all pools at once, until all are synced", update.seconds, goal=Goal(30)
        ),
        figure("… CPU of the operator", update.cpu),
        figure("… writes of a pool", len(update.writes) / pools, "calls"),
        histogram_figure("… one pass", update, "reconcile_duration"),
    ]
