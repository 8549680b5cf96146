"""What a gang scheduler's installation adds to a cluster's API: for two the real CRD of its PodGroups.

The operator makes no object of Kueue's, so of Kueue there is only the group, with a kind of it.
"""

from __future__ import annotations

import time
from pathlib import Path

import yaml

from rollout_operator.api.gangs import GROUP_API_VERSIONS, GangScheduler
from tests.support.api.apiclient import Api, Obj

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_FILES = Path(__file__).parent / "gang_crds"

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


def install_gang_scheduler(api: Api, scheduler: GangScheduler) -> None:
    """Create the CRD of a scheduler."""
    api.create(CRDS, _read_crd(scheduler))


def remove_gang_scheduler(api: Api, scheduler: GangScheduler) -> None:
    """Delete the CRD of a scheduler, and so its objects; return when it is gone."""
    name = _read_crd(scheduler)["metadata"]["name"]
    api.delete(f"{CRDS}/{name}")
    end = time.monotonic() + 30
    while any(each["metadata"]["name"] == name for each in api.get(CRDS)["items"]):
        assert time.monotonic() < end, f"{name} is still there"
        time.sleep(0.1)


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
