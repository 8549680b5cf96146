"""One namespace of a test cluster: pools over HTTP, which is quick, and all as kubectl sees it."""

from __future__ import annotations

from typing import Any

import pytest

from localkube import Cluster, ClusterError
from tests.support.api.apiclient import MERGE, POOLS, api_of
from tests.support.manifests import text

STRICT = {"fieldValidation": "Strict"}
"""As kubectl asks: a field that nobody knows is refused."""


class Namespace:
    """Makes and changes pools in a namespace, or runs kubectl there; fixtures make and delete it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self._api = api_of(cluster)
        self._pools = POOLS.format(name)

    def create(self, manifest: dict[str, Any]) -> None:
        """Create a pool."""
        self._api.create(self._pools, manifest)

    def patch(self, name: str, spec: dict[str, Any]) -> None:
        """Merge into a pool's spec."""
        self._api.patch(f"{self._pools}/{name}", {"spec": spec})

    def refused(self, manifest: dict[str, Any]) -> str:
        """Return the words with which a pool is refused; fail if it is not. Nothing is stored."""
        return self._api.refusal("POST", self._pools, manifest, dryRun="All", **STRICT)

    def refused_patch(self, name: str, spec: dict[str, Any]) -> str:
        """Return the words with which a change of spec is refused; fail if it is not."""
        path = f"{self._pools}/{name}"
        return self._api.refusal("PATCH", path, {"spec": spec}, kind=MERGE, **STRICT)

    def kubectl(self, *arguments: str, manifest: dict[str, Any] | None = None) -> str:
        """Return what kubectl prints; a manifest goes to its stdin (`-f -`)."""
        return self.cluster.kubectl(
            "-n", self.name, *arguments, input=None if manifest is None else text(manifest)
        )

    def refusal(self, *arguments: str, manifest: dict[str, Any] | None = None) -> str:
        """Return the words with which the command is refused; fail if it is not."""
        with pytest.raises(ClusterError) as error:
            self.kubectl(*arguments, manifest=manifest)
        return str(error.value)
