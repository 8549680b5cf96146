"""Memory that other processes map by a descriptor: a CPU's, and a GPU's through a driver that is played."""

from __future__ import annotations

import ctypes
import os
import socket
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch

from rollout_common.transfer.memory import cuda_mapping
from rollout_common.transfer.memory.exported_memory import (
    CudaArray,
    ExportedMemory,
    ExportError,
    device_identity,
)
from tests.support.unit.mapping_driver import UNIT, MappingDriver

NBYTES = UNIT + 3
MAKE = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"]
MAP = ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuCtxPopCurrent_v2"]
UNDO = [
    *("cuCtxPushCurrent_v2", "cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease"),
    *("cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"),
]
ALLOCATE = ["cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle"]
OPEN = ["cuMemGetAllocationGranularity", "cuMemImportFromShareableHandle"]


def open_descriptors() -> set[str]:
    """Descriptors of memory that this process has, and its mappings of memory."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if "memfd:" in target:
            found.add(f"{name} {target}")
    with open("/proc/self/maps") as maps:
        return found | {line.split()[0] for line in maps if "memfd:" in line}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() == before


@pytest.fixture
def exported() -> Iterator[ExportedMemory]:
    made = ExportedMemory.allocate("cpu", NBYTES)
    yield made
    made.close()


def send_descriptor(handle: int) -> int:
    """The descriptor as another process gets it over a Unix socket."""
    here, there = socket.socketpair()
    with here, there:
        socket.send_fds(here, [b"x"], [handle])
        return socket.recv_fds(there, 1, 1)[1][0]


def test_a_cpus_memory_is_read_where_it_is_written(exported: ExportedMemory) -> None:
    written = exported.as_tensor()
    written.fill_(5)
    opened = ExportedMemory.open("cpu", NBYTES, send_descriptor(exported.handle))
    read = opened.as_tensor()
    assert (read.shape, read.dtype, opened.handle) == ((NBYTES,), torch.uint8, -1)
    assert bool((read == 5).all())
    written[-1] = 6  # the next bucket
    assert read[-1] == 6
    read[0] = 1  # a reader changes nothing
    assert written[0] == 5
    exported.close()
    assert read[-1] == 6
    for _ in range(2):
        opened.close()
    with pytest.raises(ExportError, match="closed"):
        opened.as_tensor()


def test_closed_twice_it_closes_no_descriptor_of_others(exported: ExportedMemory) -> None:
    number = exported.handle
    exported.close()
    assert (exported.handle, exported.address) == (-1, 0)
    taken = os.open("/dev/null", os.O_RDONLY)
    assert taken <= number, "the number is in use again"
    exported.close()
    os.fstat(taken)
    os.close(taken)


def unsealed() -> int:
    handle = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(handle, NBYTES)
    return handle


def plain() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(NBYTES)
        return os.dup(file.fileno())


def closed() -> int:
    handle = os.open("/dev/null", os.O_RDONLY)
    os.close(handle)
    return handle


@pytest.mark.parametrize(
    ("handle", "why"),
    [
        (unsealed, "its owner must seal it"),
        (closed, "Bad file descriptor"),
        (lambda: os.open("/dev/zero", os.O_RDONLY), "has 0 bytes"),
        (plain, r"can't be sealed|may shrink"),
        (lambda: -1, "Bad file descriptor"),
    ],
    ids=["unsealed", "closed", "device", "file", "none"],
)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_descriptor_of_something_else_is_refused_and_closed(
    handle: Callable[[], int], why: str, device: str
) -> None:
    number, driver = handle(), MappingDriver()
    with pytest.raises(ExportError, match=why if device == "cpu" else "cuMemImportFromShareable"):
        ExportedMemory.open(device, NBYTES, number, driver=driver)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert driver.left_over() == ()


@pytest.mark.parametrize("nbytes", [NBYTES + 1, 1 << 62, 1 << 70, 0, -1])
def test_a_size_that_is_a_lie_is_refused(exported: ExportedMemory, nbytes: int) -> None:
    handle = send_descriptor(exported.handle)
    with pytest.raises(ExportError, match=f"{nbytes}"):
        ExportedMemory.open("cpu", nbytes, handle)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


@pytest.mark.parametrize("nbytes", [UNIT * 3, 1 << 70])
def test_a_gpus_driver_refuses_such_a_size(nbytes: int) -> None:
    ours, theirs = MappingDriver(), MappingDriver()
    memory = ExportedMemory.allocate("cuda:0", NBYTES, driver=theirs)
    with pytest.raises(
        ExportError, match=r"cuMemMap failed with error 1 \(CUDA_ERROR_INV|1180591620"
    ):
        ExportedMemory.open("cuda:0", nbytes, send_descriptor(memory.handle), driver=ours)
    memory.close()
    assert ours.left_over() == theirs.left_over() == ()


def test_no_room_is_an_error_of_its_own() -> None:
    with pytest.raises(ExportError, match=r"no room for .* bytes"):
        ExportedMemory.allocate("cpu", 1 << 50)


@pytest.mark.parametrize("device", ["cuda", "cuda:", "cuda:-1", "cuda:²", "CPU", "cpu:0", "tpu:0"])
def test_a_device_without_a_number_is_refused(device: str) -> None:
    with pytest.raises(ExportError, match="name cpu or cuda:<index>"):
        ExportedMemory.allocate(device, 1)
    with pytest.raises(ExportError, match="name cpu or cuda:<index>"):
        device_identity(device)
    assert device_identity("cpu") == "cpu"


def test_a_gpus_memory_lives_as_long_as_somebody_has_it() -> None:
    """Two processes that call the device by different numbers."""
    theirs, ours = MappingDriver(3), MappingDriver(1)
    exported = ExportedMemory.allocate("cuda:3", NBYTES, driver=theirs)
    assert not os.get_inheritable(exported.handle)
    opened = ExportedMemory.open("cuda:1", NBYTES, send_descriptor(exported.handle), driver=ours)
    assert exported.nbytes == opened.nbytes == NBYTES
    assert theirs.mapped[exported.address] == ours.mapped[opened.address] == 2 * UNIT
    assert (theirs.contexts, ours.contexts) == ([None], [None])
    ctypes.memmove(exported.address + NBYTES - 4, b"last", 4)
    assert ctypes.string_at(opened.address + NBYTES - 4, 4) == b"last"
    assert theirs.calls == [*MAKE, *ALLOCATE, *MAP]
    assert ours.calls == [*MAKE, *OPEN, *MAP]
    for _ in range(2):
        exported.close()
    assert theirs.calls == [*MAKE, *ALLOCATE, *MAP, *UNDO]
    assert ctypes.string_at(opened.address + NBYTES - 4, 4) == b"last"
    opened.close()
    assert ours.calls == [*MAKE, *OPEN, *MAP, *UNDO]
    assert theirs.left_over() == ours.left_over() == ()


@pytest.mark.parametrize("failing", range(len([*MAKE, *ALLOCATE, *MAP])))
def test_an_allocation_that_fails_leaves_nothing(failing: int) -> None:
    driver = MappingDriver(fail_at=failing)
    with pytest.raises(ExportError) as caught:
        ExportedMemory.allocate("cuda:0", NBYTES, driver=driver)
    name = [*MAKE, *ALLOCATE, *MAP][failing]
    why = f"{name} failed with error 2 (CUDA_ERROR_OUT_OF_MEMORY): send smaller buckets"
    assert str(caught.value).startswith(why)
    assert driver.left_over() == ()


@pytest.mark.parametrize("failing", range(len([*MAKE, *OPEN, *MAP])))
def test_a_mapping_that_fails_leaves_nothing(failing: int) -> None:
    theirs, ours = MappingDriver(), MappingDriver(fail_at=failing, error=999)
    exported = ExportedMemory.allocate("cuda:0", NBYTES, driver=theirs)
    handle = send_descriptor(exported.handle)
    name = [*MAKE, *OPEN, *MAP][failing]
    with pytest.raises(ExportError, match=f"{name} failed with error 999 .unknown to the driver.$"):
        ExportedMemory.open("cuda:0", NBYTES, handle, driver=ours)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)
    exported.close()
    assert ours.left_over() == theirs.left_over() == ()


@pytest.mark.parametrize("failing", ["cuCtxSynchronize", "cuDevicePrimaryCtxRelease_v2"])
def test_a_close_that_fails_goes_on_and_says_so(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = MappingDriver(error=201)
    memory = ExportedMemory.allocate("cuda:0", NBYTES, driver=driver)
    driver.fail_at = len(driver.calls) + UNDO.index(failing)
    memory.close()
    assert f"{failing} failed with error 201 (CUDA_ERROR_INVALID_CONTEXT)" in caplog.text
    assert driver.calls[-len(UNDO) :] == UNDO
    assert driver.left_over() == ((1,) if "Release" in failing else ())


def test_without_a_driver_the_error_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_mapping, "find_driver", lambda: None)
    with pytest.raises(ExportError, match="or use the device cpu"):
        ExportedMemory.allocate("cuda:0", NBYTES)


def test_a_gpu_that_this_process_does_not_see_is_named() -> None:
    with pytest.raises(ExportError, match=r"cuDeviceGet failed with error 101 .*VISIBLE_DEVICES"):
        ExportedMemory.allocate("cuda:1", NBYTES, driver=MappingDriver(0))


def test_structures_have_the_sizes_of_cudas_header() -> None:
    assert ctypes.sizeof(cuda_mapping.AllocationProperties) == 32
    assert ctypes.sizeof(cuda_mapping.AccessDescription) == 12
    assert CudaArray(1 << 40, 5).__cuda_array_interface__ == {
        "shape": (5,),
        "typestr": "|u1",
        "data": (1 << 40, False),
        "strides": None,
        "version": 3,
    }
