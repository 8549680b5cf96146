"""The locks of one turn: taken and given back, refused where this program would wait for itself.

Lock files that were opened once stay open for the next turn of this process: not of a fork, which
would hold them together with its parent.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from rollout_client.errors import TurnFailed
from rollout_common.turn import Turn, TurnError, TurnTimeout
from rollout_common.turn.device_memory import wait_for_memory
from rollout_common.turn.settings import BACK_SECONDS

from .plan import ENV_DIRECTORY

logger = logging.getLogger(__name__)

ENV_HELD = "ROLLOUT_TURN_HELD"
"""What `rollout-turn run` holds for the command that it runs: directory and devices."""

_enclosing_turns: ContextVar[tuple[DeviceLocks, ...]] = ContextVar(
    "turns around this code", default=()
)


_idle_guard = threading.Lock()
_TurnKey = tuple[int, Path, tuple[str, ...], str]
_idle_turns: dict[_TurnKey, list[Turn]] = {}
"""Turns of this process that nobody uses at the moment."""


class DeviceLocks:
    """See the module.

    Args:
        directory: The node's lock directory.
        devices: To lock; none: these locks are had at once and keep nobody off.
        holder: For people who wait.
        pool: What sleeps meanwhile, if anything does.
    """

    def __init__(
        self, directory: Path, devices: Sequence[str], holder: str, pool: object | None = None
    ) -> None:
        with _raise_turn_failed():
            self._turn = Turn(directory, devices, holder) if devices else None
        self._directory = directory
        self._pool = pool
        self._active = False
        self.devices = tuple(sorted(devices))
        self._key = (os.getpid(), directory, self.devices, holder)
        self._borrowed = False
        self._kept = False

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process whose locks these are."""
        return self._key[0] != os.getpid()

    @property
    def has_kept(self) -> bool:
        """Whether this process has them already: a block ended with an error."""
        return self._kept_turn() is not None

    @property
    def is_held(self) -> bool:
        """Whether the turn is had."""
        return self._active

    def check_takeable(self) -> None:
        """Refuse what can't be had before anybody falls asleep for it.

        Raises:
            TurnFailed: There is no lock directory, or this code runs inside a turn on one of these
                devices, or of this pool.
        """
        if self.devices and not self._directory.is_dir():
            raise TurnFailed(
                f"there is no lock directory {str(self._directory)!r}: mount the PersistentVolumeClaim "
                f"rollout-turn there, or name another place by directory=, --directory or {ENV_DIRECTORY}"
            )
        for other in _enclosing_turns.get():
            if other.is_held and self._overlaps_with(other):
                raise TurnFailed(
                    "turns don't nest: this code runs inside a turn on the same devices or of the same "
                    "pool already, and would wait for itself"
                )
        self._check_kept()
        held = json.loads(os.environ.get(ENV_HELD) or "{}")
        if self._directory == Path(held.get("directory", "")):
            taken = set(held["devices"]) & set(self.devices)
            if taken:
                raise TurnFailed(
                    f"`rollout-turn run` holds {', '.join(sorted(taken))} for this program as long as it "
                    "runs: take the turn in the program, or run it under rollout-turn, not both"
                )

    def _check_kept(self) -> None:
        for (pid, directory, devices, _holder), idle in list(_idle_turns.items()):
            if (pid, directory) != self._key[:2] or devices == self.devices:
                continue
            mine = sorted(set(devices) & set(self.devices))
            if mine and any(turn.held for turn in idle):
                raise TurnFailed(
                    f"this process keeps {', '.join(mine)} since a turn on {', '.join(devices)} ended with an error: "
                    "free the memory in another turn on exactly these devices, whose end gives them back"
                )

    def _overlaps_with(self, other: DeviceLocks) -> bool:
        if self._pool is not None and self._pool is other._pool:
            return True
        shared = set(self.devices) & set(other.devices)
        return bool(shared) and self._directory == other._directory

    def begin_block(self) -> None:
        """Note that the code that follows runs inside this turn."""
        self._active = True
        around = tuple(each for each in _enclosing_turns.get() if each.is_held)
        _enclosing_turns.set((*around, self))

    async def take_locks(self, seconds: float | None) -> None:
        """Wait until all are had, and the memory of a holder that died is back.

        Whoever is cancelled gives back what it has (`give`).

        Raises:
            TurnFailed: Not within these seconds, or the directory can't be used.
        """
        if (turn := self._borrow_turn()) is not None:
            began = time.monotonic()
            with _raise_turn_failed():
                await turn.take_async(seconds, _log_holders)
            if turn.left_by:
                await _wait_for_freed_memory(turn.left_by, began, seconds)

    def take_locks_blocking(self, seconds: float | None) -> None:
        """As `take`, in a program without an event loop."""
        if (turn := self._borrow_turn()) is not None:
            began = time.monotonic()
            with _raise_turn_failed():
                turn.take(seconds, _log_holders)
            if turn.left_by:
                # In a thread of its own: this one may have a running loop.
                with concurrent.futures.ThreadPoolExecutor(1) as thread:
                    thread.submit(
                        asyncio.run, _wait_for_freed_memory(turn.left_by, began, seconds)
                    ).result()

    def give_back(self) -> None:
        """Give back what is held, for all processes that share it, and what an earlier block left.

        A turn that did not begin leaves that, and a forked child gives nothing.
        """
        gives = self._active or not self._kept
        if self._turn is not None and self._borrowed and not self.is_forked and gives:
            self._turn.give()
        self.keep_locks()

    def keep_locks(self) -> None:
        """End the block and keep what is held: until this process has ended, or its next turn on these devices."""
        self._active = False
        if self._turn is None or not self._borrowed or self.is_forked:
            return
        self._borrowed = False
        with _idle_guard:
            _idle_turns.setdefault(self._key, []).append(self._turn)

    def keep_after_failure(self, failure: BaseException) -> None:
        """Keep what is held because the block failed: what it had in memory hangs on the error's frames."""
        if self._borrowed and not self.is_forked:
            failure.add_note(
                f"this process keeps {', '.join(self.devices)} until it ends, or until its next turn on them ends"
                " without an error"
            )
        self.keep_locks()

    def _borrow_turn(self) -> Turn | None:
        if self._turn is not None and not self._borrowed:
            self._borrowed = True
            with _idle_guard:
                key, self._kept = self._key, False
                if (left := self._kept_turn()) is not None:
                    (key, self._turn), self._kept = left, True
                    _idle_turns[key].remove(self._turn)
                elif idle := _idle_turns.get(key):
                    self._turn = idle.pop()
                self._key = key
        return self._turn

    def _kept_turn(self) -> tuple[_TurnKey, Turn] | None:
        """What a block on these very devices left held, under whatever name."""
        for key, idle in list(_idle_turns.items()):
            if key[:3] == self._key[:3]:
                for turn in idle:
                    if turn.held:
                        return key, turn
        return None

    def lock_filenos(self) -> list[int]:
        """Return what processes inherit that shall hold the turn, too."""
        return [] if self._turn is None else self._turn.fileno_list()

    def command_environment(self) -> dict[str, str]:
        """Return what tells a program that these locks are held for it."""
        held = {"directory": str(self._directory), "devices": list(self.devices)}
        return {ENV_HELD: json.dumps(held)}


@contextmanager
def _raise_turn_failed() -> Iterator[None]:
    try:
        yield
    except TurnTimeout as error:
        raise TurnFailed(str(error), waiting_for=error.waiting_for) from error
    except TurnError as error:
        raise TurnFailed(str(error)) from error


def _log_holders(waiting_for: Mapping[str, str]) -> None:
    for device, holder in waiting_for.items():
        logger.info("waiting for %s, which %s has", device, holder)


async def _wait_for_freed_memory(
    left_by: Mapping[str, str], began: float, seconds: float | None
) -> None:
    """Let the driver take back what a holder that died had; nobody waits for one that gave its turn back."""
    left = BACK_SECONDS if seconds is None else began + seconds - time.monotonic()
    missing, _ = await wait_for_memory({}, min(BACK_SECONDS, max(0.0, left)))
    if missing is not None:
        for device, holder in left_by.items():
            logger.warning(
                "%s still gives back the memory of %s, which has ended: there may be too little of it",
                device, holder,
            )  # fmt: skip
