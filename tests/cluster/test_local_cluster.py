"""The local cluster itself: what every other cluster test stands on."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localkube import Cluster, ClusterError, cgroups, fakedevices, network
from localkube.home import SOURCES, cache
from localkube.settings import DNS_ADDRESS
from tests.support.clusters import control_plane, nodes_cluster
from tests.support.waiting import eventually

logger = logging.getLogger(__name__)

CLI = SOURCES / "cluster.py"
# Readable by everybody, unlike a Python below somebody's home.
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def until(true: Callable[[], bool], what: str, seconds: float = 30) -> float:
    """Wait; returns how long it took."""
    began = time.monotonic()
    eventually(what, true, seconds)
    return time.monotonic() - began


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
def fake_nodes() -> Iterator[Cluster]:
    with control_plane("fake") as cluster:
        cluster.start_kwok(nodes=2, gpus=8)
        yield cluster


@pytest.fixture(scope="module")
def one_node() -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("real nodes need root")
    began = time.monotonic()
    with nodes_cluster("local", nodes=1, gpus=4, devices=2) as cluster:
        logger.info("control plane and a node ready after %.1f s", time.monotonic() - began)
        yield cluster
    assert not any(traces(cluster).values()), traces(cluster)


# ---------------------------------------------------------------- control planes


def test_two_control_planes_run_side_by_side_and_leave_no_trace(fake_nodes: Cluster) -> None:
    began = time.monotonic()
    with control_plane("second") as second:
        logger.info("a second control plane is ready after %.1f s", time.monotonic() - began)
        assert fake_nodes.settings.api_port != second.settings.api_port
        second.kubectl("create", "namespace", "only-here")
        assert "only-here" in second.kubectl("get", "namespaces", "-o", "name")
        assert "only-here" not in fake_nodes.kubectl("get", "namespaces", "-o", "name")
    assert not second.state.exists()
    assert second.name not in Cluster.names()


def test_audit_log_tells_what_a_service_account_asked_for(fake_nodes: Cluster) -> None:
    fake_nodes.kubectl("create", "serviceaccount", "asker")
    config = fake_nodes.service_account_kubeconfig("default", "asker")
    answer = fake_nodes.kubectl("--kubeconfig", config, "get", "pods", "-n", "default", check=False)
    assert "Forbidden" in answer
    events = [json.loads(line) for line in fake_nodes.audit_log.read_text().splitlines()]
    user = "system:serviceaccount:default:asker"
    asked = [e["objectRef"] for e in events if e["user"]["username"] == user and "objectRef" in e]
    assert {"resource": "pods", "namespace": "default", "apiVersion": "v1"} in asked
    assert all("requestObject" not in event for event in events)


def test_tokens_of_any_audience_are_reviewed(fake_nodes: Cluster) -> None:
    audience = "rollout.dev/default/pool"
    token = fake_nodes.kubectl("create", "token", "default", f"--audience={audience}").strip()

    def authenticated(wanted: str) -> bool:
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [wanted]},
        }
        text = fake_nodes.kubectl("create", "-f", "-", "-o", "json", input=json.dumps(review))
        return bool(json.loads(text)["status"].get("authenticated", False))

    assert authenticated(audience)
    assert not authenticated("rollout.dev/default/other")


def test_fake_pods_are_ready_as_their_gates_say(fake_nodes: Cluster) -> None:
    gate = "rollout.dev/serving"
    limits = {"limits": {"nvidia.com/gpu": 8}}
    spec = {
        "readinessGates": [{"conditionType": gate}],
        "containers": [{"name": "c", "image": "none", "resources": limits}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "gated"}, "spec": spec}
    fake_nodes.kubectl("apply", "-f", "-", input=json.dumps(pod))

    def status(condition: str) -> str:
        path = f'{{.status.conditions[?(@.type=="{condition}")].status}}'
        return fake_nodes.kubectl("get", "pod", "gated", "-o", f"jsonpath={path}")

    def open_gate(value: str) -> None:
        patch = {"status": {"conditions": [{"type": gate, "status": value}]}}
        fake_nodes.kubectl("patch", "pod", "gated", "--subresource=status", "-p", json.dumps(patch))

    until(lambda: status("ContainersReady") == "True", "containers ready")
    assert status("Ready") == "False"
    open_gate("True")
    until(lambda: status("Ready") == "True", "ready with its gate open")
    open_gate("False")
    until(lambda: status("Ready") == "False", "not ready with its gate closed")
    fake_nodes.kubectl("delete", "pod", "gated", "--wait=true", timeout=30)


# ---------------------------------------------------------------- real nodes


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


# Asks the DNS server (1) for the address of a name (2), as a resolver would.
RESOLVE = """
import socket, sys
labels = sys.argv[2].encode().split(b".")
name = b"".join(bytes([len(label)]) + label for label in labels)
query = bytes.fromhex("000101000001000000000000") + name + bytes.fromhex("0000010001")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
    asker.settimeout(2)
    asker.sendto(query, (sys.argv[1], 53))
    answer = asker.recv(512)
    print(".".join(map(str, answer[-4:])))
