"""The free memory of the accelerators that this process sees, and whether an earlier holder's memory is back.

The figures come from nvidia-smi: torch would make a context on the device, in a process that needs none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from .settings import (
    KILL_SECONDS,
    MEMORY_POLL_SECONDS,
    MEMORY_QUIET_SECONDS,
    MEMORY_RETURN_SECONDS,
    NVIDIA_SMI_SECONDS,
)

logger = logging.getLogger(__name__)

MIB, GIB = 1 << 20, 1 << 30
GROWS = "it still grows"
MPS = "CUDA_MPS_PIPE_DIRECTORY"

_COMMAND = (
    "nvidia-smi",
    "--query-gpu=index,uuid,memory.free,memory.total",
    "--format=csv,noheader,nounits",
)
_logged: set[str] = set()


@dataclass(frozen=True, slots=True)
class Free:
    """Memory of one device, in bytes."""

    free: int
    total: int


Look = Callable[[], Awaitable[Mapping[str, Free]]]
"""Returns the memory of each device; empty if it is not known."""


async def free_memory() -> dict[str, Free]:
    """Return the memory of each visible device; empty, and logged once, if nvidia-smi is missing or fails."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which(_COMMAND[0]) is None:
        return _note_unknown("nvidia-smi is not installed")
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(NVIDIA_SMI_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        return _note_unknown(f"nvidia-smi does not answer within {NVIDIA_SMI_SECONDS:g} s")
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_SECONDS):
                    await process.wait()
    found = parsed(output.decode(errors="replace"), visible)
    if not found:
        return _note_unknown(
            f"nvidia-smi lists no free memory of the devices in CUDA_VISIBLE_DEVICES ({visible}), as for parts of a"
            " GPU (MIG)"
        )
    if MPS in os.environ:
        _warn_once(
            f"{MPS} is set: the MPS server may free the memory of a client that died late, and a lock does not show that"
        )
    return found


def _note_unknown(why: str) -> dict[str, Free]:
    _warn_once(
        f"{why}, so nobody can check that an earlier holder's memory is back: the locks alone decide"
    )
    return {}


def _warn_once(text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        logger.warning("%s", text)


def parsed(output: str, visible: str | None) -> dict[str, Free]:
    """Parse the output of nvidia-smi.

    Args:
        output: a line `index, uuid, MiB free, MiB in total` for each device.
        visible: `CUDA_VISIBLE_DEVICES`: indices or beginnings of UUIDs; None: all devices.
    """
    found = {}
    wanted = None if visible is None else [part.strip() for part in visible.split(",")]
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not (fields[2].isdigit() and fields[3].isdigit()):
            continue  # a device that is lost or divided has words there
        index, uuid = fields[:2]
        if wanted is None or any(
            each == index or (each.startswith("GPU-") and uuid.startswith(each)) for each in wanted
        ):
            found[f"GPU {index}"] = Free(int(fields[2]) * MIB, int(fields[3]) * MIB)
    return found


def shortfall(now: Mapping[str, Free], needs: Mapping[str, int]) -> str | None:
    """Return a sentence about the first device with less free memory than needed, or None."""
    for device, need in needs.items():
        left = now.get(device)
        if left is not None and left.free < need:
            missing = need - left.free
            amount = (
                f"{missing / GIB:.1f} GiB" if missing >= GIB else f"{max(1, missing // MIB)} MiB"
            )
            return (
                f"{device} has {left.free / GIB:.1f} of {left.total / GIB:.1f} GiB free, {need / GIB:.1f} GiB are"
                f" needed: {amount} are missing"
            )
    return None


def grows(now: Mapping[str, Free], before: Mapping[str, Free]) -> bool:
    """Return whether the free memory has grown: the driver returns memory after a process has ended."""
    return any(
        device in before and left.free > before[device].free + MIB for device, left in now.items()
    )


async def wait_for_memory(
    needs: Mapping[str, int],
    seconds: float = MEMORY_RETURN_SECONDS,
    *,
    look: Look = free_memory,
    tell: Callable[[str, Mapping[str, Free]], None] = lambda why, now: None,
    wanted: Callable[[], bool] = lambda: True,
) -> tuple[str | None, Mapping[str, Free]]:
    """Wait until an earlier holder's memory is back; workers and trainers share this one rule.

    It is back once as much is free as is needed. If the need is unknown: once nothing more has come for
    `MEMORY_QUIET_SECONDS`. If the free memory is unknown: at once.

    Args:
        needs: bytes that must be free, by device; empty if unknown.
        seconds: how long to wait.
        look: returns the free memory of each device.
        tell: gets the reason for the wait, and the free memory.
        wanted: polled; once it returns False the wait ends.

    Returns:
        What is still missing when the time is up, else None; and the last free memory.
    """
    now, began = await look(), time.monotonic()
    grew = began
    while now and wanted():
        at = time.monotonic()
        why = shortfall(now, needs)
        if why is None and (needs or at - grew >= MEMORY_QUIET_SECONDS):
            return None, now
        if at - began > seconds:
            return why or (GROWS if at - grew < 2 * MEMORY_POLL_SECONDS else None), now
        tell(why or GROWS, now)
        await asyncio.sleep(MEMORY_POLL_SECONDS)
        before, now = now, await look() or now
        if grows(now, before):
            grew = time.monotonic()
    return None, now
