"""The local cluster itself: what every other cluster test stands on."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from localkube import Cluster, cgroups, fakedevices, network
from localkube.home import SOURCES, cache
from tests.support.clusters import nodes_cluster
from tests.support.waiting import eventually

logger = logging.getLogger(__name__)

CLI = SOURCES / "cluster.py"
# Readable by everybody, unlike a Python below somebody's home.
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="nodes and namespaces need root")


def run_cli(
    *arguments: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = (), user: int = 0
) -> tuple[int, str]:
    """Run the command line as a user would; returns exit status and everything it said."""
    done = subprocess.run(
        [*prefix, SYSTEM_PYTHON, str(CLI), *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        user=user if user else None,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def one_node() -> Iterator[Cluster]:
    began = time.monotonic()
    with nodes_cluster("local", nodes=1, gpus=4, devices=2) as cluster:
        logger.info("control plane and a node ready after %.1f s", time.monotonic() - began)
        yield cluster
    assert not any(traces(cluster).values()), traces(cluster)


def traces(cluster: Cluster) -> dict[str, list[str]]:
    """Everything of this cluster that the machine would keep if nobody removed it."""
    bridge = cluster.settings.network.bridge
    shown = subprocess.run(
        ["sh", "-c", f"ip -o link; ip route; cat /proc/mounts; ls -d {cluster.state}"],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    ).stdout.splitlines()
    found = Path("/sys/fs/cgroup").rglob(f"{bridge}-node-*")
    return {
        "links, routes, mounts": [line for line in shown if bridge in line or cluster.name in line],
        "cgroups": [str(path) for path in found],
        "bridges": [name for name in network.bridges() if name == bridge],
    }


def claiming(name: str, claim: str) -> dict[str, Any]:
    """Return a pod that uses a claim."""
    spec = {
        "terminationGracePeriodSeconds": 0,
        "resourceClaims": [{"name": "gpus", "resourceClaimName": claim}],
        "containers": [
            {
                "name": "c",
                "image": "localhost/pause:1",
                "resources": {"claims": [{"name": "gpus"}]},
            }
        ],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def claim_of_two(name: str) -> dict[str, Any]:
    exactly = {"deviceClassName": fakedevices.DRIVER, "count": 2}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    }


def apply_all(cluster: Cluster, *items: object) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": items}
    cluster.kubectl("apply", "-f", "-", input=json.dumps(listed))


def test_pods_that_share_a_claim_share_its_devices(one_node: Cluster) -> None:
    node = one_node.nodes[0]
    apply_all(
        one_node,
        claim_of_two("shared"),
        claiming("first", "shared"),
        claiming("second", "shared"),
    )
    ready = ("wait", "--for=condition=Ready", "--timeout=60s")
    one_node.kubectl(*ready, "pod/first", "pod/second")
    path = "jsonpath={range .status.allocation.devices.results[*]}{.driver}/{.pool}/{.device} {end}"
    devices = one_node.kubectl("get", "resourceclaim", "shared", "-o", path).split()
    assert devices == [f"{fakedevices.DRIVER}/{node.name}/gpu-{i}" for i in range(2)]
    for device in ("gpu-0", "gpu-1"):
        found = f"grep -l '/devices/{device} /dev/{device} ' /proc/[0-9]*/mountinfo"
        assert len(node.run("sh", "-c", found, capture=True).split()) == 2

    # Somebody else gets none of them, and the driver remembers nothing but what is on its disk.
    apply_all(one_node, claim_of_two("others"), claiming("other", "others"))
    reason = 'jsonpath={.status.conditions[?(@.type=="PodScheduled")].message}'
    refusal = "cannot allocate all claims"
    eventually(refusal, lambda: refusal in one_node.kubectl("get", "pod", "other", "-o", reason))
    node.run("pkill", "-KILL", "-x", "fakedevices")
    apply_all(one_node, claiming("third", "shared"))
    one_node.kubectl(*ready, "pod/third")
    one_node.kubectl("delete", "--now", "pod/first", "pod/second", "pod/third")
    one_node.kubectl(*ready, "pod/other")
    one_node.kubectl("delete", "--now", "pod/other")
    eventually("no claim is prepared", lambda: not list((node.folder / "run/cdi").iterdir()))
    one_node.kubectl("delete", "resourceclaim", "shared", "others")


def test_a_running_cluster_keeps_its_devices(one_node: Cluster) -> None:
    status, said = run_cli("up", "--name", one_node.name, "--devices", "3")
    assert status == 2
    assert "runs with 2 devices a node" in said


def test_a_second_cluster_is_removed_even_if_its_state_was_deleted(one_node: Cluster) -> None:
    with nodes_cluster("lost", nodes=1) as other:
        assert other.settings.network != one_node.settings.network
        other.kubectl("run", "pause", "--image=localhost/pause:1")
        other.kubectl("wait", "pod/pause", "--for=condition=Ready", "--timeout=60s")
        assert all(traces(other).values())
        shutil.rmtree(other.state)
        assert other.name in Cluster.names()
        assert Cluster.remove(other.name)
        assert other.name not in Cluster.names()
        assert not any(traces(other).values()), traces(other)
    assert "node-1" in one_node.kubectl("get", "nodes", "-o", "name")


# What a machine lacks, in mount and other namespaces of their own: the machine itself stays as it is.
UNMOUNTED = ("unshare", "--mount", "sh", "-c")
CAGED = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")


def changed(change: str) -> tuple[str, ...]:
    return (*UNMOUNTED, f'{change} && exec "$@"', "sh")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Words of the command line, what they are answered with, and the surroundings."""

    words: str
    sentence: str
    prefix: tuple[str, ...] = ()
    programs: tuple[tuple[str, str], ...] | None = None
    """All that is on PATH, with what each prints; None: all of the machine's."""
    user: int = 0

    @property
    def has_cache(self) -> bool:
        """Whether everything is built already."""
        return self.words.startswith(("up --", "env"))


