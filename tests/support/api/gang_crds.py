"""CustomResourceDefinitions by which a cluster shows a gang scheduler: the fields that matter, in the groups of the real ones."""

from __future__ import annotations

import time

from rollout_operator.api.gangs import GangScheduler
from tests.support.api.apiclient import Api, Obj

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

_MEMBERS = {"type": "integer", "format": "int32", "minimum": 1}
_TEXT = {"type": "string"}
_KINDS: dict[GangScheduler, tuple[str, str, str, dict[str, Obj]]] = {
    GangScheduler.SCHEDULER_PLUGINS: (
        "scheduling.x-k8s.io",
        "v1alpha1",
        "PodGroup",
        {"minMember": _MEMBERS, "scheduleTimeoutSeconds": {"type": "integer"}},
    ),
    GangScheduler.VOLCANO: (
        "scheduling.volcano.sh",
        "v1beta1",
        "PodGroup",
        {"minMember": _MEMBERS, "queue": {**_TEXT, "default": "default"}},
    ),
    GangScheduler.KUEUE: ("kueue.x-k8s.io", "v1beta1", "LocalQueue", {"clusterQueue": _TEXT}),
}


def install_gang_scheduler(api: Api, scheduler: GangScheduler) -> None:
    """Create the CRD of a scheduler."""
    group, version, kind, fields = _KINDS[scheduler]
    spec = {"type": "object", "properties": fields}
    body: Obj = {
        "metadata": {
            "name": _crd_name(scheduler),
            # The API server demands it for groups of this domain.
            "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes"},
        },
        "spec": {
            "group": group,
            "names": {"kind": kind, "plural": f"{kind.lower()}s"},
            "scope": "Namespaced",
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "properties": {
                                "spec": spec,
                                "status": {
                                    "type": "object",
                                    "x-kubernetes-preserve-unknown-fields": True,
                                },
                            },
                        }
                    },
                }
            ],
        },
    }
    api.create(CRDS, body)


def remove_gang_scheduler(api: Api, scheduler: GangScheduler) -> None:
    """Delete the CRD of a scheduler, and so its objects; return when it is gone."""
    name = _crd_name(scheduler)
    api.delete(f"{CRDS}/{name}")
    end = time.monotonic() + 30
    while any(each["metadata"]["name"] == name for each in api.get(CRDS)["items"]):
        assert time.monotonic() < end, f"{name} is still there"
        time.sleep(0.1)


def group_path(scheduler: GangScheduler, namespace: str, name: str = "") -> str:
    """Path of the PodGroups of a namespace, or of one."""
    group, version, kind, _ = _KINDS[scheduler]
    return f"/apis/{group}/{version}/namespaces/{namespace}/{kind.lower()}s/{name}".rstrip("/")


def _crd_name(scheduler: GangScheduler) -> str:
    group, _, kind, _ = _KINDS[scheduler]
    return f"{kind.lower()}s.{group}"
