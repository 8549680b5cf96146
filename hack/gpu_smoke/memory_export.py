"""Two processes share memory of a device: one exports it, the other copies it and outlives the first.

    python -m gpu_smoke.memory_export cuda:0 268435456

A process of its own, so that no context of CUDA stays on the device that the other checks measure.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import torch

from rollout_common.transfer.memory.exported_memory import ExportedMemory, device_identity
from rollout_common.transfer.tensor_sums import sum_tensors

WAIT_SECONDS = 120.0


def main(argv: list[str]) -> int:
    """Run one end: with a third argument, the descriptor of a socket, the exporter's."""
    device, nbytes = argv[0], int(argv[1])
    if len(argv) > 2:
        export_random(device, nbytes, int(argv[2]))
        return 0
    print(copy_from_exporter(device, nbytes))
    return 0


def export_random(device: str, nbytes: int, fileno: int) -> None:
    """Fill memory with random bf16, send its descriptor, and wait to be killed."""
    memory = ExportedMemory.allocate(device, nbytes)
    content = memory.as_tensor().view(torch.bfloat16).normal_()
    [total] = sum_tensors([content])
    with socket.socket(fileno=fileno) as peer:
        told = f"{device_identity(device)} {total}".encode()
        socket.send_fds(peer, [told], [memory.handle])
        peer.recv(1)


def copy_from_exporter(device: str, nbytes: int) -> str:
    """Copy what another process exports, before and after that process is killed; return how fast."""
    here, there = socket.socketpair()
    command = [sys.executable, "-m", "gpu_smoke.memory_export", device, str(nbytes)]
    with here, there:
        exporter = subprocess.Popen([*command, str(there.fileno())], pass_fds=[there.fileno()])
        there.close()
        here.settimeout(WAIT_SECONDS)
        try:
            told, handles, _, _ = socket.recv_fds(here, 1024, 1)
            if not handles:
                raise SystemExit(
                    "the exporter ended before it sent its memory: see its error above"
                )
            identity, total = told.decode().split()
            if identity != device_identity(device):
                raise SystemExit(
                    f"the exporter's device is {identity}, not {device_identity(device)}"
                )
            return copy_twice(device, nbytes, handles[0], total, exporter)
        finally:
            exporter.kill()
            exporter.wait(WAIT_SECONDS)


def copy_twice(
    device: str, nbytes: int, handle: int, total: str, exporter: subprocess.Popen[bytes]
) -> str:
    """Map the memory and copy it twice, the exporter being dead the second time; check both copies' sums."""
    memory = ExportedMemory.open(device, nbytes, handle)
    try:
        shared, own = memory.as_tensor(), torch.zeros(nbytes, dtype=torch.uint8, device=device)
        own.copy_(shared)
        check_sums("alive", total, shared, own)
        seconds = min(time_copy(own, shared) for _ in range(3))
        exporter.kill()
        exporter.wait(WAIT_SECONDS)
        own.zero_()
        own.copy_(shared)
        check_sums("killed", total, shared, own)
        del shared
    finally:
        memory.close()
    speed = nbytes / seconds / 1e9
    return f"{nbytes >> 20} MiB copied at {speed:.1f} GB/s, and again after the exporter was killed"


def time_copy(own: torch.Tensor, shared: torch.Tensor) -> float:
    began = time.perf_counter()
    own.copy_(shared)
    if own.is_cuda:
        torch.cuda.synchronize(own.device)
    return time.perf_counter() - began


def check_sums(when: str, total: str, *tensors: torch.Tensor) -> None:
    sums = sum_tensors(tensors)
    if set(sums) != {total}:
        raise SystemExit(f"exporter {when}: its sum is {total}, memory and copy have {sums}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
