"""kubectl apply until a pool is Ready, part by part, against a Deployment of the same pod.

Times are read from this process's clock when a watch brings the change, so each includes the API
server's own few milliseconds. What happens inside a worker is read from its log, whose lines the
container runtime stamps by the same machine's clock. The baseline has the same image, command,
volumes and probes on the same cluster: what Kubernetes and the engine take anyway.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from apiclient import PODS, POOLS, Api, Obj, Seen, Watch, watching
from bench.options import Options
from bench.reporting.figures import Result, figure
from bench.rigs.cluster import NAMESPACE, apply, await_true, pool_manifest, real_cluster, remove
from localkube import Cluster
from rollout_operator.api.names import GATE_SERVING
from scalelab import holds

READY_SECONDS = 240.0
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"

STEPS = (
    ("object", "step: kubectl apply, the object exists"),
    ("status", "step: first status written"),
    ("pod", "step: pod created"),
    ("scheduled", "step: pod scheduled"),
    ("container", "step: container started (volumes, sandbox)"),
    ("imported", "step: imports, both ports serve"),
    ("loaded", "step: model loaded"),
    ("gate", "step: gate set by the operator"),
    ("pod_ready", "step: pod set Ready by the kubelet"),
    ("ready", "step: RolloutReplica Ready"),
)


@dataclass(slots=True)
class Timeline:
    """When each step of a start ended, in monotonic seconds."""

    began: float
    at: dict[str, float] = field(default_factory=dict)

    def parts(self) -> dict[str, float]:
        """Return the seconds of each step, counted from the end of the one before it."""
        out, last = {}, self.began
        for name, _ in STEPS:
            # Two watches may show neighbouring steps in the wrong order by a millisecond.
            out[name] = max(0.0, self.at[name] - last)
            last = max(last, self.at[name])
        return out


def run(options: Options) -> Result:
    """Measure; every third run is followed by one of the baseline, so that both meet the same load."""
    runs = options.count(30, 5)
    with real_cluster() as cluster, Api(cluster) as api:
        timelines, plain = [], []
        paths = (POOLS.format(NAMESPACE), PODS.format(NAMESPACE))
        with watching(cluster, *paths) as (pools, pods):
            spec = _warm_up(cluster, api, pools)
            for index in range(runs):
                timelines.append(_start(cluster, api, pools, pods, f"start-{index}"))
                remove(api, f"start-{index}")
                if index % 3 == 0:
                    plain.append(_start_plain(cluster, api, pods, spec, f"plain-{index}"))
    return _result(timelines, plain)


def _result(timelines: list[Timeline], plain: list[float]) -> Result:
    whole = [t.at["ready"] - t.began for t in timelines]
    own = [t.parts() for t in timelines]
    share = [sum(p[n] for n in ("status", "pod", "gate", "ready")) for p in own]
    figures = [
        figure("kubectl apply until Ready", whole, baseline=plain, against="a Deployment's pod"),
        figure("… until the first status is written", _since(timelines, "status")),
        figure("… until the pod is created", _since(timelines, "pod")),
        *(figure(label, [parts[name] for parts in own]) for name, label in STEPS),
        figure("the operator's steps of it, together", share),
    ]
    notes = [
        "One replica, Hugging Face engine, a tiny model, images on the node.",
        "A step is counted from the end of the one before it.",
    ]
    return Result("startup", "Start of a pool", figures, notes)


def _since(timelines: list[Timeline], name: str) -> list[float]:
    return [t.at[name] - t.began for t in timelines]


def _warm_up(cluster: Cluster, api: Api, pools: Watch) -> Obj:
    """Start one pool, so that files are in memory; return its pod's spec for the baseline."""
    began = time.monotonic()
    apply(cluster, pool_manifest("warm"))
    pools.first("the first pool is Ready", _pool_is("warm", _is_ready), began, READY_SECONDS)
    spec: Obj = api.get(f"{PODS.format(NAMESPACE)}/warm-0-0")["spec"]
    remove(api, "warm")
    return spec


