"""Specs and pods of a small pool, for tests of what is pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollout_operator.api.revision import pod_revision
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.api.status import PoolCondition, RolloutReplicaStatus
from rollout_operator.core.observed_pool import ObservedPool, Pod

NOW = 1_000_000.0
GANG: dict[str, Any] = {
    "engine": {"type": "vllm"},
    "parallelism": {"tensor": 2, "nodes": 2},
    "accelerator": {"resource": "nvidia.com/gpu"},
}
"""Fields of a spec whose replicas have two pods."""


def spec_of(**changes: Any) -> RolloutReplicaSpec:
    """A pool of `hf` workers on CPU with these top-level fields."""
    document: dict[str, Any] = {
        "replicas": 2,
        "engine": {"type": "hf"},
        "model": {"source": {"path": "/models/tiny"}},
    }
    document.update(changes)
    return RolloutReplicaSpec.model_validate(document)


def a_pod(spec: RolloutReplicaSpec, replica: int = 0, rank: int = 0, **fields: Any) -> Pod:
    """A pod of ours that runs and is ready."""
    name = f"pool-{replica}-{rank}"
    made = Pod(
        name=name,
        uid=f"uid of {name}",
        replica=replica,
        rank=rank,
        revision=pod_revision(spec),
        phase="Running",
        owned=True,
        started=True,
        ready=True,
    )
    return replace(made, **fields)


def observed(*pods: Pod, **fields: Any) -> ObservedPool:
    """What a pass sees of a pool with these pods, of whose workers nothing is known."""
    nothing: dict[str, Any] = {
        "name": "pool", "namespace": "ns", "uid": "owner", "generation": 1, "pods": pods,
        "workers": {}, "conflicts": {}, "rejections": {}, "restarts_of": {},
        "barrier": None, "paused": False, "retry": "",
    }  # fmt: skip
    return ObservedPool(**nothing | fields)


def target(epoch: int, version: int, path: str | None = None) -> dict[str, Any]:
    """A weights section with this pointer."""
    source = path or f"/rollout/weights/{epoch}-{version}"
    return {"target": {"epoch": epoch, "version": version, "source": {"path": source}}}


def pushed(epoch: int, version: int) -> dict[str, Any]:
    """A weights section with this pointer to bytes that a trainer has pushed."""
    return {"target": {"epoch": epoch, "version": version, "source": {"pushed": {}}}}


def condition_of(status: RolloutReplicaStatus, kind: str) -> PoolCondition:
    """The condition of this type, which must be there."""
    found = status.find_condition(kind)
    assert found is not None
    return found


def colocated_spec(
    *, slots: int = 1, tensor: int = 1, nodes: int = 1, **changes: Any
) -> RolloutReplicaSpec:
    """A pool of `vllm` engines beside a trainer, with so many devices each."""
    colocation = {"trainerSelector": {"matchLabels": {"job": "grpo"}}, "slots": slots}
    if "request" in changes:
        colocation["request"] = changes.pop("request")
    shape = {"engine": {"type": "vllm"}, "parallelism": {"tensor": tensor, "nodes": nodes}}
    return spec_of(mode="Colocated", colocation=colocation, **shape, **changes)
