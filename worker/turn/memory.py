"""How much memory the accelerators that this process sees have left, as nvidia-smi tells it.

Not asked through torch: that would make a context on the device, in a process that has no other use for one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass

MIB = 1 << 20
ASK_SECONDS = 10.0
BACK_SECONDS = 30.0
"""How long memory may take to come back from who had the turn before."""
EVERY_SECONDS = 0.2
SLACK = 0.05
"""So much of a device others may keep beyond what they kept before; engines leave more than that unused."""

_COMMAND = (
    "nvidia-smi",
    "--query-gpu=index,uuid,memory.free,memory.total",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True, slots=True)
class Free:
    """Memory of one device, in bytes."""

    free: int
    total: int


async def free_memory() -> dict[str, Free]:
    """Return the memory of each visible device; nothing where there is no nvidia-smi or no answer."""
    if shutil.which(_COMMAND[0]) is None:
        return {}
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(ASK_SECONDS):
            told, _ = await process.communicate()
    except TimeoutError:
        return {}
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return parsed(told.decode(errors="replace"), os.environ.get("CUDA_VISIBLE_DEVICES"))


def parsed(told: str, visible: str | None) -> dict[str, Free]:
    """Read nvidia-smi's answer.

    Args:
        told: a line `index, uuid, MiB free, MiB in all` for each device.
        visible: `CUDA_VISIBLE_DEVICES`, indices or the beginnings of UUIDs; None for all.
    """
    found = {}
    wanted = None if visible is None else [part.strip() for part in visible.split(",")]
    for line in told.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not (fields[2].isdigit() and fields[3].isdigit()):
            continue  # a device that is lost or divided says so in words
        index, uuid = fields[:2]
        if wanted is None or any(_names(each, index, uuid) for each in wanted):
            found[f"GPU {index}"] = Free(int(fields[2]) * MIB, int(fields[3]) * MIB)
    return found


def _names(wanted: str, index: str, uuid: str) -> bool:
    return wanted == index or (wanted.startswith("GPU-") and uuid.startswith(wanted))


def missing(now: Mapping[str, Free], before: Mapping[str, Free]) -> str | None:
    """Say which device has less memory left than before, beyond the slack; None if none has."""
    for device, then in before.items():
        left = now.get(device)
        if left is not None and left.free + SLACK * then.total < then.free:
            return (
                f"{device} has {left.free / 2**30:.1f} GiB free, {then.free / 2**30:.1f} GiB when this"
                " engine had it last"
            )
    return None


def grows(now: Mapping[str, Free], before: Mapping[str, Free]) -> bool:
    """Whether memory is still being given back: the driver does so after a process has ended."""
    return any(
        device in before and left.free > before[device].free + MIB for device, left in now.items()
    )


async def settled(seconds: float = BACK_SECONDS) -> bool:
    """Wait until a driver has taken back what processes that have ended had; False if it still does after so long.

    Returns at once where there is no nvidia-smi.
    """
    until, before = time.monotonic() + seconds, await free_memory()
    while before:
        await asyncio.sleep(EVERY_SECONDS)
        now = await free_memory()
        if not grows(now, before):
            return True
        if time.monotonic() > until:
            return False
        before = now
    return True
