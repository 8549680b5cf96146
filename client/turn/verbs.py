"""`pool.turn()`: the pool sleeps and its devices are this trainer's for a block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Unpack

from rollout_client.hooks import Hook
from rollout_client.steering.steering_protocol import Steering
from rollout_client.steering.steering_verbs import SteeringVerbs

from .plan import TurnOptions, TurnPlan
from .session import FindDevices, HeldTurn, TurnSession
from .turn_devices import pod_devices


class TurnVerbs(SteeringVerbs):
    """What a trainer does that shares its accelerators with the pool.

    Args:
        steering: As of `SteeringVerbs`.
        hook: As of `SteeringVerbs`.
        max_staleness: As of `SteeringVerbs`.
    """

    def __init__(
        self, steering: Steering | None, hook: Hook, max_staleness: int | None = None
    ) -> None:
        super().__init__(steering, hook, max_staleness)
        self._find_devices: FindDevices = pod_devices

    @asynccontextmanager
    async def turn(self, **options: Unpack[TurnOptions]) -> AsyncIterator[HeldTurn]:
        """Have the devices that this process shares with the pool for a block.

        The pool falls asleep, this process takes the node's locks, the block runs, the locks are given
        back, the pool wakes. Free all memory of the devices before the block ends. After an error in the
        block this process keeps the locks until it ends, or until its next turn on these devices ends well, for what
        hangs on the error is still in memory; the pool is asked to wake all the same, without waiting until it
        serves. A forked child that leaves the block gives nothing away. See docs/share-gpus.md.

        Args:
            **options: See `rollout_client.turn.TurnOptions`.

        Raises:
            TurnFailed: The turn was not had; the pool is asked back to what it was.
            SteeringFailed: The pool did not fall asleep, or did not serve afterwards, in time.
            EpochLost, ClusterError: See `sleep`.
        """
        session = TurnSession(self, TurnPlan.from_options(options), self._find_devices)
        await session.acquire_turn()
        try:
            yield session.held_turn
        except BaseException as error:
            await session.leave_turn(error)
            raise
        await session.leave_turn(None)