REFUSALS = {
    "no Go": Refusal(
        "build kube", "Go is missing: install Go 1.26.x and put it on PATH", programs=()
    ),
    "another Go": Refusal(
        "build kube", "Go 1.26.x is needed, this is go1.27.1", programs=(("go", "go1.27.1"),)
    ),
    "no openssl": Refusal(
        "up --nodes 0 --name bare", "openssl is missing: apt-get install openssl", programs=()
    ),
    **{
        f"the name {name}": Refusal(
            f"up --nodes 0 --name={name}",
            "use at most 40 small letters, digits and inner dashes",
        )
        for name in ("Upper", "a/b", "..", "-a", "x" * 41)
    },
    "not there": Refusal("env --name nowhere", "start it with `cluster.py up --name nowhere`"),
    "nodes without root": Refusal(
        "up --nodes 1 --name rootless",
        "a cluster with nodes needs root: run it with sudo, or use `--nodes 0`",
        user=NOBODY,
    ),
    "no memory controller": Refusal(
        "up", "lacks the controllers", changed("umount --lazy /sys/fs/cgroup/memory")
    ),
    "no disk": Refusal(
        "up",
        "free some, or set ROLLOUT_CACHE",
        changed("mount -t tmpfs -o size=64m tmpfs $ROLLOUT_CACHE"),
    ),
    "read-only": Refusal(
        "up",
        "not writable: set ROLLOUT_CACHE",
        changed("mount -t tmpfs -o ro tmpfs $ROLLOUT_CACHE"),
    ),
    "a sandbox": Refusal(
        "up --name caged", "lacks namespaces (CAP_SYS_ADMIN), which nodes need", CAGED
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_bad_surroundings_are_said_in_one_sentence(tmp_path: Path, refusal: Refusal) -> None:
    environment = {} if refusal.has_cache else {"ROLLOUT_CACHE": str(tmp_path)}
    if refusal.programs is not None:
        environment["PATH"] = str(tmp_path)
        for name, said in refusal.programs:
            (tmp_path / name).write_text(f"#!/bin/sh\necho {said}\n")
            (tmp_path / name).chmod(0o755)
    words = refusal.words.split()
    status, told = run_cli(*words, env=environment, prefix=refusal.prefix, user=refusal.user)
    assert status == 2, told
    assert told.startswith("error: ")
    assert refusal.sentence in told


def test_a_control_plane_without_root() -> None:
    home = Path("/tmp", f"rollout-test-{os.getpid()}")
    home.mkdir()
    try:
        for name in ("bin", "images", "prometheus"):
            (home / name).symlink_to(cache() / name)
        os.chown(home, NOBODY, NOBODY)
        environment = {"ROLLOUT_CACHE": str(home), "HOME": str(home)}
        status, said = run_cli("up", "--nodes", "0", env=environment, user=NOBODY)
        assert status == 0, said
        status, said = run_cli("env", env=environment, user=NOBODY)
        assert f"export KUBECONFIG={home}/clusters/rollout/" in said
        status, said = run_cli("down", env=environment, user=NOBODY)
        assert "rollout: removed" in said
    finally:
        shutil.rmtree(home)


def test_a_group_of_cgroup_v2_is_removed_with_the_processes_left_in_it() -> None:
    points = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    tops = [Path(point) for _, point, kind, *_ in points if kind == "cgroup2"]
    if not tops:
        pytest.skip("cgroup v2 is not mounted")
    group = tops[0] / f"rollout-test-{os.getpid()}"
    (group / "init").mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as left:
        (group / "init/cgroup.procs").write_text(str(left.pid))
        cgroups.remove([str(group)])
        assert left.wait(5) == -signal.SIGKILL
    assert not group.exists()
