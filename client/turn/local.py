"""`local_turn`: the node's locks without a pool, for a program that puts nothing to sleep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .locks import DeviceLocks, HeldTurn, run_in_thread
from .plan import given_devices, holder_name, lock_directory
from .turn_devices import pod_devices


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
        locks = self._make_locks(run_in_thread(pod_devices()) if devices is None else devices)
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
