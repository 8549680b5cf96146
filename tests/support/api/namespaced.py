"""One namespace of a test cluster, as kubectl sees it."""

from __future__ import annotations

from typing import Any

import pytest

from localkube import Cluster, ClusterError
from manifests import text


class Namespace:
    """Runs kubectl in a namespace; fixtures make and delete it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

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
