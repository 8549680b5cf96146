"""The HorizontalPodAutoscaler of docs/autoscaling.md, with Kubernetes' own controller, over the real passes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from localkube import Cluster
from tests.support.api.apiclient import Obj
from tests.support.api.poollab import PoolLab, pool_lab
from tests.support.doc_manifests import manifests_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(crd: Cluster) -> AsyncIterator[PoolLab]:
    async with pool_lab(crd, "autoscaling") as made:
        yield made


async def test_an_autoscaler_reads_and_sets_the_scale(lab: PoolLab) -> None:
    """Below the least number it needs no metric; there is no API of metrics here, which its status says."""
    lab.create("math", replicas=1)
    await lab.reaches("math")
    _, _, scaler = manifests_of("autoscaling.md")
    assert scaler["kind"] == "HorizontalPodAutoscaler"
    scaler["metadata"]["namespace"] = lab.namespace
    scaler["spec"]["minReplicas"] = 2
    path = f"/apis/autoscaling/v2/namespaces/{lab.namespace}/horizontalpodautoscalers"
    lab.api.create(path, scaler)

    def told() -> dict[str, Obj]:
        status = lab.api.get(f"{path}/math").get("status") or {}
        return {each["type"]: each for each in status.get("conditions") or ()}

    await lab.until("it has set the scale", lambda: lab.get("math")["spec"]["replicas"] == 2, 120)
    await lab.until(
        "both replicas serve", lambda: lab.get("math")["status"]["readyReplicas"] == 2, 60
    )
    await lab.until("it reads metrics", lambda: "ScalingActive" in told(), 120)
    assert told()["AbleToScale"]["status"] == "True"
    assert "external.metrics.k8s.io" in told()["ScalingActive"]["message"]
    assert lab.api.get(f"{path}/math")["status"]["currentReplicas"] == 2
