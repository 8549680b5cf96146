"""The addresses of a gang's workers, and the folder of slots on each node."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from rollout_worker.engine import GangMembership
from rollout_worker.settings import WorkerSettings

SLOT_FOLDER_PREFIX = "rollout-slots-"

EXIT_GANG_BROKEN = 3
"""Exit status of a worker whose gang is broken; the operator then replaces all pods of the gang."""


class GangBroken(Exception):
    """The gang can't go on, so the process ends; the text says why."""


def make_gang(settings: WorkerSettings) -> GangMembership | None:
    """Return the gang of the settings, with a new folder for slots; None for a replica of one node.

    Removes the folders of workers that were killed.
    """
    if settings.nodes == 1:
        return None
    assert settings.leader_address is not None, "checked by the settings"
    home = Path(tempfile.gettempdir())
    for folder in home.glob(f"{SLOT_FOLDER_PREFIX}*"):
        owner = folder.name.removeprefix(SLOT_FOLDER_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    slots = Path(tempfile.mkdtemp(prefix=f"{SLOT_FOLDER_PREFIX}{os.getpid()}-", dir=home))
    return GangMembership(
        settings.nodes,
        settings.rank,
        settings.leader_address,
        settings.gang_port,
        slots,
        in_part=settings.gang_fetch == "needed",
    )


def member_addresses(settings: WorkerSettings) -> tuple[str, ...]:
    """Return HOST:PORT of the control port of each rank above 0."""
    if settings.member_addresses:
        return settings.member_addresses
    assert settings.leader_address is not None, "checked by the settings"
    first, dot, rest = settings.leader_address.partition(".")
    stem = first.removesuffix("-0")
    return tuple(
        f"{stem}-{rank}{dot}{rest}:{settings.control_port}" for rank in range(1, settings.nodes)
    )


def head_pod_name(settings: WorkerSettings) -> str:
    """Return the name of the head's pod."""
    return (settings.leader_address or "").partition(".")[0]
