"""What the demo applies to a cluster of the user's own is taken by an API server, strictly."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import rollout_local
from demo import colocated, scene
from localkube import Cluster

APPLY = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")


def test_namespace_claims_and_job_are_valid(crd: Cluster) -> None:
    namespace = rollout_local.namespace_manifest(scene.NAMESPACE, "baseline")
    items = [namespace, *scene.model_objects("worker:1")]
    crd.kubectl(*APPLY, input=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))


def test_the_colocated_trainer_is_given_every_file_that_it_imports() -> None:
    files = {Path(each).stem: colocated.EXAMPLES / each for each in colocated.SCRIPTS}
    there = {path.stem for path in colocated.EXAMPLES.glob("*/*.py")}
    for path in files.values():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
        names |= {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        assert names & there <= set(files), path
    for page in ("trainer.yaml", "README.md"):
        text = (colocated.EXAMPLES / "colocated" / page).read_text()
        for each in colocated.SCRIPTS:
            assert f"--from-file=examples/{each}" in text, page


def test_trainer_and_pool_of_the_colocated_example_are_valid(crd: Cluster) -> None:
    pool = (colocated.EXAMPLES / "colocated" / "pool.yaml").read_text()
    items = {"apiVersion": "v1", "kind": "List", "items": colocated.manifests(steps=1)}
    for text in (pool, json.dumps(items)):
        crd.kubectl(*APPLY, input=text)
