"""Which devices SGLang may see, said as it reads it: some of its parts take numbers only.

SGLang 0.5 makes numbers of the parts of CUDA_VISIBLE_DEVICES (its own all-reduce, NVLink), and fails on
uuids, which is how a pool beside a trainer names its devices.
"""

from __future__ import annotations

import os
import subprocess

VARIABLE = "CUDA_VISIBLE_DEVICES"
ASK_SECONDS = 30.0

_COMMAND = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")


def number_devices() -> None:
    """Replace uuids in the environment by numbers in the order of the bus; without a driver nothing is."""
    visible = os.environ.get(VARIABLE, "")
    if "GPU-" not in visible:
        return
    try:
        told = subprocess.run(
            _COMMAND, capture_output=True, text=True, timeout=ASK_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return
    numbers = numbered(visible, told.stdout)
    if numbers is not None:
        os.environ[VARIABLE] = numbers
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi counts so


def numbered(visible: str, told: str) -> str | None:
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
