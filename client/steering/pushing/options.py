"""What may be said of a publish of tensors, beside the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import EllipsisType
from typing import Any, TypedDict

from rollout_client.steering.versions import KEEP, Versions

from .routes import TRANSPORTS, Transport


class PushOptions(TypedDict, total=False):
    """Options of `publish_weights(tensors=…)`.

    Attributes:
        transport: `auto` (default): shared memory to replicas of this machine whose socket this process
            sees, TCP to all others. `shm` or `tcp`: that way alone.
        spool: Folder to write the version to as well, as `save_and_publish` does, before it is
            committed: the pool's durable source then, for who joins when nobody has it any more.
        mounted_at: The same folder as the workers see it: absolute, or relative to the weights' claim;
            None: as here.
        keep: How many committed versions stay in the folder, at least the one that serves.
    """

    transport: Transport
    spool: str | PurePath | None
    mounted_at: str | PurePath | None
    keep: int


@dataclass(frozen=True, slots=True)
class PushPlan:
    """The same, checked.

    Attributes:
        transport: Which ways may be used.
        versions: Where folders are written; None: nowhere.
    """

    transport: Transport
    versions: Versions | None

    @classmethod
    def of(cls, path: str | PurePath | EllipsisType | None, options: Mapping[str, Any]) -> PushPlan:
        """Return the options of a publish of tensors.

        Raises:
            TypeError: There is a path, too, or an option that belongs to a folder without one.
            ValueError: There is no such transport.
        """
        if path is not ...:
            raise TypeError("give publish_weights a path or tensors, not both")
        transport = options.get("transport", "auto")
        if transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, not {transport!r}")
        spool = options.get("spool")
        if spool is None:
            if options.keys() & {"mounted_at", "keep"}:
                raise TypeError(
                    "mounted_at and keep are about the folder of spool: give spool, too"
                )
            return cls(transport, None)
        mounted_at, keep = options.get("mounted_at"), options.get("keep", KEEP)
        return cls(transport, Versions.at(spool, mounted_at, keep))


def check_path(path: object, options: Mapping[str, Any]) -> None:
    """Refuse a publish without a source, and options that only tensors have.

    Raises:
        TypeError: It is one of these.
    """
    if path is ...:
        raise TypeError("give publish_weights a path, or tensors=")
    if options:
        raise TypeError(f"{', '.join(sorted(options))}: only a publish of tensors takes this")
