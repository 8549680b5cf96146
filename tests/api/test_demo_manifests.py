"""What the demo applies to a cluster of the user's own is taken by an API server, strictly."""

from __future__ import annotations

import json

from demo import colocated, scene
from localkube import Cluster


def test_claims_and_job_are_valid(crd: Cluster) -> None:
    for text in (scene._namespace(), scene._model_job("worker:1")):
        crd.kubectl(
            *("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"),
            input=text,
        )


def test_trainer_and_pool_of_the_colocated_example_are_valid(crd: Cluster) -> None:
    pool = (colocated.EXAMPLES / "colocated" / "pool.yaml").read_text()
    items = {"apiVersion": "v1", "kind": "List", "items": colocated.manifests(steps=1)}
    for text in (pool, json.dumps(items)):
        crd.kubectl(
            *("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"),
            input=text,
        )
