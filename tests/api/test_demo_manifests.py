"""What the demo applies to a cluster of the user's own is taken by an API server, strictly."""

from __future__ import annotations

from demo import scene
from localkube import Cluster


def test_claims_and_job_are_valid(crd: Cluster) -> None:
    for text in (scene._namespace(), scene._model_job("worker:1")):
        crd.kubectl(
            *("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"),
            input=text,
        )
