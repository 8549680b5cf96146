"""The options of a turn, and their defaults from the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from rollout_client.option_names import check_option_names
from rollout_client.steering.settings import DEFAULT_STATE_SECONDS

DEFAULT_LOCK_DIRECTORY = Path("/rollout/turn")
"""Where pods mount the node's lock directory."""

ENV_DIRECTORY = "ROLLOUT_TURN_DIRECTORY"
ENV_DEVICES = "ROLLOUT_TURN_DEVICES"
ENV_HOLDER = "ROLLOUT_TURN_HOLDER"
ENV_POD = "POD_NAME"

Agreement = Callable[[bool], bool]
"""Returns whether every rank passed True: an all-reduce of the minimum, with a timeout of its own."""


class TurnOptions(TypedDict, total=False):
    """The keyword arguments of `pool.turn`.

    Attributes:
        devices: Names of the devices that this process computes on; default: $ROLLOUT_TURN_DEVICES
            (separated by commas), else those of this pod's ResourceClaims.
        directory: The node's lock directory; default: $ROLLOUT_TURN_DIRECTORY, else /rollout/turn.
        locks: False: only put the pool to sleep. Nothing then keeps a worker or another trainer off
            the devices if a message is late or a process dies: for nodes without a lock directory.
        rank: Of this process among those that take the turn together; only rank 0 steers the pool.
        world: How many processes take the turn together: all of them, or none.
        agree: All-reduce AND over these processes, needed if there are several. Each process calls it equally
            often, `world` + 2 times at most (in an asyncio program in a thread).
        seconds: How long falling asleep and the locks may take together; waking may take as long again.
        wake: Ask the pool to be Active again at the end.
        serving: Wait at the end until it serves; False: only ask.
    """

    devices: Sequence[str] | None
    directory: str | Path | None
    locks: bool
    rank: int
    world: int
    agree: Agreement | None
    seconds: float
    wake: bool
    serving: bool


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """`TurnOptions` with their defaults.

    Raises:
        ValueError: They contradict each other.
    """

    devices: Sequence[str] | None = None
    directory: str | Path | None = None
    locks: bool = True
    rank: int = 0
    world: int = 1
    agree: Agreement | None = None
    seconds: float = DEFAULT_STATE_SECONDS
    wake: bool = True
    serving: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is not below world {self.world}")
        if self.world > 1 and self.agree is None:
            raise ValueError(
                "several processes take the turn all or none: give agree, an all-reduce"
            )
        if self.seconds <= 0:
            raise ValueError(f"seconds must be above 0, not {self.seconds:g}")
        if not self.locks and (self.devices is not None or self.directory is not None):
            raise ValueError("devices and directory are for locks: drop them, or locks=False")
        if isinstance(self.devices, str):
            raise ValueError(f"devices must be a list of names, not the text {self.devices!r}")

    @classmethod
    def from_options(cls, options: TurnOptions) -> TurnPlan:
        """Return the plan for these options.

        Raises:
            TypeError: An option does not exist.
        """
        check_option_names("turn", options, TurnOptions.__annotations__)
        return cls(**options)

    def all_agree(self, yes: bool) -> bool:
        """Return whether all ranks say yes."""
        return yes if self.agree is None else bool(self.agree(yes))


def given_devices(devices: Sequence[str] | None) -> list[str] | None:
    """Return the devices that the caller or the environment names; None: ask the API server.

    Raises:
        ValueError: The caller names none: a turn over nothing would keep nobody out.
    """
    if devices is not None:
        if not devices:
            raise ValueError("devices is empty: name at least one, or give locks=False")
        return list(devices)
    named = [name.strip() for name in os.environ.get(ENV_DEVICES, "").split(",")]
    return [name for name in named if name] or None


def lock_directory(directory: str | Path | None) -> Path:
    """Return the node's lock directory."""
    return Path(directory or os.environ.get(ENV_DIRECTORY) or DEFAULT_LOCK_DIRECTORY)


def holder_name(rank: int = 0, world: int = 1) -> str:
    """Return the name that processes read which wait for this one."""
    name = os.environ.get(ENV_HOLDER) or os.environ.get(ENV_POD) or socket.gethostname()
    return name if world == 1 else f"{name}, rank {rank} of {world}"