def _start(cluster: Cluster, api: Api, pools: Watch, pods: Watch, name: str) -> Timeline:
    line = Timeline(time.monotonic())
    apply(cluster, pool_manifest(name))

    def pool(step: str, what: Callable[[Obj], object]) -> None:
        line.at[step] = pools.first(step, _pool_is(name, what), line.began, READY_SECONDS).at

    def pod(step: str, what: Callable[[Obj], object]) -> None:
        seen = pods.first(step, _pool_is(f"{name}-0-0", what), line.began, READY_SECONDS)
        line.at[step] = seen.at

    pool("ready", _is_ready)
    pool("object", lambda _: True)
    pool("status", lambda o: (o.get("status") or {}).get("observedGeneration"))
    pod("pod", lambda _: True)
    pod("scheduled", lambda o: _condition(o, "PodScheduled"))
    pod("gate", lambda o: _condition(o, GATE_SERVING))
    pod("pod_ready", lambda o: _condition(o, "Ready"))
    started = api.get(f"{PODS.format(NAMESPACE)}/{name}-0-0")
    pod("container", lambda o: _running(o))
    line.at |= _from_log(cluster, started["metadata"]["name"])
    return line


def _pool_is(name: str, what: Callable[[Obj], object]) -> Callable[[Seen], bool]:
    return lambda seen: seen.obj["metadata"]["name"] == name and bool(what(seen.obj))


def _is_ready(pool: Obj) -> bool:
    return holds(pool, "Ready")


def _condition(obj: Obj, kind: str) -> bool:
    found = (obj.get("status") or {}).get("conditions") or ()
    return any(c["type"] == kind and c["status"] == "True" for c in found)


def _running(pod: Obj) -> bool:
    containers = (pod.get("status") or {}).get("containerStatuses") or ()
    return any("running" in c.get("state", {}) for c in containers)


def _from_log(cluster: Cluster, pod: str) -> dict[str, float]:
    """Return when the worker's ports served and when its model was loaded, in monotonic seconds."""
    text = cluster.kubectl("-n", NAMESPACE, "logs", pod)
    # Both clocks are read together: the log's times are wall-clock times of this machine.
    offset = time.monotonic() - time.time()
    wanted = {"imported": "serving", "loaded": "lifecycle Loading -> Active"}
    found: dict[str, float] = {}
    for line in text.splitlines():
        entry: Mapping[str, Any] = json.loads(line) if line.startswith("{") else {}
        for step, message in wanted.items():
            if entry.get("message") == message and step not in found:
                found[step] = datetime.fromisoformat(entry["time"]).timestamp() + offset
    missing = wanted.keys() - found.keys()
    if missing:
        raise RuntimeError(f"the log of {pod} does not say {sorted(missing)}")
    return found


def _start_plain(cluster: Cluster, api: Api, pods: Watch, spec: Obj, name: str) -> float:
    """Return the seconds until the same pod is Ready without an operator."""
    began = time.monotonic()
    apply(cluster, _deployment(name, spec))

    def is_ready(seen: Seen) -> bool:
        labels = seen.obj["metadata"].get("labels") or {}
        return labels.get("app") == name and _condition(seen.obj, "Ready")

    took = pods.first(f"{name} is Ready", is_ready, began, READY_SECONDS).at - began
    api.delete(f"{DEPLOYMENTS}/{name}", propagationPolicy="Background")
    left = PODS.format(NAMESPACE)
    await_true(f"{name} is gone", lambda: not api.items(left, f"app={name}"), 90)
    return took


def _deployment(name: str, spec: Obj) -> Obj:
    """Return the worker's pod outside a pool: no gate, no fence, its control port on loopback."""
    mine = ("ROLLOUT_POOL", "ROLLOUT_NAMESPACE", "ROLLOUT_AUTH")
    drop = ("nodeName", "hostname", "subdomain", "readinessGates", "restartPolicy", "tolerations")
    template = {key: value for key, value in spec.items() if key not in drop}
    container = dict(spec["containers"][0])
    kept = [e for e in container["env"] if e["name"] not in mine]
    alone = {"ROLLOUT_AUTH": "none", "ROLLOUT_CONTROL_HOST": "127.0.0.1"}
    container["env"] = [*kept, *({"name": k, "value": v} for k, v in alone.items())]
    container["volumeMounts"] = [
        m for m in container["volumeMounts"] if not m["name"].startswith("kube-api-access")
    ]
    template["containers"] = [container]
    template["volumes"] = [
        v for v in spec["volumes"] if not v["name"].startswith("kube-api-access")
    ]
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": template},
        },
    }
