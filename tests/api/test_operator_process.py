"""Whole operator processes against a real API server: who leads, what a death or an outage does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from localkube import Cluster
from localkube.processes import recorded
from rollout_operator.kube.settings import (
    LEASE_DURATION_SECONDS,
    RENEW_DEADLINE_SECONDS,
    STANDBY_POLL_SECONDS,
)
from tests.support.api.apiclient import POOLS, ApiError, api_of
from tests.support.clusters import await_crd
from tests.support.manifests import pool, text
from tests.support.waiting import until_sync

NAMESPACE = "process"
PROGRAM = Path(__file__).parents[1] / "support" / "api" / "tiny_operator.py"


@pytest.fixture(scope="module")
def cluster(crd: Cluster) -> Iterator[Cluster]:
    crd.kubectl("create", "namespace", NAMESPACE)
    crd.kubectl("-n", NAMESPACE, "create", "-f", "-", input=text(pool("math")))
    yield crd
    crd.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


class Process:
    """One operator process with the tiny pass."""

    def __init__(self, cluster: Cluster, folder: Path, name: str, lease: str, shards: int) -> None:
        self.name = name
        self.folder = folder
        self.log = folder / f"{name}.log"
        flags = {
            "--pod-name": name,
            "--lease-name": lease,
            "--lease-namespace": NAMESPACE,
            "--watch-namespaces": NAMESPACE,
            "--http-host": "127.0.0.1",
            "--http-port": "0",
            "--shards": str(shards),
        }
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [
                    sys.executable,
                    str(PROGRAM),
                    str(folder),
                    *(f"{k}={v}" for k, v in flags.items()),
                ],
                env={**os.environ, **cluster.environment()},
                stdout=log,
                stderr=log,
            )

    def await_port(self) -> None:
        """Wait until it listens."""
        until_sync(lambda: self.port_file.exists() and self.port_file.read_text(), 60, what="port")

    @property
    def port_file(self) -> Path:
        return self.folder / f"{self.name}.port"

    def get(self, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.port_file.read_text()}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def leads(self) -> bool:
        return "rollout_operator_leader 1.0" in self.get("/metrics")[1]

    def passes(self) -> list[str]:
        path = self.folder / f"{self.name}.passes"
        return path.read_text().splitlines() if path.exists() else []

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def time_of(self, sentence: str) -> float:
        stamp = next(line["time"] for line in self.lines() if line["message"] == sentence)
        return datetime.fromisoformat(stamp).timestamp()

    def end(self, signum: int, seconds: float = 25) -> int:
        self.popen.send_signal(signum)
        return self.popen.wait(seconds)


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    lease = request.node.name.replace("_", "-").removeprefix("test-")[:60].strip("-")
    made: list[Process] = []

    def starter(name: str, shards: int = 1) -> Process:
        made.append(Process(cluster, tmp_path, name, lease, shards))
        made[-1].await_port()  # one that does not come up is ended, too
        return made[-1]

    yield starter
    for process in made:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait(10)


POOL = f"{POOLS.format(NAMESPACE)}/math"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"


def holder(cluster: Cluster, lease: str) -> str:
    """Who holds a Lease; nobody holds one that is not there."""
    found = [each["spec"] for each in api_of(cluster).items(LEASES, fresh=True)
             if each["metadata"]["name"] == lease]  # fmt: skip
    return str(found[0].get("holderIdentity") or "") if found else ""


def label(cluster: Cluster, value: str) -> None:
    api_of(cluster).patch(POOL, {"metadata": {"labels": {"seen": value}}})


def message(cluster: Cluster) -> str:
    found: str = api_of(cluster).get(POOL).get("status", {}).get("message", "")
    return found


def test_one_process_serves_a_pool_and_stops_well(cluster: Cluster, start: Any) -> None:
    process = start("alone")
    until_sync(lambda: message(cluster) == "0 pods", 10, what="the first pass")
    assert process.get("/healthz") == (200, "ok\n")
    until_sync(lambda: process.get("/readyz") == (200, "ok\n"), 5, what="readiness")
    before = len(process.passes())
    label(cluster, "once")
    until_sync(lambda: len(process.passes()) > before, 2, what="an event to wake the pool")

    code = process.end(signal.SIGTERM)
    assert code == 0
    assert holder(cluster, "one-process-serves-a-pool-and-stops-well") == ""
    assert all({"time", "level", "logger", "message"} <= set(line) for line in process.lines())
    assert [line for line in process.lines() if line["level"] in ("warning", "error")] == []


def test_a_clean_stop_hands_over_within_two_seconds(cluster: Cluster, start: Any) -> None:
    first = start("first")
    until_sync(first.leads, 10, what="the first to lead")
    second = start("second")
    time.sleep(STANDBY_POLL_SECONDS * 2)
    assert not second.leads()
    assert second.get("/readyz") == (200, "ok\n"), "a standby is ready"
    assert second.passes() == [], "a standby does nothing"

    first.popen.send_signal(signal.SIGTERM)
    until_sync(second.leads, 10, what="the second to lead")
    assert first.popen.wait(25) == 0
    took = second.time_of("this operator leads") - first.time_of("stopping")
    assert took < 2
    until_sync(second.passes, 5, what="the second's first pass")


def test_a_running_pass_is_finished_before_the_lease_goes(cluster: Cluster, start: Any) -> None:
    first = start("first")
    until_sync(first.passes, 10, what="the first pass")
    second = start("second")
    count = len(first.passes())
    cluster.kubectl("-n", NAMESPACE, "annotate", "rr", "math", "test/slow=3", "--overwrite")
    try:
        until_sync(lambda: len(first.passes()) > count, 5, what="the slow pass")
        first.popen.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert not second.leads(), "the pass still runs"
        assert first.popen.wait(10) == 0
        until_sync(second.leads, 3, what="the second to lead")
    finally:
        cluster.kubectl("-n", NAMESPACE, "annotate", "rr", "math", "test/slow-")


def test_a_killed_leader_is_followed_within_the_leases_time(cluster: Cluster, start: Any) -> None:
    first = start("first")
    until_sync(first.leads, 10, what="the first to lead")
    second = start("second")
    time.sleep(2)
    began = time.monotonic()
    first.end(signal.SIGKILL)
    until_sync(
        second.leads,
        LEASE_DURATION_SECONDS + 3 * STANDBY_POLL_SECONDS + 2,
        what="the second to lead",
    )
    took = time.monotonic() - began
    assert took > LEASE_DURATION_SECONDS - 5, "nobody may take the Lease before it has run out"
    until_sync(second.passes, 5, what="the second's first pass")


def test_shards_divide_the_pools_and_a_standby_takes_any(cluster: Cluster, start: Any) -> None:
    """Also while an operator with another number of shards still leads."""
    others = [f"shard-{number}" for number in range(8)]
    for name in others:
        cluster.kubectl("-n", NAMESPACE, "create", "-f", "-", input=text(pool(name)))
    pools = {f"{NAMESPACE}/{name}" for name in ("math", *others)}

    def seen(process: Process) -> set[str]:
        return {line.split()[0] for line in process.passes()} & pools

    try:
        old = start("old")
        until_sync(lambda: seen(old) == pools, 20, what="all pools")
        first, second, third = (start(name, shards=2) for name in ("first", "second", "third"))
        time.sleep(STANDBY_POLL_SECONDS * 3)
        assert not any(process.leads() for process in (first, second, third))
        assert "is held by an operator with --shards=1" in first.log.read_text()
        assert old.end(signal.SIGTERM) == 0
        found = [first, second, third]
        until_sync(lambda: sum(each.leads() for each in found) == 2, 20, what="two leaders")
        leaders = [each for each in found if each.leads()]
        until_sync(lambda: set.union(*map(seen, leaders)) == pools, 20, what="all pools")
        assert not set.intersection(*map(seen, leaders))
        [standby] = [each for each in found if not each.leads()]
        assert seen(standby) == set()
        gone = seen(leaders[0])
        assert leaders[0].end(signal.SIGTERM) == 0
        until_sync(standby.leads, 10, what="the standby to lead")
        until_sync(lambda: seen(standby) == gone, 20, what="the pools of the shard")
    finally:
        cluster.kubectl("-n", NAMESPACE, "delete", "rr", *others, "--wait=false")


def test_a_leader_that_loses_the_lease_exits_at_once(cluster: Cluster, start: Any) -> None:
    process = start("deposed")
    until_sync(process.leads, 10, what="to lead")
    began = time.monotonic()
    thief = json.dumps({"spec": {"holderIdentity": "thief"}})
    lease = "a-leader-that-loses-the-lease-exits-at-once"
    cluster.kubectl("-n", NAMESPACE, "patch", "lease", lease, "--type=merge", "-p", thief)
    assert process.popen.wait(10) == 1
    assert time.monotonic() - began < 5
    assert "lost leadership: the Lease is held by 'thief'" in process.log.read_text()
    assert holder(cluster, lease) == "thief"


def test_a_deleted_lease_is_made_again(cluster: Cluster, start: Any) -> None:
    process = start("keeper")
    until_sync(process.leads, 10, what="to lead")
    lease = "a-deleted-lease-is-made-again"
    cluster.kubectl("-n", NAMESPACE, "delete", "lease", lease)
    until_sync(lambda: "keeper_" in holder_or_none(cluster, lease), 5, what="the Lease")
    assert process.popen.poll() is None


def holder_or_none(cluster: Cluster, lease: str) -> str:
    try:
        return holder(cluster, lease)
    except ApiError:
        return ""


def test_an_outage_of_the_api_server_fences_and_passes(cluster: Cluster, start: Any) -> None:
    process = start("patient")
    # A standby is ready, too. A pass tells that this one leads and has listed everything.
    until_sync(process.passes, 30, what="the first pass")
    assert process.leads()
    assert process.get("/readyz")[0] == 200
    server = recorded(cluster.state, "kube-apiserver")
    assert server is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        time.sleep(RENEW_DEADLINE_SECONDS - 4)
        assert process.get("/readyz")[0] == 200, "an outage of seconds is no reason"
        until_sync(lambda: process.get("/readyz")[0] == 503, 12, what="the fence")
        assert "fenced" in process.get("/readyz")[1]
        assert process.get("/healthz") == (200, "ok\n"), "a restart would help nobody"
    finally:
        os.kill(server.pid, signal.SIGCONT)
    until_sync(lambda: process.get("/readyz")[0] == 200, 20, what="recovery")
    before = len(process.passes())
    label(cluster, "afterwards")
    until_sync(lambda: len(process.passes()) > before, 30, what="events to flow again")
    assert process.popen.poll() is None


def test_a_crd_that_goes_and_comes_back_is_served_again(cluster: Cluster, start: Any) -> None:
    process = start("stubborn")
    until_sync(process.passes, 10, what="the first pass")
    crd = Path(__file__).parents[2] / "operator" / "crd.yaml"
    cluster.kubectl("delete", "crd", "rolloutreplicas.rollout.dev", timeout=60)
    until_sync(lambda: f"{NAMESPACE}/math 0 False" in process.passes(), 10, what="the pool's end")
    time.sleep(3)  # the streams notice and fail
    cluster.kubectl("apply", "--server-side", "-f", crd)
    await_crd(cluster)
    cluster.kubectl("-n", NAMESPACE, "create", "-f", "-", input=text(pool("math")))
    until_sync(lambda: message(cluster) == "0 pods", 60, what="the new pool's first pass")
    before = len(process.passes())
    label(cluster, "streams")
    until_sync(lambda: len(process.passes()) > before, 30, what="the streams to work again")
    assert process.popen.poll() is None


@pytest.mark.parametrize(
    "target",
    [["-m", "rollout_operator.handlers"], ["operator/handlers.py"]],
    ids=["module", "file"],
)
def test_kopf_run_works_as_well(cluster: Cluster, tmp_path: Path, target: list[str]) -> None:
    port = free_port()
    settings = {
        "LEASE_NAMESPACE": NAMESPACE,
        "LEASE_NAME": f"kopf-{len(target)}",
        "WATCH_NAMESPACES": NAMESPACE,
        "HTTP_HOST": "127.0.0.1",
        "HTTP_PORT": str(port),
    }
    environment = {f"ROLLOUT_OPERATOR_{name}": value for name, value in settings.items()}
    with (tmp_path / "log").open("w") as log:
        popen = subprocess.Popen(
            [sys.executable, "-m", "kopf", "run", *target, "-n", NAMESPACE],
            env={**os.environ, **cluster.environment(), **environment},
            cwd=Path(__file__).parents[2],
            stdout=log,
            stderr=log,
        )
    try:
        until_sync(lambda: answers(f"http://127.0.0.1:{port}/readyz"), 20, what="readiness")
        until_sync(
            lambda: "observedGeneration" in api_of(cluster).get(POOL).get("status", {}),
            10,
            what="the real pass's status",
        )
        lease = f"kopf-{len(target)}"
        until_sync(lambda: holder(cluster, lease), 10, what="the Lease to be held")
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(25) == 0
        assert holder(cluster, lease) == ""
    finally:
        popen.kill()
        popen.wait(10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--workers=0", "--workers: Input should be greater than or equal to 1 (given: '0')"),
        ("--config=/none.yaml", "--config: can't read /none.yaml: "),
    ],
    ids=["a value", "a file"],
)
def test_a_wrong_setting_ends_with_one_sentence(flag: str, sentence: str) -> None:
    command = [sys.executable, "-m", "rollout_operator", "run", flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"rollout-operator: {sentence}")
    assert done.stderr.count("\n") == 1
