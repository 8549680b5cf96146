"""The locks of one turn: taken and given back, refused if this program would wait for itself.

`DeviceLocks` are a part of a pool's turn (`session`); `local_turn` holds them without a pool.
Lock files that were opened once stay open for the next turn of this process. A forked child does not use them:
it would hold the locks together with its parent.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollout_client.errors import PublishFailed, TurnFailed
from rollout_client.steering.settings import DEFAULT_PUBLISH_SECONDS
from rollout_client.steering.steering_protocol import publish_seconds
from rollout_common.turn import Turn, TurnError, TurnTimeout
from rollout_common.turn.device_memory import wait_for_memory
from rollout_common.turn.settings import MEMORY_RETURN_SECONDS

from .lending import BUCKET_BYTES, LentVersion, Loans
from .plan import ENV_DIRECTORY, given_devices, holder_name, lock_directory
from .turn_devices import pod_devices

if TYPE_CHECKING:
    from rollout_client.steering.spool import Tensors

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENV_HELD = "ROLLOUT_TURN_HELD"
"""What `rollout-turn run` holds for the command that it runs: directory and devices."""

_enclosing_turns: ContextVar[tuple[DeviceLocks, ...]] = ContextVar(
    "turns around this code", default=()
)

_idle_guard = threading.Lock()
_TurnKey = tuple[int, Path, tuple[str, ...]]
_idle_turns: dict[_TurnKey, list[Turn]] = {}
"""Turns that no block uses now, by process, directory and devices; held after a block that failed."""


@dataclass(frozen=True, slots=True)
class HeldTurn:
    """The turn that a block has.

    Attributes:
        devices: Names of the locked devices; none without locks.
        filenos: Descriptors of their lock files, and of what makes the locks fall last when a process dies. A process
            that inherits them all (`pass_fds`) and outlives this one keeps the turn until it has ended.
        directory: The node's lock directory.
    """

    devices: tuple[str, ...]
    filenos: tuple[int, ...]
    directory: Path
    _turn: Turn | None = field(repr=False, compare=False)
    _loans: Loans = field(repr=False, compare=False)

    def hand_over(
        self,
        version: int,
        tensors: Tensors,
        *,
        epoch: int,
        pool: str | None = None,
        seconds: float = DEFAULT_PUBLISH_SECONDS,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> LentVersion:
        """Let the engines that sleep on these devices read tensors from device to device, inside the turn.

        Their weights wake without values, copy the tensors bucket by bucket, and wait for a commit: publish what this
        returns by `pool.publish_handed_over`, on one rank. At the end of the block the engines take the turn over, so
        free all other memory of the devices before. Blocks; an asyncio program calls it in a thread.

        Args:
            version: As of `publish_weights`.
            tensors: A model, its state dict, or (name, tensor) pairs, all whole and with the names, shapes and dtypes of
                the model's checkpoint. Each rank passes all of them, gathered in its turn (`whole_tensors`), on
                its device. Read to their end, even if the call fails: other ranks wait in them.
            epoch: Of this trainer, `pool.epoch`.
            pool: Name of the pool whose engines get them; needed only where engines of several sleep on these devices.
            seconds: For the whole call.
            bucket_bytes: Size of each of the two buffers on a device.

        Raises:
            PublishFailed: No engine sleeps here, or one could not read the tensors. Until the first of them is sent, which
                is after all that can be checked, nothing has changed; then the former weights are gone from the
                engine, which loads them again where there is a copy.
            ValueError: A tensor, which the message names, can't be published.
        """
        if self._turn is None:
            raise PublishFailed("this turn has no locks, by which engines know who lends to them")
        return self._loans.hand_over(
            self.directory,
            self._turn,
            LentVersion(epoch, version, ""),
            tensors,
            pool=pool,
            seconds=publish_seconds(seconds),
            bucket_bytes=bucket_bytes,
        )


class DeviceLocks:
    """The locks of one block.

    Args:
        directory: The node's lock directory.
        devices: To lock; none: these locks are free at once and exclude nobody.
        holder: The name that other waiters read.
        pool: That sleeps during the turn, if one does.
    """

    def __init__(
        self, directory: Path, devices: Sequence[str], holder: str, pool: object | None = None
    ) -> None:
        with _raise_turn_failed():
            self._turn = Turn(directory, devices, holder) if devices else None
        self._directory = directory
        self._holder = holder
        self._pool = pool
        self._active = False
        self.devices = tuple(sorted(devices))
        self._key = (os.getpid(), directory, self.devices)
        self._borrowed = False
        self._was_kept = False
        self._loans = Loans()
        """What this turn lends."""

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy of a forked child: the locks are its parent's."""
        return self._key[0] != os.getpid()

    @property
    def has_kept(self) -> bool:
        """Whether this process holds the locks already, since a block ended with an error."""
        return any(turn.held for turn in _idle_turns.get(self._key, ()))

    @property
    def is_held(self) -> bool:
        """Whether a block has these locks now."""
        return self._active

    @property
    def held_turn(self) -> HeldTurn:
        """What the block gets."""
        files = () if self._turn is None else self._turn.fileno_list()
        return HeldTurn(self.devices, tuple(files), self._directory, self._turn, self._loans)

    @property
    def command_environment(self) -> dict[str, str]:
        """The environment by which a command knows that these locks are held for it."""
        held = {"directory": str(self._directory), "devices": list(self.devices)}
        return {ENV_HELD: json.dumps(held)}

    def check_takeable(self) -> None:
        """Refuse locks that can't be taken, before a pool falls asleep for them.

        Raises:
            TurnFailed: The lock directory is missing, or this code runs inside a turn on one of these
                devices, or of this pool.
        """
        if self.devices and not self._directory.is_dir():
            raise TurnFailed(
                f"the lock directory {str(self._directory)!r} is missing: mount the PersistentVolumeClaim "
                f"rollout-turn there, or name another place by directory=, --directory or {ENV_DIRECTORY}"
            )
        for other in _enclosing_turns.get():
            if other.is_held and self._overlaps_with(other):
                raise TurnFailed(
                    "turns don't nest: this code runs inside a turn on the same devices or of the same "
                    "pool already, and would wait for itself"
                )
        for (pid, directory, devices), idle in list(_idle_turns.items()):
            if (pid, directory) != self._key[:2] or devices == self.devices:
                continue
            mine = sorted(set(devices) & set(self.devices))
            if mine and any(turn.held for turn in idle):
                raise TurnFailed(
                    f"this process keeps {', '.join(mine)} since a turn on {', '.join(devices)} ended with an error: "
                    "free the memory in another turn on exactly these devices, whose end gives them back"
                )
        held = json.loads(os.environ.get(ENV_HELD) or "{}")
        if self._directory == Path(held.get("directory", "")):
            taken = set(held["devices"]) & set(self.devices)
            if taken:
                raise TurnFailed(
                    f"`rollout-turn run` holds {', '.join(sorted(taken))} for this program as long as it "
                    "runs: take the turn in the program, or run it under rollout-turn, not both"
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
        """Wait for all locks, and for the memory of a holder that died.

        After a failure or a cancellation call `give_back`.

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
        """As `take_locks`, for a program without an event loop."""
        if (turn := self._borrow_turn()) is not None:
            began = time.monotonic()
            with _raise_turn_failed():
                turn.take(seconds, _log_holders)
            if turn.left_by:
                _run_in_thread(_wait_for_freed_memory(turn.left_by, began, seconds))

    def give_back(self) -> None:
        """Give back what is held, also for the processes that share it; may be called again.

        Locks that a failed block left stay held if this block did not begin. A forked child gives nothing back.
        """
        gives = self._active or not self._was_kept
        if self._turn is not None and self._borrowed and not self.is_forked and gives:
            self._loans.give_turn(self._turn)
        self._return_turn()

    def keep_after_failure(self, failure: BaseException) -> None:
        """Keep what is held because the block failed: the error's frames refer to what it has in memory."""
        if self._borrowed and not self.is_forked:
            assert self._turn is not None, "it was borrowed"
            self._loans.take_back(self._turn)
            failure.add_note(
                f"this process keeps {', '.join(self.devices)} until it ends, or until its next turn on them ends"
                " without an error"
            )
        self._return_turn()

    def _borrow_turn(self) -> Turn | None:
        if self._turn is not None and not self._borrowed:
            self._borrowed = True
            with _idle_guard:
                idle = _idle_turns.get(self._key, [])
                idle.sort(key=lambda turn: turn.held)  # a held one comes last, and is popped first
                if idle:
                    self._turn = idle.pop()
                    self._turn.holder = self._holder
            self._was_kept = self._turn.held
        return self._turn

    def _return_turn(self) -> None:
        self._active = False
        if self._turn is None or not self._borrowed or self.is_forked:
            return
        self._borrowed = False
        with _idle_guard:
            _idle_turns.setdefault(self._key, []).append(self._turn)


class local_turn:
    """Hold the locks of devices for a block, with `with` or `async with`; no pool is asked to sleep.

    After an error in the block this process keeps them, as after `pool.turn`.

    Args:
        devices: As of `rollout_client.turn.TurnOptions`.
        directory: As of `rollout_client.turn.TurnOptions`.
        seconds: How long to wait for them; None: without limit.

    Raises:
        TurnFailed: Not within these seconds, or the directory can't be used.
        ClusterError: The API server does not say which devices this pod has.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        directory: str | Path | None = None,
        *,
        seconds: float | None = None,
    ) -> None:
        self._given = given_devices(devices)
        self._directory = lock_directory(directory)
        self._seconds = seconds
        self._locks: DeviceLocks | None = None

    def _make_locks(self, devices: Sequence[str]) -> DeviceLocks:
        if self._locks is not None:
            raise RuntimeError("a local_turn is for one block: make another one")
        self._locks = DeviceLocks(self._directory, devices, holder_name())
        self._locks.check_takeable()
        return self._locks

    def __enter__(self) -> HeldTurn:
        devices = self._given
        locks = self._make_locks(_run_in_thread(pod_devices()) if devices is None else devices)
        try:
            locks.take_locks_blocking(self._seconds)
            locks.begin_block()
            return locks.held_turn
        except BaseException:
            locks.give_back()
            raise

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        assert self._locks is not None
        if error is None:
            self._locks.give_back()
        else:
            self._locks.keep_after_failure(error)

    async def __aenter__(self) -> HeldTurn:
        locks = self._make_locks(await pod_devices() if self._given is None else self._given)
        try:
            await locks.take_locks(self._seconds)
            locks.begin_block()
            return locks.held_turn
        except BaseException:
            locks.give_back()
            raise

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.__exit__(kind, error, traceback)


@contextmanager
def _raise_turn_failed() -> Iterator[None]:
    try:
        yield
    except TurnTimeout as error:
        raise TurnFailed(str(error), waiting_for=error.waiting_for) from error
    except TurnError as error:
        raise TurnFailed(str(error)) from error


def _run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a thread of its own: the caller's may have a running event loop."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def _log_holders(waiting_for: Mapping[str, str]) -> None:
    for device, holder in waiting_for.items():
        logger.info("waiting for %s, which %s has", device, holder)


async def _wait_for_freed_memory(
    left_by: Mapping[str, str], began: float, seconds: float | None
) -> None:
    """Wait until the driver has returned the memory of a holder that died."""
    left = MEMORY_RETURN_SECONDS if seconds is None else began + seconds - time.monotonic()
    missing, _ = await wait_for_memory({}, min(MEMORY_RETURN_SECONDS, max(0.0, left)))
    if missing is not None:
        for device, holder in left_by.items():
            logger.warning(
                "%s still gives back the memory of %s, which has ended: there may be too little of it",
                device, holder,
            )  # fmt: skip
