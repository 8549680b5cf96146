"""Which devices a trainer's pod has, and what it is told when that is not known."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_client import ClusterError, TurnFailed
from rollout_client.turn import pod_devices
from rollout_client.turn.plan import given_devices
from tests.support.loopback import Loopback, kubeconfig, loopback
from tests.support.unit.turn_pool import CLAIMS, PODS, SLICES, claim, pod

NAMED = {"name": "gpus", "resourceClaimName": "gpus-of-0"}
MADE = {"name": "gpus", "resourceClaimTemplateName": "gpus"}


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loopback]:
    monkeypatch.setenv("POD_NAME", "trainer-0")
    async with loopback() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        yield server


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (pod(NAMED), "gpus-of-0"),
        (
            pod(MADE, resourceClaimStatuses=[{"name": "gpus", "resourceClaimName": "gpus-x7k"}]),
            "gpus-x7k",
        ),
        (pod(extendedResourceClaimStatus={"resourceClaimName": "trainer-0-ext"}), "trainer-0-ext"),
    ],
    ids=["by name", "from a template", "extended resource"],
)
async def test_devices_are_those_of_the_pods_claim(
    api: Loopback, found: dict[str, Any], name: str
) -> None:
    api.answer("GET", f"{PODS}/trainer-0", found)
    api.answer("GET", f"{CLAIMS}/{name}", claim("gpu-10", "gpu-9", "gpu-9"))
    assert await pod_devices() == ["gpu.example.com/node-1/gpu-9", "gpu.example.com/node-1/gpu-10"]


async def test_devices_of_all_claims_count(api: Loopback) -> None:
    skipped = [{"name": "maybe", "resourceClaimName": None}]
    entries = (NAMED, {"name": "nic", "resourceClaimName": "nic"}, {"name": "maybe"})
    api.answer("GET", f"{PODS}/trainer-0", pod(*entries, resourceClaimStatuses=skipped))
    api.answer("GET", f"{CLAIMS}/gpus-of-0", claim("gpu-1"))
    api.answer("GET", f"{CLAIMS}/nic", claim("nic-0"))
    assert [each.rpartition("/")[2] for each in await pod_devices()] == ["gpu-1", "nic-0"]


@pytest.mark.parametrize(
    ("found", "claimed", "why"),
    [
        (pod(), None, "the pod default/trainer-0 has no ResourceClaim, so .* spec.resourceClaims"),
        (pod(MADE), None, "no ResourceClaim yet for its entry 'gpus'"),
        (pod(NAMED), {"status": {}}, "default/gpus-of-0 of the pod .* is not allocated yet"),
        (pod(NAMED), claim(), "was allocated without a device"),
    ],
    ids=["none", "not made", "not allocated", "no device"],
)
async def test_what_is_missing_is_named(
    api: Loopback, found: dict[str, Any], claimed: dict[str, Any] | None, why: str
) -> None:
    api.answer("GET", f"{PODS}/trainer-0", found)
    if claimed is not None:
        api.answer("GET", f"{CLAIMS}/gpus-of-0", claimed)
    with pytest.raises(TurnFailed, match=why):
        await pod_devices()


@pytest.mark.parametrize(
    ("refused", "status", "why"),
    [
        (
            "pods",
            403,
            "bind this pod's service account to the role rollout-trainer, which may get pods",
        ),
        ("claims", 403, "bind .* rollout-trainer, which may get resourceclaims"),
        ("pods", 404, "set POD_NAME by the downward API"),
        ("claims", 404, "it was deleted"),
    ],
)
async def test_what_the_api_server_refuses_comes_with_the_fix(
    api: Loopback, refused: str, status: int, why: str
) -> None:
    body = {"message": "pods is forbidden", "reason": "Forbidden"}
    api.answer("GET", f"{PODS}/trainer-0", pod(NAMED))
    path = f"{PODS}/trainer-0" if refused == "pods" else f"{CLAIMS}/gpus-of-0"
    api.answer("GET", path, body, status)
    with pytest.raises(
        ClusterError, match=f"pods is forbidden.*; {why}.*, or name the devices"
    ) as error:
        await pod_devices()
    assert (error.value.status, error.value.reason) == (status, "Forbidden")


def slices(*uuids: str | None, generation: int = 1) -> dict[str, Any]:
    """The ResourceSlice of node-1: gpu-0, gpu-1, … with these uuids."""
    devices = [
        {"name": f"gpu-{i}", "attributes": {"uuid": {"string": uuid}} if uuid else {}}
        for i, uuid in enumerate(uuids)
    ]
    pool = {"name": "node-1", "generation": generation}
    return {"spec": {"driver": "gpu.example.com", "pool": pool, "devices": devices}}


async def test_a_rank_finds_its_device_by_uuid_whatever_order_cuda_has(api: Loopback) -> None:
    api.answer("GET", f"{PODS}/trainer-0", pod(NAMED))
    api.answer("GET", f"{CLAIMS}/gpus-of-0", claim("gpu-0", "gpu-1"))
    older = slices("GPU-OLD", "GPU-older", generation=1)
    api.answer("GET", SLICES, {"items": [slices("GPU-b7-a", "GPU-03-f", generation=2), older]})
    names = ["gpu.example.com/node-1/gpu-0", "gpu.example.com/node-1/gpu-1"]
    assert await pod_devices(uuids=["03-F"]) == [names[1]], "as PyTorch spells it"
    assert await pod_devices(uuids=["GPU-03-f", "GPU-b7-a"]) == names[::-1]
    with pytest.raises(
        TurnFailed, match=r"with the uuid GPU-old \(gpu.*gpu-0: GPU-b7-a.*name the dev"
    ):
        await pod_devices(uuids=["GPU-old"])
    api.answer("GET", SLICES, {"items": [slices(None, "MIG-x")]})
    with pytest.raises(TurnFailed, match="gpu-0: no uuid"):
        await pod_devices(uuids=["03-f"])
    api.answer("GET", SLICES, {"message": "no", "reason": "Forbidden"}, 403)
    with pytest.raises(
        ClusterError, match=r"colocation\.namespaces, which lets it list them, or name"
    ):
        await pod_devices(uuids=["03-f"])


async def test_what_fails_in_passing_is_tried_again(api: Loopback) -> None:
    answers = [web.json_response({}, status=503), web.json_response(pod(NAMED))]

    async def reply(request: web.Request) -> web.StreamResponse:
        return answers.pop(0)

    api.answers["GET", f"{PODS}/trainer-0"] = reply
    api.answer("GET", f"{CLAIMS}/gpus-of-0", claim("gpu-0"))
    assert await pod_devices() == ["gpu.example.com/node-1/gpu-0"]


async def test_without_an_api_server_the_other_ways_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(
        ClusterError, match=r"or name the devices: devices=\[…\], ROLLOUT_TURN_DEVICES"
    ):
        await pod_devices()


def test_devices_of_the_environment_are_separated_by_commas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLLOUT_TURN_DEVICES", "a, b,")
    assert given_devices(None) == ["a", "b"]
    assert given_devices(["c"]) == ["c"]
    with pytest.raises(
        ValueError, match="devices is empty: name at least one, or give locks=False"
    ):
        given_devices([])
    monkeypatch.setenv("ROLLOUT_TURN_DEVICES", "")
    assert given_devices(None) is None
