"""What an object of the API server is in here: raw JSON, found by the pool that it belongs to."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

Obj = dict[str, Any]
"""A Kubernetes object, or a part of one, as JSON."""

ResourceName = Literal["pools", "pods", "services", "endpointslices", "poddisruptionbudgets"]
WATCHED_RESOURCES: tuple[ResourceName, ...] = get_args(ResourceName)
"""What the operator watches."""


class PoolKey(NamedTuple):
    """A pool: namespace and name of a RolloutReplica."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
