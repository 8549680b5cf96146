"""A CRD in the cluster that is older than the operator: which fields of status it lacks, and who says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from rollout_operator.api.crd import custom_resource_definition
from rollout_operator.kube.installed_schema import InstalledSchema
from rollout_operator.kube.kube_client import KubeClient
from tests.support.loopback import Loopback

PATH = "/openapi/v3/apis/rollout.dev/v1alpha1"
Status = dict[str, Any]


@cache
def current_schema() -> dict[str, Any]:
    version: dict[str, Any] = custom_resource_definition()["spec"]["versions"][0]["schema"]
    schema: dict[str, Any] = version["openAPIV3Schema"]
    return schema


def published(change: Callable[[Status], object]) -> dict[str, Any]:
    """The document of a cluster whose CRD differs by this change."""
    schema = copy.deepcopy(current_schema())
    change(schema["properties"]["status"]["properties"])
    kinds = [
        {"x-kubernetes-group-version-kind": [{"kind": "RolloutReplicaList"}]},
        {**schema, "x-kubernetes-group-version-kind": [{"kind": "RolloutReplica"}]},
        {"type": "object"},
    ]
    return {"components": {"schemas": {str(at): kind for at, kind in enumerate(kinds)}}}


def without(field: str) -> Callable[[Status], object]:
    return lambda status: status.pop(field)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without("replacing"), "lacks status.replacing, so"),
        (
            lambda status: status["members"]["items"]["properties"].pop("turn"),
            "lacks status.members[].turn, so",
        ),
        (
            lambda status: status["phase"]["enum"].remove("Suspended"),
            "lacks status.phase 'Suspended', so",
        ),
        (lambda status: status.clear(), "and 11 more, so"),
    ],
    ids=["a field", "a field of an item", "a value", "everything"],
)
async def test_what_an_older_crd_lacks_is_named(
    api: Loopback, change: Callable[[Status], object], named: str
) -> None:
    api.answer("GET", PATH, published(change))
    async with KubeClient() as kube:
        installed = InstalledSchema(kube)
        assert installed.schema_problem() is None, "nothing is known yet"
        assert not await installed.compare_schema()
        wrong = installed.schema_problem()
        assert wrong is not None
        assert named in wrong
        assert "apply the CRD of this release" in wrong
        api.answer("GET", PATH, published(len))
        assert await installed.compare_schema()
        assert installed.schema_problem() is None, "as soon as it is applied"


async def test_fields_that_a_newer_crd_has_are_no_fault(api: Loopback) -> None:
    api.answer("GET", PATH, published(lambda status: status.update(future={"type": "string"})))
    async with KubeClient() as kube:
        assert await InstalledSchema(kube).compare_schema()


async def test_a_schema_that_can_not_be_read_keeps_nobody_from_ready(api: Loopback) -> None:
    api.answer("GET", PATH, {"reason": "Forbidden", "message": "no"}, 403)
    async with KubeClient() as kube:
        installed = InstalledSchema(kube)
        assert not await installed.compare_schema()
        assert installed.schema_problem() is None
