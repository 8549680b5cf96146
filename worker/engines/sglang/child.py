"""Main module of the child: `python -m rollout_worker.engines.sglang.child FD PARENT FLAG...`.

Light, as SGLang imports the main module again in every process that it spawns.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from importlib.metadata import version

from rollout_common.turn.sharing import join
from rollout_worker.engines import tested

from .settings import NVIDIA_SMI_TIMEOUT_SECONDS

PR_SET_PDEATHSIG = 1
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"

_NVIDIA_SMI_COMMAND = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends; `parent` may be gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def number_devices() -> None:
    """Replace uuids in the environment by numbers in the order of the bus; without a driver nothing is.

    SGLang 0.5 makes numbers of the parts of CUDA_VISIBLE_DEVICES (its own all-reduce, NVLink), and fails
    on uuids, which is how a pool next to a trainer names its devices.
    """
    visible = os.environ.get(DEVICES_VARIABLE, "")
    if "GPU-" not in visible:
        return
    try:
        told = subprocess.run(
            _NVIDIA_SMI_COMMAND,
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return
    numbers = numbers_for_uuids(visible, told.stdout)
    if numbers is not None:
        os.environ[DEVICES_VARIABLE] = numbers
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi counts so


def numbers_for_uuids(visible: str, told: str) -> str | None:
    """Return `visible` with numbers for uuids; None if one of them is not told.

    Args:
        visible: uuids, or their beginnings, separated by commas.
        told: a line `index, uuid` for each device.
    """
    rows = [line.partition(",") for line in told.splitlines()]
    by_uuid = {uuid.strip(): index.strip() for index, _, uuid in rows}
    found = [
        next((index for uuid, index in by_uuid.items() if uuid.startswith(each.strip())), None)
        for each in visible.split(",")
        if each.strip()
    ]
    return None if None in found else ",".join(index for index in found if index is not None)


def main() -> None:
    """Serve the worker at the other end of the socket `FD` until it closes."""
    descriptor, parent, flags = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    die_with_parent(parent)
    join()  # this process has no memory of the device to speak of, but what it imports may look at it
    if tested.ALLOW_UNTESTED_FLAG in flags:
        flags.remove(tested.ALLOW_UNTESTED_FLAG)
    elif (why := tested.untested_version_refusal("SGLang", version("sglang"))) is not None:
        sys.exit(f"Error: {why}")
    number_devices()
    from rollout_worker.engines.sglang import serving

    serving.run_child(descriptor, flags)


if __name__ == "__main__":
    main()
