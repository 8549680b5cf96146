"""What the local cluster, demos and benchmarks find on a machine, or not: cgroups, programs, proxies, root, numbers of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

import images
from bench import __main__ as bench
from demo.scene import wanted_steps
from demo.stage import DemoError
from localkube import Cluster, ClusterError, cgroups, network
from localkube.settings import Network, Settings

_LINE = "30 24 0:26 / {point} rw,nosuid,nodev,noexec,relatime shared:4 - {kind} {kind} {options}\n"
_ROOT = "24 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"


def mounted(kind: str, point: str, options: str = "rw") -> str:
    return _LINE.format(kind=kind, point=f"/sys/fs/cgroup{point}", options=options)


FIRST = (
    mounted("cgroup", "/memory", "rw,memory")
    + mounted("cgroup", "/cpu,cpuacct", "rw,cpu,cpuacct")
    + mounted("cgroup", "/systemd", "rw,xattr,name=systemd")
)


@pytest.mark.parametrize("beside", ["", mounted("cgroup2", "/unified")], ids=["alone", "hybrid"])
def test_a_machine_with_hierarchies_of_v1_uses_them(beside: str) -> None:
    found = cgroups.hierarchies(_ROOT + FIRST + beside)
    assert [each.mount_options for each in found] == ["memory", "cpu,cpuacct", "none,name=systemd"]
    assert not any(each.unified for each in found)


@pytest.mark.parametrize(
    "beside", ["", mounted("cgroup", "/net_cls", "rw,net_cls")], ids=["alone", "net_cls of v1"]
)
def test_memory_in_the_unified_hierarchy_makes_it_v2(beside: str) -> None:
    (found,) = cgroups.hierarchies(_ROOT + beside + mounted("cgroup2", "", "rw,nsdelegate"))
    assert found.unified
    assert str(found.mount_point) == "/sys/fs/cgroup"


def test_a_machine_without_cgroups_has_no_hierarchy() -> None:
    assert cgroups.hierarchies(_ROOT) == []


def test_a_machine_without_iproute2_has_no_networks_and_is_told_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert network.owned_bridges(Path("/")) == {}
    network.tidy()
    with pytest.raises(ClusterError, match="ip is missing: apt-get install iproute2"):
        network.connect(Network(0), 1, 2)


def test_a_python_whose_packages_no_worker_can_import_is_told_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.version_info", (3, 13, 1))
    with pytest.raises(ClusterError, match=r"Python 3\.11 is needed, this is 3\.13: .*PYTHON3"):
        images.build()


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_servers_that_need_no_proxy_are_kept_in_either_case(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv(name, "corp.example")
    found = Cluster(Settings("proxies", None, 0, 0, 5, *range(5))).environment()
    assert found["NO_PROXY"] == found["no_proxy"]
    assert found["no_proxy"].startswith("corp.example,localhost,")


@pytest.mark.parametrize("said", ["abc", "0", "-3", "1.5"])
def test_a_number_of_steps_that_is_none_is_told(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", said)
    with pytest.raises(DemoError, match=f"STEPS='{said}': give a whole number of at least 1"):
        wanted_steps(8)
    monkeypatch.setenv("STEPS", "")
    assert wanted_steps(8) == 8


def test_a_benchmark_that_needs_root_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert bench.main(["reconcile", "--quick"]) == 2
    assert "python -m bench: pods without processes need root" in capsys.readouterr().err
