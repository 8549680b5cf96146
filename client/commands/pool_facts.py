"""What the API server knows of a pool: the object, its pods, and the events about both."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rollout_client.cluster_client import ClusterClient
from rollout_client.errors import ClusterError

from .settings import READ_SECONDS

Obj = dict[str, Any]
POOLS = "/apis/rollout.dev/v1alpha1/namespaces/{}/rolloutreplicas"


class CommandFailed(Exception):
    """What the command can't do, in one sentence that says what to do instead."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """A pool as the API server shows it.

    Attributes:
        pool: The RolloutReplica.
        pods: Its pods, by name.
        events: About it, oldest first.
        now: When it was read.
    """

    pool: Obj
    pods: Mapping[str, Obj]
    events: Sequence[Obj]
    now: datetime

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.pool["metadata"]["name"])

    @property
    def status(self) -> Obj:
        """Its status; empty if no operator has looked at it."""
        found: Obj = self.pool.get("status") or {}
        return found

    def find_condition(self, kind: str) -> Obj:
        """Return a condition; empty if there is none."""
        found = (c for c in self.status.get("conditions") or () if c["type"] == kind)
        return next(found, {})

    def age_of(self, time: str | None) -> float | None:
        """Return how many seconds ago an RFC 3339 time was; None if there is none."""
        return None if time is None else (self.now - read_time(time)).total_seconds()


def read_time(text: str) -> datetime:
    """Return a time as Kubernetes writes it."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


async def list_pools(client: ClusterClient, namespace: str) -> list[Obj]:
    """Return the pools of a namespace, by name."""
    found = await read_object(client, POOLS.format(namespace), f"pools in namespace {namespace!r}")
    return sorted(found["items"], key=lambda pool: str(pool["metadata"]["name"]))


async def read_facts(client: ClusterClient, namespace: str, name: str) -> PoolFacts:
    """Read a pool, its pods and its events.

    Raises:
        CommandFailed: The pool does not exist, or it can't be read.
    """
    path = f"{POOLS.format(namespace)}/{name}"
    pods = f"/api/v1/namespaces/{namespace}/pods"
    events = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
    found = await asyncio.gather(
        read_object(client, path, f"pool {name!r} in namespace {namespace!r}"),
        read_object(client, pods, "its pods", {"labelSelector": f"rollout.dev/pool={name}"}),
        read_object(client, events, "its events"),
        return_exceptions=True,
    )
    for each in found:
        if isinstance(each, BaseException):
            raise each
    pool, pod_list, event_list = (each for each in found if isinstance(each, dict))
    uid = pool["metadata"]["uid"]
    by_name = {pod["metadata"]["name"]: pod for pod in pod_list["items"]}
    about = {uid, *(pod["metadata"]["uid"] for pod in by_name.values())}
    mine = [e for e in event_list["items"] if (e.get("regarding") or {}).get("uid") in about]
    return PoolFacts(pool, by_name, sorted(mine, key=event_time), datetime.now(UTC))


def event_time(event: Obj) -> str:
    """Return when an event was seen last."""
    series = event.get("series") or {}
    seen = series.get("lastObservedTime") or event.get("deprecatedLastTimestamp")
    return str(seen or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


async def read_object(
    client: ClusterClient, path: str, what: str, params: Mapping[str, str] | None = None
) -> Obj:
    """Return an object or a list.

    Raises:
        CommandFailed: It can't be read; the text says why and what to do.
    """
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await client.get(path, params)
    except TimeoutError:
        raise CommandFailed(
            f"the API server has not answered for {READ_SECONDS:g} s: check the cluster of your kubeconfig"
        ) from None
    except ClusterError as error:
        raise CommandFailed(_explain_failure(error, what)) from error


def _explain_failure(error: ClusterError, what: str) -> str:
    if error.status == 404 and "could not find the requested resource" in str(error):
        return "this cluster has no RolloutReplicas: install the chart rollout-operator first"
    if error.status == 404:
        return f"{what} does not exist: `kubectl get rr -A` lists all pools"
    if error.status == 403:
        return f"you may not read {what}: ask for the role rollout-viewer ({error})"
    if error.status == 401:
        return (
            f"the API server refuses your login: log in again, or name another --context ({error})"
        )
    return f"can't read {what}: {error}"
