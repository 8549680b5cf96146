"""What a gang scheduler's installation adds to a cluster's API: for two the real CRD of its PodGroups.

The operator makes no object of Kueue's, so of Kueue there is only the group, with a kind of it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import yaml

from rollout_common.kube.errors import KubeError
from rollout_operator.api.gangs import GROUP_API_VERSIONS, GangScheduler
from tests.support.api.apiclient import Api, Obj
from tests.support.api.poollab import PoolLab

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_FILES = Path(__file__).parent / "gang_crds"

TWO_PODS: Obj = {
    "engine": {"type": "vllm", "image": "localhost/none"},
    "parallelism": {"tensor": 2, "nodes": 2},
    "accelerator": {"resource": "example.com/gpu"},
}
"""Of a spec: replicas of two pods, with one device each."""

_LOCAL_QUEUES: Obj = {
    "metadata": {
        "name": "localqueues.kueue.x-k8s.io",
        # The API server demands it for groups of this domain.
        "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/kueue"},
    },
    "spec": {
        "group": "kueue.x-k8s.io",
        "names": {"kind": "LocalQueue", "plural": "localqueues"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object"}},
            }
        ],
    },
}


def install_schedulers(api: Api, *schedulers: GangScheduler) -> None:
    """Have these in the cluster, for as long as it runs.

    None is ever removed: an API server takes from a second to more than half a minute to delete a kind
    that is new to it.
    """
    there = {each["metadata"]["name"] for each in api.get(CRDS)["items"]}
    for crd in map(_read_crd, schedulers):
        if crd["metadata"]["name"] not in there:
            api.create(CRDS, crd)


async def await_known(lab: PoolLab, *schedulers: GangScheduler) -> None:
    """Have the operator look until it knows of exactly these."""
    for _ in range(100):
        with suppress(KubeError):  # a new kind's storage takes some seconds
            await lab.context.gangs.look_again()
            if lab.context.gangs.found == frozenset(schedulers):
                return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the operator knows {lab.context.gangs.found}")


def group_path(scheduler: GangScheduler, namespace: str, name: str = "") -> str:
    """Path of the PodGroups of a namespace, or of one."""
    version = GROUP_API_VERSIONS[scheduler]
    return f"/apis/{version}/namespaces/{namespace}/podgroups/{name}".rstrip("/")


def _read_crd(scheduler: GangScheduler) -> Obj:
    if scheduler is GangScheduler.KUEUE:
        return _LOCAL_QUEUES
    group = GROUP_API_VERSIONS[scheduler].partition("/")[0]
    found: Obj = yaml.safe_load((_FILES / f"podgroups.{group}.yaml").read_text())
    return found