"""


@pytest.mark.parametrize("network_of", ["node", "pod"])
def test_services_are_found_by_name(one_node: Cluster, network_of: str) -> None:
    service = f"target-{network_of}"
    one_node.kubectl("create", "service", "clusterip", service, "--tcp=80")
    one_node.kubectl("run", service, "--image=localhost/pause:1")
    one_node.kubectl("wait", f"pod/{service}", "--for=condition=Ready", "--timeout=60s")
    address = one_node.kubectl("get", "service", service, "-o", "jsonpath={.spec.clusterIP}")
    (node,) = one_node.nodes
    ask: tuple[str, ...] = (
        SYSTEM_PYTHON,
        "-c",
        RESOLVE,
        DNS_ADDRESS,
        f"{service}.default.svc.cluster.local",
    )
    if network_of == "pod":
        (namespace, *_) = node.run("ls", "/run/netns", capture=True).split()
        ask = ("nsenter", f"--net=/run/netns/{namespace}", *ask)

    def resolves() -> bool:
        try:
            return node.run(*ask, capture=True).strip() == address
        except ClusterError:
            return False

    took = until(resolves, "the service's name resolves")
    logger.info("a new service's name resolves after %.1f s", took)


def test_a_node_claims_its_gpus_and_the_scheduler_counts_them(one_node: Cluster) -> None:
    spec = {
        "containers": [
            {
                "name": "c",
                "image": "localhost/pause:1",
                "resources": {"limits": {"nvidia.com/gpu": 5}},
            }
        ]
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "greedy"}, "spec": spec}
    one_node.kubectl("apply", "-f", "-", input=json.dumps(pod))
    path = 'jsonpath={.status.conditions[?(@.type=="PodScheduled")].message}'

    def refused() -> bool:
        message = one_node.kubectl("get", "pod", "greedy", "-o", path)
        return "Insufficient nvidia.com/gpu" in message

    until(refused, "5 GPUs of a node with 4 are refused")
    one_node.kubectl("delete", "pod", "greedy", "--wait=false")


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
    until(lambda: refusal in one_node.kubectl("get", "pod", "other", "-o", reason), refusal)
    node.run("pkill", "-KILL", "-x", "fakedevices")
    apply_all(one_node, claiming("third", "shared"))
    one_node.kubectl(*ready, "pod/third")
    one_node.kubectl("delete", "--now", "pod/first", "pod/second", "pod/third")
    one_node.kubectl(*ready, "pod/other")
    one_node.kubectl("delete", "--now", "pod/other")
    until(lambda: not list((node.folder / "run/cdi").iterdir()), "no claim is prepared")
    one_node.kubectl("delete", "resourceclaim", "shared", "others")


def test_a_running_cluster_keeps_its_devices(one_node: Cluster) -> None:
    status, said = run_cli("up", "--name", one_node.name, "--devices", "3")
    assert status == 2
    assert "runs with 2 devices a node" in said


@pytest.mark.soak
def test_a_crashed_node_is_noticed_and_comes_back(one_node: Cluster) -> None:
    """As often as tests need it: only `make soak` lets a node of theirs crash."""
    node = one_node.node_add(2)
    path = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'

    def ready() -> str:
        return one_node.kubectl("get", "node", node.name, "-o", path)

    assert ready() == "True"
    one_node.node_crash(2)
    took = until(lambda: ready() == "Unknown", "the dead node is Unknown", 40)
    logger.info("a dead node is Unknown after %.1f s", took)
    began = time.monotonic()
    one_node.node_add(2)
    logger.info("it is ready again after %.1f s", time.monotonic() - began)
    assert ready() == "True"
    one_node.node_remove(2)
    assert node.name not in one_node.kubectl("get", "nodes", "-o", "name")


@needs_root
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


# ---------------------------------------------------------------- bad surroundings


def no_path(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "bin").mkdir(exist_ok=True)
    return {"PATH": str(tmp_path / "bin")}


def test_no_go_is_said_in_one_sentence(tmp_path: Path) -> None:
    environment = {"ROLLOUT_CACHE": str(tmp_path), **no_path(tmp_path)}
    status, said = run_cli("build", "kube", env=environment)
    assert status == 2
    assert said == "error: Go is missing: install Go 1.26.x and put it on PATH\n"


def test_another_go_is_said_in_one_sentence(tmp_path: Path) -> None:
    environment = {"ROLLOUT_CACHE": str(tmp_path), **no_path(tmp_path)}
    go = tmp_path / "bin/go"
    go.write_text("#!/bin/sh\necho go1.27.1\n")
    go.chmod(0o755)
    status, said = run_cli("build", "kube", env=environment)
    assert status == 2
    assert "Go 1.26.x is needed, this is go1.27.1" in said


def test_openssl_missing_is_said_in_one_sentence(tmp_path: Path) -> None:
    status, said = run_cli("up", "--nodes", "0", "--name", "bare", env=no_path(tmp_path))
    assert status == 2
    assert "error: openssl is missing: apt-get install openssl\n" in said


@pytest.mark.parametrize("name", ["Upper", "a/b", "..", "-a", "x" * 41])
def test_a_bad_name_is_said_in_one_sentence(name: str) -> None:
    status, said = run_cli("up", "--nodes", "0", f"--name={name}")
    assert status == 2
    assert "use at most 40 small letters, digits and inner dashes" in said


def test_a_cluster_that_is_not_there() -> None:
    status, said = run_cli("node-add", "1", "--name", "nowhere")
    assert status == 2
    assert "start it with `cluster.py up --name nowhere`" in said


def test_a_cluster_without_nodes_gets_none(fake_nodes: Cluster) -> None:
    status, said = run_cli("up", "--nodes", "1", "--name", fake_nodes.name)
    assert status == 2
    assert "control plane only" in said or "needs root" in said


@needs_root
def test_nodes_without_root(tmp_path: Path) -> None:
    status, said = run_cli("up", "--nodes", "1", "--name", "rootless", user=NOBODY)
    assert status == 2
    assert "error: a cluster with nodes needs root: run it with sudo, or use `--nodes 0`" in said


@needs_root
def test_a_control_plane_without_root(tmp_path: Path) -> None:
    home = Path("/tmp", f"rollout-test-{os.getpid()}")
    home.mkdir()
    try:
        for name in ("bin", "images", "prometheus"):
            (home / name).symlink_to(cache() / name)
        os.chown(home, NOBODY, NOBODY)
        environment = {"ROLLOUT_CACHE": str(home), "HOME": str(home)}
        status, said = run_cli("up", "--nodes", "0", env=environment, user=NOBODY)
        assert status == 0, said
        status, said = run_cli("status", env=environment, user=NOBODY)
        assert "rollout: https://127.0.0.1:" in said
        status, said = run_cli("down", "--all", env=environment, user=NOBODY)
        assert "rollout: removed" in said
    finally:
        shutil.rmtree(home)


@needs_root
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("umount --lazy /sys/fs/cgroup/memory", "lacks the controllers"),
        ("mount -t tmpfs -o size=64m tmpfs $ROLLOUT_CACHE", "free some, or set ROLLOUT_CACHE"),
        ("mount -t tmpfs -o ro tmpfs $ROLLOUT_CACHE", "not writable: set ROLLOUT_CACHE"),
    ],
    ids=["no memory controller", "no disk", "read-only"],
)
def test_a_machine_that_lacks_something(tmp_path: Path, change: str, sentence: str) -> None:
    # In a mount namespace of its own: the machine itself stays as it is.
    prefix = ("unshare", "--mount", "sh", "-c", f'{change} && exec "$@"', "sh")
    status, said = run_cli("up", env={"ROLLOUT_CACHE": str(tmp_path)}, prefix=prefix)
    assert status == 2, said
    assert sentence in said


@needs_root
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


@needs_root
def test_a_sandbox_without_its_capabilities() -> None:
    prefix = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    status, said = run_cli("up", "--name", "caged", prefix=prefix)
    assert status == 2
    assert "lacks namespaces (CAP_SYS_ADMIN), which nodes need" in said


def test_help_names_every_command() -> None:
    status, said = run_cli("--help")
    assert status == 0
    for command in ("build", "up", "down", "status", "node-crash", "env"):
        assert command in said
    assert sys.version_info >= (3, 11)
