"""The pool that a command is about: its objects in the API server, and errors in one sentence."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from rollout_client.cluster_client import ClusterClient, load_access, pools_path
from rollout_client.errors import ClusterError
from rollout_common.kube.access import Obj

from .command_output import CommandFailed

LABEL_POOL = "rollout.dev/pool"


@dataclass(frozen=True, slots=True)
class PoolAccess:
    """A pool, or all pools of a namespace: `name` is empty if the command names none."""

    kube: ClusterClient
    namespace: str
    name: str

    @property
    def collection(self) -> str:
        """Path of the namespace's pools."""
        return pools_path(self.namespace)

    async def read_pool(self, seconds: float | None = None) -> Obj:
        """Return the RolloutReplica; with `seconds` passing failures are retried until then."""
        return await self.kube.get(f"{self.collection}/{self.name}", seconds=seconds)

    async def read_pods(self) -> list[Obj]:
        """Return the pool's pods, sorted by name."""
        return await self.list_objects("pods", {"labelSelector": f"{LABEL_POOL}={self.name}"})

    async def list_objects(
        self, kind: str, params: dict[str, str] | None = None, namespace: str | None = None
    ) -> list[Obj]:
        """Return the objects of a kind of the core API in a namespace, by default the pool's."""
        path = f"/api/v1/namespaces/{namespace or self.namespace}/{kind}"
        items: list[Obj] = (await self.kube.get(path, params)).get("items") or []
        return sorted(items, key=lambda each: str(each["metadata"]["name"]))


def open_pool(given: argparse.Namespace) -> PoolAccess:
    """Return the access to the pool that the options name.

    Raises:
        CommandFailed: No credentials work.
    """
    try:
        found = load_access(given.kubeconfig, given.context)
    except ClusterError as error:
        raise CommandFailed(f"{error}; give --kubeconfig and --context") from error
    namespace = given.namespace or found.namespace
    return PoolAccess(ClusterClient(found), namespace, given.pool or "")


async def explain_error(error: ClusterError, pool: PoolAccess) -> str:
    """Return what a failed request means, and what to do, in one sentence."""
    if error.status == 0:
        return f"the cluster can't be reached: {error}; check the kubeconfig, --context and the network"
    if error.status == 401:
        return f"the API server does not accept the credentials ({error}): log in again"
    if error.status == 403:
        return (
            f"{error}; ask for the role rollout-viewer to read pools, or rollout-trainer to steer them "
            "(docs/operate/rights.md#rights)"
        )
    if error.status != 404:
        return f"the API server refused: {error}"
    if "rolloutreplicas.rollout.dev" not in str(error) or not pool.name:
        return (
            "this cluster has no CustomResourceDefinition rolloutreplicas.rollout.dev: install the operator "
            "(helm install rollout-operator), or give another --context"
        )
    return f"namespace {pool.namespace} has no pool {pool.name}{await _name_others(pool)}"


async def _name_others(pool: PoolAccess) -> str:
    try:
        items = (await pool.kube.get(pool.collection)).get("items") or []
    except ClusterError:
        return ": check the name and -n"
    names = ", ".join(str(each["metadata"]["name"]) for each in items[:10])
    return f": its pools are {names}" if names else ", and no other: check -n and --context"
