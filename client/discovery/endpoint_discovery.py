"""Members from the EndpointSlices of a pool's data Service: heads, and whether each is ready.

Requests go to the pods themselves. Through the Service a kept-alive connection would stay with one
pod, whatever its load and whatever the others have cached.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from typing import Any

from rollout_client.cluster_client import ClusterClient
from rollout_client.errors import ClusterError

from .pool_members import CONTROL_PORT, DATA_PORT, Member, Publish

logger = logging.getLogger(__name__)

PORT_NAME = "data"
SERVICE_LABEL = "kubernetes.io/service-name"


class EndpointDiscovery:
    """Follows the slices of a RolloutReplica by list and watch; while the API server is silent, the last set stays.

    `control_tls`: whether the control ports speak TLS.
    """

    def __init__(
        self, kube: ClusterClient, name: str, namespace: str, *, control_tls: bool = False
    ) -> None:
        self.trouble = ""
        """Why it learns nothing new at the moment; empty: all is well."""
        self.refused = False
        """Whether that is a refusal, which waiting does not mend."""
        self._kube = kube
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._params = {"labelSelector": f"{SERVICE_LABEL}={name}"}
        self._name = name
        self._scheme = "https" if control_tls else "http"

    async def run_discovery(self, publish: Publish) -> None:
        """Publish each new set until cancelled."""
        last: tuple[Member, ...] | None = None
        async with aclosing(
            self._kube.follow_objects(self._path, self._params, self._report_trouble)
        ) as changes:
            async for slices in changes:
                found = members_of_slices(slices.values(), self._scheme)
                if found != last:
                    last = found
                    publish(found)

    def _report_trouble(self, error: ClusterError | None) -> None:
        trouble = "" if error is None else str(error)
        if trouble and trouble != self.trouble:
            logger.warning("can't list the members of %s: %s", self._name, trouble)
        self.trouble = trouble
        self.refused = error is not None and not error.is_transient


def members_of_slices(
    slices: Iterable[dict[str, Any]], control_scheme: str = "http"
) -> tuple[Member, ...]:
    """Return the members of all slices, in the order of their names.

    An endpoint may be in two slices while they are rearranged: it is ready if either says so.
    """
    found: dict[str, Member] = {}
    for each in slices:
        for member in _members_of_slice(each, control_scheme):
            known = found.get(member.url)
            if known is None or member.ready:
                found[member.url] = member
    return tuple(sorted(found.values(), key=lambda member: (member.name, member.url)))


def _members_of_slice(each: dict[str, Any], control_scheme: str) -> Iterator[Member]:
    ports = {port.get("name"): port.get("port") for port in each.get("ports") or ()}
    port = ports.get(PORT_NAME) or DATA_PORT
    for endpoint in each.get("endpoints") or ():
        for address in (endpoint.get("addresses") or ())[:1]:
            host = f"[{address}]" if ":" in address else address
            conditions = endpoint.get("conditions") or {}
            target = endpoint.get("targetRef") or {}
            yield Member(
                url=f"http://{host}:{port}",
                name=target.get("name") or f"{host}:{port}",
                control_url=f"{control_scheme}://{host}:{CONTROL_PORT}",
                # Left out means ready: so says the API.
                ready=conditions.get("ready") is not False,
            )
