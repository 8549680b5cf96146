"""The operator with 200 RolloutReplicas of 4 pods: reconcile latency, CPU, writes, restart.

The pods have no process (kwok); one server answers at all their control ports in the workers' own
words, so the operator polls, lifts fences, sets gates and writes status as ever. Its requests are
counted in the API server's audit log. Baselines of the same run: as many Deployments of as many
pods, and a bare list of everything.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from apiclient import PODS, POOLS, Obj
from localkube import processes
from scalelab import NAMESPACE, Call, Lab, Usage, processless_pool, scale_lab, usage_of

from .results import Figure, Options, Result

SUMMARY = "200 pools of 4 pods without processes: latency, CPU, writes, restart"
REPLICAS = 4
READY_SECONDS = 420.0
QUIET_SECONDS = 5.0
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
SERVICES = f"/api/v1/namespaces/{NAMESPACE}/services"
DURATION = "rollout_operator_reconcile_duration_seconds"
WAIT = "rollout_operator_queue_wait_seconds"
GANG = {
    "engine": {"type": "vllm"},
    "parallelism": {"tensor": 2, "nodes": 2},
    "accelerator": {"resource": "nvidia.com/gpu"},
}
Histogram = Mapping[str, Mapping[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Phase:
    """What the operator did between two moments."""

    seconds: float
    cpu: float
    resident: int
    calls: list[Call]
    before: Histogram
    after: Histogram

    @property
    def writes(self) -> list[Call]:
        """Requests that change objects."""
        return [call for call in self.calls if call.is_write]

    def quantile(self, name: str, q: float) -> float:
        """Quantile of a histogram's samples in this phase, within its buckets' width."""
        return quantile(self.before.get(f"{name}_bucket", {}), self.after[f"{name}_bucket"], q)

    def count(self, name: str) -> float:
        """Samples of a histogram in this phase."""
        key = f"{name}_count"
        return sum(self.after[key].values()) - sum(self.before.get(key, {}).values())


def run(options: Options) -> Result:
    """Measure."""
    pools = options.count(200, 50)
    with scale_lab("bench-reconcile") as lab:
        names = {f"pool-{index:03}" for index in range(pools)}
        plain = _plain(lab, pools)
        lab.start_operator()
        lab.calls()
        start = _phase(lab, partial(_create, lab, names, {}))
        steady = _phase(lab, lambda: time.sleep(10 if options.quick else 30))
        update = _phase(lab, partial(_update, lab, names))
        listing = _listing(lab)
        restart = _restart(lab, pools)
        figures = [
            *_start_figures(start, plain, pools),
            *_steady_figures(steady, pools),
            *_update_figures(update, pools),
            *_restart_figures(restart, listing),
        ]
        figures += _gangs(lab, names)
    notes = [
        f"{pools} RolloutReplicas of {REPLICAS} pods; everything, the API server too, on these cores.",
        f"Requests of a start, by kind: {_kinds(start.calls)}.",
        f"Requests in steady state ({steady.seconds:.0f} s): {_kinds(steady.calls) or 'none'}.",
        f"Requests of a restart: {_kinds(restart.calls)}.",
        "Quantiles of passes are interpolated within the buckets of the operator's histogram.",
    ]
    return Result("reconcile", f"{pools} pools of {REPLICAS} pods", figures, notes)


def _phase(lab: Lab, act: object) -> Phase:
    assert callable(act)
    before, used, began = lab.metrics(), lab.usage(), time.monotonic()
    act()
    took = time.monotonic() - began
    return _ended(lab, took, used, before)


def _ended(lab: Lab, took: float, used: Usage, before: Histogram) -> Phase:
    now = lab.usage()
    calls = lab.calls()
    return Phase(took, now.cpu - used.cpu, now.resident, calls, before, lab.metrics())


def _create(lab: Lab, names: set[str], spec: Obj) -> None:
    lab.create(*(processless_pool(name, replicas=REPLICAS, **spec) for name in sorted(names)))
    lab.await_condition("Ready", names, READY_SECONDS)


def _update(lab: Lab, names: set[str]) -> None:
    target = {"epoch": 1, "version": 1, "source": {"path": "/models/next"}}
    for name in sorted(names):
        lab.patch(name, weights={"target": target})
    lab.await_condition("WeightsSynced", names, READY_SECONDS)


@dataclass(frozen=True, slots=True)
class Plain:
    """What Kubernetes takes for as many pods of Deployments."""

    seconds: float
    cpu: float


def _plain(lab: Lab, count: int) -> Plain:
    manager = processes.recorded(lab.cluster.state, "kube-controller-manager")
    assert manager is not None, "the controller-manager runs"
    used, began = usage_of(manager.pid), time.monotonic()
    for index in range(count):
        lab.api.create(DEPLOYMENTS, _deployment(f"plain-{index:03}"))
    _await_pods(lab, count * REPLICAS, READY_SECONDS)
    took, cpu = time.monotonic() - began, usage_of(manager.pid).cpu - used.cpu
    lab.api.delete(DEPLOYMENTS, propagationPolicy="Background")
    _await_pods(lab, 0, READY_SECONDS)
    return Plain(took, cpu)


def _await_pods(lab: Lab, count: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (ready := sum(_is_ready(pod) for pod in lab.pods())) != count:
        if time.monotonic() > end:
            raise RuntimeError(f"{ready} of {count} pods after {seconds:g} s")
        time.sleep(0.2)


def _is_ready(pod: Obj) -> bool:
    found = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in found)


def _deployment(name: str) -> Obj:
    labels = {"app": name}
    container = {"name": "worker", "image": "localhost/none"}
    pod = {"nodeSelector": {"kubernetes.io/hostname": "fake-1"}, "containers": [container]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": REPLICAS,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _listing(lab: Lab) -> float:
    began = time.monotonic()
    for path in (POOLS.format(NAMESPACE), PODS.format(NAMESPACE), SERVICES):
        lab.api.get(path)
    return time.monotonic() - began


def _restart(lab: Lab, pools: int) -> Phase:
    """Kill the operator and wait until its successor knows every pool and has heard every head."""
    lab.stop_operator()
    lab.calls()
    asked, began = lab.counts()["/v1/state"], time.monotonic()
    lab.start_operator()
    end = began + READY_SECONDS
    while not _converged(lab, pools, asked):
        if time.monotonic() > end:
            raise RuntimeError(f"the restarted operator has not converged in {READY_SECONDS:g} s")
        time.sleep(0.05)
    took = time.monotonic() - began
    time.sleep(QUIET_SECONDS)  # a write that comes late counts, too
    return _ended(lab, took, Usage(0, 0, began), {})


def _converged(lab: Lab, pools: int, asked: int) -> bool:
    ready = lab.metrics().get("rollout_pool_replicas_ready", {}).values()
    heard = lab.counts()["/v1/state"] - asked
    return sum(ready) == pools * REPLICAS and heard >= pools * REPLICAS


def _gangs(lab: Lab, names: set[str]) -> list[Figure]:
    """The same number of pods as gangs of two."""
    lab.api.delete(POOLS.format(NAMESPACE), propagationPolicy="Background")
    began = time.monotonic()
    _await_pods(lab, 0, READY_SECONDS)
    deleted = time.monotonic() - began
    lab.await_silence(1, 60)
    gangs = processless_pools(names)
    used, began = lab.usage(), time.monotonic()
    lab.create(*gangs)
    lab.await_condition("Ready", names, READY_SECONDS)
    took, cpu = time.monotonic() - began, lab.usage().cpu - used.cpu
    return [
        Figure("deletion of all pools until no pod is left", "s", deleted),
        Figure("gangs: 2 replicas of 2 pods each until all Ready", "s", took),
        Figure("gangs: CPU of the operator", "s", cpu),
    ]


def processless_pools(names: set[str]) -> list[Obj]:
    """Pools of 2 gangs of 2 pods."""
    return [processless_pool(name, **(GANG | {"replicas": 2})) for name in sorted(names)]


def quantile(
    before: Mapping[tuple[str, ...], float], after: Mapping[tuple[str, ...], float], q: float
) -> float:
    """Quantile of what a cumulative histogram gained, linear within a bucket."""
    gained = sorted((float(le[0]), n - before.get(le, 0.0)) for le, n in after.items())
    wanted = q * gained[-1][1]
    low, below = 0.0, 0.0
    for high, count in gained:
        if count >= wanted:
            if high == float("inf") or count == below:
                return low
            return low + (high - low) * (wanted - below) / (count - below)
        low, below = high, count
    return low


def _passes(phase: Phase, what: str) -> Figure:
    label = f"one pass, {what} ({phase.count(DURATION):.0f} passes)"
    p50, p99 = phase.quantile(DURATION, 0.5), phase.quantile(DURATION, 0.99)
    return Figure(label, "s", p50, p99)


def _start_figures(start: Phase, plain: Plain, pools: int) -> list[Figure]:
    per_pool = len(start.writes) / pools
    needed = 2 + 2 * REPLICAS
    statuses = sum(call.resource == "rolloutreplicas/status" for call in start.writes) / pools
    return [
        Figure("all pools Ready, from the first create", "s", start.seconds,
               baseline=plain.seconds, against="as many Deployments and pods"),
        Figure("CPU of the operator for it", "s", start.cpu,
               baseline=plain.cpu, against="of the controller-manager for the Deployments"),
        _passes(start, "start"),
        Figure("wait in the queue, start", "s", start.quantile(WAIT, 0.5), start.quantile(WAIT, 0.99)),
        Figure("writes of a pool's start", "calls", per_pool,
               baseline=needed, against="2 Services, 4 pods, 4 gates"),
        Figure("… of them status", "calls", statuses),
        Figure("resident memory", "MiB", start.resident / 2**20),
    ]  # fmt: skip


def _steady_figures(steady: Phase, pools: int) -> list[Figure]:
    heads = pools * REPLICAS
    polls = heads / max(5.0, heads / 200)
    label = f"CPU share in steady state ({polls:.0f} polls a second)"
    return [
        Figure(label, "%", 100 * steady.cpu / steady.seconds),
        Figure("writes in steady state", "calls", len(steady.writes), goal=(0, None)),
        Figure("requests of a pool and minute in steady state", "calls",
               60 * len(steady.calls) / steady.seconds / pools),
    ]  # fmt: skip


def _update_figures(update: Phase, pools: int) -> list[Figure]:
    return [
        Figure("new weights in all pools at once, until all are synced", "s", update.seconds),
        Figure("CPU of the operator for it", "s", update.cpu),
        Figure("writes of a pool's update", "calls", len(update.writes) / pools),
        _passes(update, "update"),
    ]


def _restart_figures(restart: Phase, listing: float) -> list[Figure]:
    return [
        Figure("restart of the operator until it knows every worker", "s", restart.seconds,
               baseline=listing, against="a bare list of pools, pods, Services"),
        Figure("CPU of the operator for it", "s", restart.cpu),
        Figure("writes of a restart", "calls", len(restart.writes), goal=(0, None)),
        _passes(restart, "restart"),
    ]  # fmt: skip


def _kinds(calls: list[Call]) -> str:
    counted = Counter(f"{call.verb} {call.resource}" for call in calls if call.resource)
    return ", ".join(f"{count} {kind}" for kind, count in counted.most_common())
