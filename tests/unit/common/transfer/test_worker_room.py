"""Memory that is left, as cgroups of both versions and the machine tell it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rollout_common.transfer.memory.memory_limits import MARGIN_BYTES
from rollout_worker.engine import EngineError
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget, check_memory_left
from rollout_worker.threads import BackgroundFreeing

MIB = 1 << 20
LIMIT = r"left of the memory limit.* raise spec\.resources\.limits\.memory"
POD = "kubepods/pod1/worker"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 900 MiB to give away."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable:  {900 * 1024} kB\n")
    return tmp_path


def v2(root: Path, group: str, limit: int | None, used: int, cached: int = 0) -> None:
    """A group of cgroup v2, sizes in MiB; this process is in `POD`."""
    write(root / "proc/self/cgroup", f"0::/{POD}\n")
    folder = root / "sys/fs/cgroup" / group
    write(folder / "memory.max", "max\n" if limit is None else f"{limit * MIB}\n")
    write(folder / "memory.current", f"{used * MIB}\n")
    stat = f"anon 5\nfile 7\ninactive_file {cached * MIB}\nactive_file {cached * MIB}\n"
    write(folder / "memory.stat", stat)


def v1(root: Path, group: str, limit: int, used: int, cached: int = 0) -> None:
    """A group of cgroup v1, the way a container without a namespace of its own sees it."""
    write(root / "proc/self/cgroup", f"5:cpu,cpuacct:/{POD}\n4:memory:/{POD}\n0::/\n")
    folder = root / "sys/fs/cgroup/memory" / group
    write(folder / "memory.limit_in_bytes", f"{limit * MIB}\n")
    write(folder / "memory.usage_in_bytes", f"{used * MIB}\n")
    stat = f"cache 9\ntotal_inactive_file {cached * MIB}\ntotal_active_file {cached * MIB}\n"
    write(folder / "memory.stat", stat)


def holds(root: Path, left: int, message: str) -> None:
    """So many MiB and no byte more may be taken."""
    most = left * MIB - MARGIN_BYTES
    check_memory_left(most, root)
    with pytest.raises(EngineError, match=message) as caught:
        check_memory_left(most + 1, root)
    assert f"no room for {most + 1} bytes of weights in memory: {left * MIB} bytes" in str(
        caught.value
    )


def test_the_machine_bounds_what_no_group_does(root: Path) -> None:
    holds(root, 900, r"left of the machine's memory.* run less on it")
    v2(root, POD, None, 5)
    holds(root, 900, "the machine's memory")


def test_the_limit_of_a_container_counts_and_cached_files_do_not(root: Path) -> None:
    v2(root, POD, 500, 400, cached=50)
    holds(root, 200, LIMIT)


def test_the_nearest_bound_counts_wherever_it_is(root: Path) -> None:
    v2(root, POD, 500, 100)
    v2(root, "kubepods/pod1", 300, 150)
    v2(root, "kubepods", 2000, 1000)
    holds(root, 150, LIMIT)


@pytest.mark.parametrize("group", [POD, "", "kubepods"], ids=["own", "container", "parent"])
def test_groups_of_the_first_version(root: Path, group: str) -> None:
    v1(root, group, 500, 400, cached=20)
    holds(root, 140, LIMIT)


def test_a_group_beyond_its_limit_has_nothing_left(root: Path) -> None:
    v2(root, POD, 100, 120)
    with pytest.raises(EngineError, match="0 bytes are left"):
        check_memory_left(0, root)


def test_where_nothing_is_known_nothing_is_refused(tmp_path: Path) -> None:
    check_memory_left(1 << 60, tmp_path)


def test_this_machine_has_room_for_little_and_none_for_everything() -> None:
    check_memory_left(1)
    with pytest.raises(EngineError, match="no room"):
        check_memory_left(1 << 60)


def test_a_budget_holds_all_that_is_staged_at_once(root: Path) -> None:
    staging = StagingBudget(100, root)
    first = staging.claim_memory(60)
    with pytest.raises(EngineError) as refused:
        staging.claim_memory(41)
    assert "41 bytes of staged weights: 40 bytes are left of the 100" in str(refused.value)
    assert "spec.weights.stagingMemory" in str(refused.value)
    assert "raise it to 101 or more" in str(refused.value)
    rest = staging.claim_memory(40)
    first()
    first()
    staging.claim_memory(60)
    with pytest.raises(EngineError, match="0 bytes are left"):
        staging.claim_memory(1)
    rest()
    staging.claim_memory(40)


def test_a_budget_beyond_the_limit_gives_no_more_than_there_is(root: Path) -> None:
    v2(root, POD, 500, 400)
    for staging in (StagingBudget(root=root), StagingBudget(900 * MIB, root)):
        staging.claim_memory(100 * MIB - MARGIN_BYTES)
        with pytest.raises(EngineError, match=LIMIT + r".*spec\.weights\.stagingMemory"):
            staging.claim_memory(200 * MIB)


def test_what_is_being_freed_is_waited_for_before_more_is_taken(root: Path) -> None:
    staging, may_end = StagingBudget(root=root), threading.Event()
    staging.freeing.free_soon(lambda: may_end.wait(10))
    taker = threading.Thread(target=staging.claim_memory, args=(1,))
    taker.start()
    taker.join(0.2)
    assert taker.is_alive(), "it may lack what is not free yet"
    may_end.set()
    taker.join(10)
    assert not taker.is_alive()


def test_nothing_is_freed_while_an_engine_stands_still() -> None:
    freeing, freed = BackgroundFreeing(), list[str]()
    with freeing.postpone_freeing():
        freeing.free_soon(lambda: freed.append("former"))
        with freeing.postpone_freeing():
            freeing.free_soon(lambda: freed.append("kept"))
        freeing.wait_until_freed(0.2)
        assert not freed
    freeing.wait_until_freed(10)
    assert freed == ["former", "kept"]


def test_what_cannot_be_freed_keeps_nothing_else() -> None:
    freeing, freed = BackgroundFreeing(), list[str]()
    freeing.free_soon(lambda: 1 / 0)
    freeing.free_soon(lambda: freed.append("next"))
    freeing.wait_until_freed(10)
    assert freed == ["next"]
