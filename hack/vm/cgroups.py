#!/usr/bin/env python3
"""See whether local nodes work on a machine that has only cgroup v2; hack/vm/machine.py runs this inside.

A cluster with one node, a pod with limits, a pod that takes too much memory, a node that crashes and comes back,
and no trace at the end. Then the same start from a group with processes, as in a container. Each step with its time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from localkube import Cluster, network, processes
from localkube.home import cache, clusters, step

TOP = Path("/sys/fs/cgroup")
MIB = 1 << 20
LIMIT_MIB = 32
POD_SECONDS = 300
IMAGE = "localhost/python:3.11"
SCOPE = ("systemd-run", "--quiet", "--scope")


def main() -> int:
    check_machine()
    began = time.monotonic()
    if sys.argv[1:] == ["--again"]:
        with step("a cluster from a group with processes"):
            Cluster.start("contained", nodes=1)
        end_cluster("contained")
        return 0
    with step("a cluster with a node"):
        cluster = Cluster.start("vm", nodes=1)
    with step("an image of 123 MiB onto the node"):
        cluster.load_image(cache() / "images-base/python.tar")
    with step("a pod's limits are those of its cgroup"):
        check_limits(cluster)
    with step("the kernel kills a pod that takes more"):
        check_kill(cluster)
    with step("a node that crashed comes back"):
        cluster.node_crash(1)
        cluster.node_add(1)
        await_true("the pod runs again", lambda: phase(cluster, "limited") == "Running")
    end_cluster("vm")
    contain()
    print(f"cgroup v2: all is well after {time.monotonic() - began:.0f} s", flush=True)
    return 0


def check_machine() -> None:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    kinds = {line.partition(" - ")[2].split()[0] for line in lines}
    expect("cgroup2" in kinds and "cgroup" not in kinds, f"a machine with cgroup v2 only: {kinds}")


def check_limits(cluster: Cluster) -> None:
    # Systemd decides again what the top passes on; the node must keep all it has.
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    subprocess.run([*SCOPE, "--property=MemoryMax=64M", "true"], check=True)
    run_pod(cluster, "limited", ["sleep", "infinity"])
    await_true("the pod runs", lambda: phase(cluster, "limited") == "Running")
    group = group_of(cluster, "limited", "sleep")
    found = {name: (group / name).read_text().strip() for name in ("memory.max", "cpu.max")}
    print(f"  {group}: {found}", flush=True)
    expect(found["memory.max"] == str(LIMIT_MIB * MIB), f"memory.max of the limit, not {found}")
    expect(found["cpu.max"] == "50000 100000", f"cpu.max of half a processor, not {found}")
    seen = cluster.kubectl("exec", "limited", "--", "cat", "/sys/fs/cgroup/memory.max").strip()
    expect(seen == found["memory.max"], f"the pod sees its own limit, not {seen}")


def check_kill(cluster: Cluster) -> None:
    # It starts to take memory once it is told, so that its group is known.
    run_pod(cluster, "greedy", ["sh", "-c", "sleep infinity & wait; exec tail /dev/zero"])
    await_true("the pod runs", lambda: phase(cluster, "greedy") == "Running")
    pod = group_of(cluster, "greedy", "sleep").parent
    print(f"  before: {events(pod)}", flush=True)
    cluster.kubectl("exec", "greedy", "--", "sh", "-c", "kill $(pidof sleep)")
    await_true("the pod was killed", lambda: reason(cluster, "greedy") == "OOMKilled")
    counts = events(pod)
    print(f"  OOMKilled; {pod}/memory.events: {counts}", flush=True)
    expect(counts["oom_kill"] >= 1, "a kill that is counted")


def end_cluster(name: str) -> None:
    with step("no trace is left"):
        Cluster.remove(name)
        found = [str(path) for path in TOP.rglob("rollout*")] + sorted(network.bridges())
        state = str(clusters() / name)
        found += [line for line in Path("/proc/mounts").read_text().splitlines() if state in line]
        found += [str(process) for process, _ in processes.marked(clusters())]
        expect(not found, f"nothing of the cluster: {found}")


def contain() -> None:
    """Start this check again in a group that systemd gave away, which is the root of what it sees."""
    mount = f"umount --lazy {TOP} && mount -t cgroup2 cgroup2 {TOP}"
    inside = ["unshare", "--cgroup", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    command = [*SCOPE, "--property=Delegate=yes", *inside, sys.executable, __file__, "--again"]
    subprocess.run(command, check=True)


def run_pod(cluster: Cluster, name: str, command: list[str]) -> None:
    limits = {"limits": {"memory": f"{LIMIT_MIB}Mi", "cpu": "500m"}}
    container = {"name": "c", "image": IMAGE, "command": command, "resources": limits}
    spec = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    cluster.kubectl("apply", "-f", "-", input=json.dumps(pod))


def group_of(cluster: Cluster, pod: str, program: str) -> Path:
    uid = cluster.kubectl("get", "pod", pod, "-o", "jsonpath={.metadata.uid}")
    pid = processes.process_in(uid, program)
    return TOP / Path(f"/proc/{pid}/cgroup").read_text().strip().removeprefix("0::/")


def events(group: Path) -> dict[str, int]:
    lines = (line.split() for line in (group / "memory.events").read_text().splitlines())
    return {name: int(count) for name, count in lines}


def phase(cluster: Cluster, pod: str) -> str:
    return cluster.kubectl("get", "pod", pod, "-o", "jsonpath={.status.phase}")


def reason(cluster: Cluster, pod: str) -> str:
    path = "jsonpath={.status.containerStatuses[0].state.terminated.reason}"
    return cluster.kubectl("get", "pod", pod, "-o", path)


def await_true(what: str, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + POD_SECONDS
    while not true():
        expect(time.monotonic() < deadline, f"{what} within {POD_SECONDS} s")
        time.sleep(0.5)


def expect(true: bool, what: str) -> None:
    if not true:
        sys.exit(f"expected: {what}")


if __name__ == "__main__":
    sys.exit(main())
