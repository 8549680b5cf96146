"""Main module of the child: `python -m rollout_worker.engines.sglang.child_process.child FD PARENT FLAG...`.

It imports little, because SGLang imports the main module again in every process that it spawns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

from rollout_common.garbage_collection import without_garbage_collection
from rollout_common.parent_death import die_with_parent
from rollout_common.turn.sharing import join
from rollout_worker.engines import tested
from rollout_worker.engines.sglang.settings import NVIDIA_SMI_TIMEOUT_SECONDS

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


def number_devices() -> None:
    """Replace uuids in CUDA_VISIBLE_DEVICES by numbers in the order of the bus; do nothing without a driver.

    SGLang 0.5 makes numbers of its parts (its own all-reduce, NVLink), and fails on uuids, by which a
    pool next to a trainer names its devices.
    """
    visible = os.environ.get(DEVICES_VARIABLE, "")
    if "GPU-" not in visible:
        return
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return
    numbers = numbers_for_uuids(visible, listed.stdout)
    if numbers is not None:
        os.environ[DEVICES_VARIABLE] = numbers
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi counts so


def numbers_for_uuids(visible: str, listed: str) -> str | None:
    """Return the numbers of devices as CUDA_VISIBLE_DEVICES lists them; None if one is unknown.

    `visible`: uuids, or their beginnings, separated by commas. `listed`: a line `index, uuid` for each device.
    """
    rows = [line.partition(",") for line in listed.splitlines()]
    found: list[str] = []
    for each in filter(None, map(str.strip, visible.split(","))):
        known = [index.strip() for index, _, uuid in rows if uuid.strip().startswith(each)]
        if not known:
            return None
        found.append(known[0])
    return ",".join(found)


def main() -> None:
    """Serve the worker at the other end of the socket `FD` until it closes."""
    descriptor, parent, flags = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    die_with_parent(parent)
    join()  # this process hardly uses the device's memory, but what it imports may touch the device
    if tested.ALLOW_UNTESTED_FLAG in flags:
        flags.remove(tested.ALLOW_UNTESTED_FLAG)
    elif (why := tested.untested_version_refusal("SGLang", version("sglang"))) is not None:
        sys.exit(f"Error: {why}")
    number_devices()
    with without_garbage_collection():  # modules stay
        from . import serving

    serving.run_child(descriptor, flags)


if __name__ == "__main__":
    main()
