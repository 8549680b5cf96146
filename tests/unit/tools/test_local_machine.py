"""What the local cluster finds on a machine: cgroup hierarchies for its nodes, and programs, or not."""

from __future__ import annotations

from pathlib import Path

import pytest

import images
from localkube import ClusterError, cgroups, network
from localkube.settings import Network

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
