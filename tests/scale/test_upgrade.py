"""From the release before to this one and back, while pools serve: operator, CRD and rights change, no pod does.

The operators are those of both trees, the pods have no processes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.api.apiclient import Obj
from tests.support.cluster.scalelab import ACCOUNT, GANG, ROOT, Lab, processless_pool, scale_lab

POOLS: dict[str, Obj] = {
    "plain": {"replicas": 2},
    "rolling": {"replicas": 3, "weights": {"strategy": "Rolling"}},
    "gang": {"replicas": 2, **GANG},
    "asleep": {"replicas": 1, "state": "Asleep"},
}
SERVING = {"plain", "rolling", "gang"}


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the newest release."""
    tag = git("describe", "--tags", "--abbrev=0")
    if not tag:
        pytest.skip("this clone has no tag of a release")
    folder = tmp_path_factory.mktemp("release")
    archive = folder.with_suffix(".tar")
    assert not git("archive", "--output", str(archive), tag)
    subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
    return folder


def install(lab: Lab, tree: Path) -> None:
    """Upgrade chart and operator to those of a tree."""
    lab.install_chart("upgrade", tree)
    if lab.port:
        lab.stop_operator()
    lab.start_operator(source=tree / "src")


def ready_since(lab: Lab) -> dict[str, tuple[str, str, Any]]:
    """Each pod's uid, whether it is Ready, and since when."""
    found = {}
    for pod in lab.pods():
        (ready,) = (c for c in pod["status"]["conditions"] if c["type"] == "Ready")
        moment = (pod["metadata"]["uid"], ready["status"], ready["lastTransitionTime"])
        found[pod["metadata"]["name"]] = moment
    return found


def publish(lab: Lab, version: int) -> None:
    """Move the target of all pools that serve, and wait until they have it."""
    target = {"epoch": 1, "version": version, "source": {"path": f"/models/v{version}"}}
    for name in SERVING:
        lab.patch(name, weights={"target": target})
    lab.await_condition("WeightsSynced", SERVING, 60)
    for pool in lab.pools().values():
        if pool["metadata"]["name"] in SERVING:
            assert pool["status"]["weights"]["committed"]["version"] == version, pool["status"]


@pytest.mark.soak  # test_fleet.py restarts an operator with other defaults each day
def test_pools_serve_through_an_upgrade_and_the_way_back(release: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("pods without processes need root: their addresses are routed here")
    with scale_lab(f"test-upgrade-{os.getpid()}") as lab:
        install(lab, release)
        lab.create(*(processless_pool(name, **spec) for name, spec in POOLS.items()))
        lab.await_condition("Ready", SERVING, 120)
        publish(lab, 1)
        lab.await_silence(5, 60)
        pods = ready_since(lab)
        assert len(pods) == 2 + 3 + 2 * 2 + 1
        for version, tree in ((2, ROOT), (3, release)):
            install(lab, tree)
            lab.await_silence(5, 60)
            assert ready_since(lab) == pods, f"a pod changed with the operator of {tree}"
            publish(lab, version)
            lab.patch("rolling", replicas=4)
            lab.await_condition("Ready", SERVING, 60)
            lab.patch("rolling", replicas=3)
            lab.await_silence(5, 60)
            assert ready_since(lab) == pods, f"a pod changed in what followed, with {tree}"
        assert ACCOUNT in lab.cluster.helm("list", "--all-namespaces")
