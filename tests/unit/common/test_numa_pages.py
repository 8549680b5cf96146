"""Shared memory on several NUMA nodes: what the kernel says of its pages, and machines where nothing is to be done."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_common import numa_pages
from rollout_common.numa_pages import interleave_pages

SIZE = 1 << 20
NUMA_MAPS = Path("/proc/self/numa_maps")


@pytest.fixture
def mapped() -> Iterator[mmap.mmap]:
    handle = os.memfd_create("numa-test")
    os.ftruncate(handle, SIZE)
    with mmap.mmap(handle, SIZE) as made:
        yield made
    os.close(handle)


def nodes_at(root: Path, text: str) -> Path:
    folder = root / "sys/devices/system/node"
    folder.mkdir(parents=True)
    (folder / "has_memory").write_text(text)
    return root


def test_pages_lie_on_all_nodes_in_turn(mapped: mmap.mmap, tmp_path: Path) -> None:
    """The kernel leaves out the nodes that this machine does not have."""
    if not interleave_pages(mapped, nodes_at(tmp_path, "0-1,66\n")):
        pytest.skip("memory policies may not be set here")
    mapped[:] = b"x" * SIZE
    [found] = [each for each in NUMA_MAPS.read_text().splitlines() if "numa-test" in each]
    assert " interleave:0" in found


@pytest.mark.parametrize("text", ["0\n", "\n", "words\n"])
def test_one_node_is_left_alone(mapped: mmap.mmap, tmp_path: Path, text: str) -> None:
    assert not interleave_pages(mapped, nodes_at(tmp_path, text))


def test_where_nothing_is_known_nothing_is_done(mapped: mmap.mmap, tmp_path: Path) -> None:
    assert not interleave_pages(mapped, tmp_path)


def test_a_call_that_is_refused_changes_nothing(
    mapped: mmap.mmap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa_pages, "MBIND_NUMBERS", dict.fromkeys(("x86_64", "aarch64"), 1 << 20))
    assert not interleave_pages(mapped, nodes_at(tmp_path, "0-1\n"))
    mapped[:4] = b"fine"


@pytest.mark.parametrize(
    ("text", "nodes"), [("0-1,4\n", [0, 1, 4]), ("2\n", [2]), ("0-3\n", [0, 1, 2, 3])]
)
def test_nodes_are_read_as_linux_writes_them(tmp_path: Path, text: str, nodes: list[int]) -> None:
    assert numa_pages._read_nodes(nodes_at(tmp_path, text)) == nodes
