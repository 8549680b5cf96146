"""`local_turn`: the node's locks without a pool, for a program that puts nobody to sleep."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Sequence
from pathlib import Path

from .locks import DeviceLocks
from .plan import given_devices, holder_name, lock_directory
from .session import HeldTurn
from .turn_devices import pod_devices


class local_turn:
    """Hold the locks of devices for a block, with `with` or `async with`; ask nobody to make way.

    After an error in the block this process keeps them, as after `pool.turn`.

    Args:
        devices: As of `rollout_client.turn.TurnOptions`.
        directory: As of `rollout_client.turn.TurnOptions`.
        seconds: How long to wait for them; None: for ever.

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

    @staticmethod
    def _begin_turn(locks: DeviceLocks) -> HeldTurn:
        locks.begin_block()
        return HeldTurn(locks.devices, tuple(locks.lock_filenos()))

    def __enter__(self) -> HeldTurn:
        devices = self._given
        if devices is None:
            # In a thread of its own: this one may have a running loop.
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                devices = thread.submit(asyncio.run, pod_devices()).result()
        locks = self._make_locks(devices)
        try:
            locks.take_locks_blocking(self._seconds)
            return self._begin_turn(locks)
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
        devices = await pod_devices() if self._given is None else self._given
        locks = self._make_locks(devices)
        try:
            await locks.take_locks(self._seconds)
            return self._begin_turn(locks)
        except BaseException:
            locks.give_back()
            raise

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.__exit__(kind, error, traceback)
