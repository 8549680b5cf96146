"""How much memory the accelerators that this process sees have left, and whether what others had is back.

nvidia-smi tells it. It is not asked through torch: that would make a context on the device, in a process that has no
other use for one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from .settings import ASK_SECONDS, BACK_SECONDS, EVERY_SECONDS, QUIET_SECONDS

logger = logging.getLogger(__name__)

MIB, GIB = 1 << 20, 1 << 30
GROWS = "it still grows"

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


Look = Callable[[], Awaitable[Mapping[str, Free]]]


async def free_memory() -> dict[str, Free]:
    """Return the memory of each visible device; nothing where there is no nvidia-smi or no answer.

    That nobody can look is logged once.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which(_COMMAND[0]) is None:
        return _blind("there is no nvidia-smi")
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
        return _blind(f"nvidia-smi does not answer within {ASK_SECONDS:g} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found = parsed(told.decode(errors="replace"), visible)
    if not found:
        return _blind(
            f"nvidia-smi tells no free memory of the devices in CUDA_VISIBLE_DEVICES ({visible}), as for parts of a"
            " GPU (MIG)"
        )
    if MPS in os.environ:
        _say_once(
            f"{MPS} is set: the MPS server frees memory of a client that died when it likes, and a lock says"
            " nothing of that"
        )
    return found


MPS = "CUDA_MPS_PIPE_DIRECTORY"
_said: set[str] = set()


def _blind(why: str) -> dict[str, Free]:
    _say_once(
        f"{why}, so nobody looks whether the memory of who had the devices before is back: the locks alone decide"
    )
    return {}


def _say_once(what: str) -> None:
    if what not in _said:
        _said.add(what)
        logger.warning("%s", what)


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


def shortfall(now: Mapping[str, Free], needs: Mapping[str, int]) -> str | None:
    """Say which device has less memory free than is needed of it; None if none has."""
    for device, need in needs.items():
        left = now.get(device)
        if left is not None and left.free < need:
            return (
                f"{device} has {left.free / GIB:.1f} of {left.total / GIB:.1f} GiB free, {need / GIB:.1f} GiB are"
                f" needed: {_amount(need - left.free)} are missing"
            )
    return None


def _amount(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{max(1, size // MIB)} MiB"


def grows(now: Mapping[str, Free], before: Mapping[str, Free]) -> bool:
    """Whether memory is still being given back: the driver does so after a process has ended."""
    return any(
        device in before and left.free > before[device].free + MIB for device, left in now.items()
    )


async def wait_for_memory(
    needs: Mapping[str, int],
    seconds: float = BACK_SECONDS,
    *,
    look: Look = free_memory,
    tell: Callable[[str, Mapping[str, Free]], None] = lambda why, now: None,
    wanted: Callable[[], bool] = lambda: True,
) -> tuple[str | None, Mapping[str, Free]]:
    """Wait until the memory of who had the devices before is back: the one rule for workers and trainers.

    It is back once as much is free as is needed. Where that isn't known, once nothing more has come for
    `QUIET_SECONDS`. Where nobody can look, at once.

    Args:
        needs: bytes that must be free, by device; empty if it isn't known.
        seconds: how long to wait.
        look: returns the free memory of each device.
        tell: is told what is waited for, and what the devices have free.
        wanted: whether to go on.

    Returns:
        What is still missing when the time is up, else None; and the last look.
    """
    now, began = await look(), time.monotonic()
    grew = began
    while now and wanted():
        at = time.monotonic()
        why = shortfall(now, needs)
        if why is None and (needs or at - grew >= QUIET_SECONDS):
            return None, now
        if at - began > seconds:
            return why or (GROWS if at - grew < 2 * EVERY_SECONDS else None), now
        tell(why or GROWS, now)
        await asyncio.sleep(EVERY_SECONDS)
        before, now = now, await look() or now
        if grows(now, before):
            grew = time.monotonic()
    return None, now
