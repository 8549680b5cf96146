"""`local_turn`: the node's locks without a pool, for a program that puts nobody to sleep."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Sequence
from pathlib import Path

from .devices import pod_devices
from .locks import Locks
from .plan import given_devices, holder_name, lock_directory
from .session import HeldTurn


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
        self._locks: Locks | None = None

    def _made(self, devices: Sequence[str]) -> Locks:
        if self._locks is not None:
            raise RuntimeError("a local_turn is for one block: make another one")
        self._locks = Locks(self._directory, devices, holder_name())
        self._locks.check()
        return self._locks

    @staticmethod
    def _began(locks: Locks) -> HeldTurn:
        locks.begin()
        return HeldTurn(locks.devices, tuple(locks.filenos()))

    def __enter__(self) -> HeldTurn:
        devices = self._given
        if devices is None:
            # In a thread of its own: this one may have a running loop.
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                devices = thread.submit(asyncio.run, pod_devices()).result()
        locks = self._made(devices)
        try:
            locks.take_here(self._seconds)
            return self._began(locks)
        except BaseException:
            locks.give()
            raise

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        assert self._locks is not None
        if error is None:
            self._locks.give()
        else:
            self._locks.keep_after(error)

    async def __aenter__(self) -> HeldTurn:
        devices = await pod_devices() if self._given is None else self._given
        locks = self._made(devices)
        try:
            await locks.take(self._seconds)
            return self._began(locks)
        except BaseException:
            locks.give()
            raise

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.__exit__(kind, error, traceback)
