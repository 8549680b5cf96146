"""What a pod has because it is one rank of several: its place, its port, its token, its probes."""

from __future__ import annotations

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec import PoolMode, RolloutReplicaSpec
from rollout_operator.core.settings import GANG_TOKEN_SECONDS

SCRAPE_ANNOTATION_PREFIX = "prometheus.io/"
"""Annotations that tell scrapers where a pod's metrics are."""

_TOKEN_VOLUME = "rollout-gang"
TOKEN_MOUNT: Obj = {"name": _TOKEN_VOLUME, "mountPath": names.GANG_MOUNT, "readOnly": True}


def gang_environment(
    pool: str, spec: RolloutReplicaSpec, replica: int, rank: int
) -> dict[str, str]:
    """Return the variables by which the worker of `(replica, rank)` knows the other ranks."""
    parallel = spec.parallelism
    shape = {
        "ROLLOUT_TENSOR": str(parallel.tensor),
        "ROLLOUT_PIPELINE": str(parallel.pipeline),
        "ROLLOUT_DATA": str(parallel.data),
    }
    if parallel.world_size == 1:
        # Where devices are counted, flags of the engine can't ask for more of them.
        return {} if spec.accelerator is None and spec.mode is PoolMode.STANDALONE else shape
    leader = names.pod_name(pool, replica, 0)
    values = {
        **shape,
        "ROLLOUT_NODES": str(parallel.nodes),
        "ROLLOUT_RANK": str(rank),
        "ROLLOUT_LEADER_ADDRESS": f"{leader}.{names.heads_service(pool)}",
    }
    if parallel.nodes > 1:
        values["ROLLOUT_GANG_PORT"] = str(names.GANG_PORT)
        values["ROLLOUT_GANG_TOKEN_FILE"] = f"{names.GANG_MOUNT}/token"
    return values


def container_ports(spec: RolloutReplicaSpec, rank: int) -> list[Obj]:
    """Return the container's ports: only a head takes requests and pushed weights."""
    ports = {"control": names.CONTROL_PORT}
    if rank == 0:
        ports = {"data": names.DATA_PORT, **ports, "weights": spec.weights.transport.port}
    if spec.parallelism.nodes > 1:
        ports["gang"] = names.GANG_PORT
    return [{"name": n, "containerPort": port, "protocol": "TCP"} for n, port in ports.items()]


def without_scraping(given: Obj, rank: int) -> Obj:
    """Return the template's annotations for one rank: a member has no data port to scrape."""
    if rank == 0 or given.get(f"{SCRAPE_ANNOTATION_PREFIX}port") != str(names.DATA_PORT):
        return {**given}
    return {k: v for k, v in given.items() if not k.startswith(SCRAPE_ANNOTATION_PREFIX)}


def token_volume(pool: str, namespace: str) -> Obj:
    """Return the volume with the token that the head shows its members; only this pool accepts it."""
    token = {
        "audience": names.token_audience(namespace, pool),
        "expirationSeconds": GANG_TOKEN_SECONDS,
        "path": "token",
    }
    return {"name": _TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}}


def worker_probes(rank: int, *, tls: bool) -> dict[str, Obj]:
    """Return the worker's probes; a member answers on its control port, which may speak TLS."""
    where: Obj = {"port": "control" if rank else "data"}
    if rank and tls:
        where["scheme"] = "HTTPS"

    def probe(path: str, period: int, failures: int, timeout: int | None = None) -> Obj:
        times = {"periodSeconds": period, "timeoutSeconds": timeout, "failureThreshold": failures}
        return {"httpGet": {"path": path, **where}} | {k: v for k, v in times.items() if v}

    return {
        # The port opens within seconds of the start; loading shows in /ready, not here.
        "startupProbe": probe("/health", 1, 300),
        "livenessProbe": probe("/health", 10, 6, timeout=5),
        "readinessProbe": probe("/ready", 2, 2, timeout=2),
    }
