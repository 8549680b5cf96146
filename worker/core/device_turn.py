"""The worker's turn for its devices: had before an engine takes their memory, given back with it.

Without `--turn-devices` there is none: the devices are this engine's alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping

from rollout_worker.engine import EngineError
from rollout_worker.observe.telemetry import Telemetry
from rollout_worker.schemas import Progress, TurnState
from rollout_worker.settings import Settings
from rollout_worker.turn import Turn, TurnError, TurnReplaced
from rollout_worker.turn.memory import (
    BACK_SECONDS,
    EVERY_SECONDS,
    Free,
    free_memory,
    grows,
    missing,
)
from rollout_worker.turn.sharing import Sharing

logger = logging.getLogger(__name__)

Look = Callable[[], Awaitable[Mapping[str, Free]]]

LOOK_SECONDS = 1.0
"""How often whoever waits looks whether it should still, besides whenever something changes."""


class DeviceTurn:
    """The turn of one worker process, shared with the processes of its engine."""

    def __init__(
        self,
        settings: Settings,
        telemetry: Telemetry | None,
        changed: Callable[[float], Awaitable[object]],
        look: Look = free_memory,
        memory_seconds: float = BACK_SECONDS,
    ) -> None:
        """Prepare; nothing is opened before the turn is wanted.

        Args:
            settings: name the directory, the devices and this holder.
            telemetry: counts what the waits took, unless this node's turn is one of several.
            changed: returns when something has changed in the worker, or after so many seconds.
            look: returns the free memory of the devices, nothing where there is no such thing.
            memory_seconds: how long to wait for memory that others gave back.
        """
        assert settings.turn_directory is not None, "checked by the settings"
        self._turn = Turn(settings.turn_directory, settings.turn_devices, settings.turn_holder)
        self._telemetry = telemetry
        self._changed = changed
        self._look = look if settings.device != "cpu" else _nothing
        self._memory_seconds = memory_seconds
        self._left: Mapping[str, Free] = {}
        self._sharing: Sharing | None = None
        self._waiting = False

    async def take(
        self, report: Callable[[Progress], None], wanted: Callable[[], bool] = lambda: True
    ) -> bool:
        """Wait for the turn; False, and nothing held, once it is not `wanted` any more.

        Raises:
            EngineError: the locks can't be used; the text says what to mount.
            TurnReplaced: not with the processes that share the turn now.
        """
        if self._turn.held:
            return True
        began = time.monotonic()
        self._waiting = True
        taking = asyncio.create_task(
            self._turn.take_async(waiting=lambda who: report(Progress(message=waits_for(who))))
        )
        had = False
        try:
            while wanted() and not had:
                await self._either(taking)
                had = taking.done() and wanted()
            if had:
                self._taken(taking, began)
                had = await self._room(report, wanted)
            return had
        except BaseException:
            had = False
            raise
        finally:
            self._waiting = False
            await _stop(taking)
            if not had:
                self.give()

    async def _either(self, taking: asyncio.Task[None]) -> None:
        """Return when the turn is had, or something has changed."""
        change = asyncio.ensure_future(self._changed(LOOK_SECONDS))
        try:
            await asyncio.wait({taking, change}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()

    def _taken(self, taking: asyncio.Task[None], began: float) -> None:
        try:
            taking.result()
            if self._sharing is None:
                self._sharing = Sharing(self._turn.fileno_list)
                os.environ.update(self._sharing.environment)
        except TurnReplaced:
            raise
        except TurnError as error:
            raise EngineError(str(error)) from error
        waited = time.monotonic() - began
        if self._telemetry is not None:
            self._telemetry.turn_seconds.observe(waited)
        logger.info("it is this worker's turn for the devices, after %.3f s", waited)

    async def _room(self, report: Callable[[Progress], None], wanted: Callable[[], bool]) -> bool:
        """Wait until who had the turn before has given its memory back; False if not `wanted` any more.

        The lock of a killed process may fall before the driver has taken its memory back.

        Raises:
            EngineError: it has not.
        """
        until, before = time.monotonic() + self._memory_seconds, await self._look()
        if not before:
            return wanted()
        while wanted():
            why = missing(before, self._left)
            if why is not None and time.monotonic() > until:
                raise EngineError(
                    f"{why}: who had the turn before gave it back, but not its memory; let it free that,"
                    " or end it"
                )
            if why is None and self._left:
                return True
            report(
                Progress(message=f"waiting for memory of the devices: {why or 'it still grows'}")
            )
            await asyncio.sleep(EVERY_SECONDS)
            now = await self._look()
            if not self._left and (not grows(now, before) or time.monotonic() > until):
                return True
            before = now
        return False

    async def give_back(self) -> None:
        """Give the turn back, and remember what the engine leaves free for its next one."""
        if self._turn.held:
            self._left = await self._look()
        self.give()

    def give(self) -> None:
        """Give the turn back: no process of the engine has memory of the devices."""
        if self._turn.held:
            logger.info("giving back the turn for the devices")
        self._turn.give()

    def leave(self) -> None:
        """Let go of the turn: it stays with those of the engine's processes that haven't ended."""
        self._left = {}
        self._turn.leave()

    def close(self) -> None:
        """Let go for good."""
        self.leave()
        if self._sharing is not None:
            for name in self._sharing.environment:
                os.environ.pop(name, None)
            self._sharing.close()
            self._sharing = None

    def view(self) -> TurnState:
        """The turn as `/v1/state` shows it."""
        state = "Held" if self._turn.held else "Waiting" if self._waiting else "Released"
        return TurnState.model_validate(
            {
                "state": state,
                "devices": self._turn.devices,
                "waiting_for": dict(self._turn.blocked_by) if state == "Waiting" else {},
            }
        )


def waits_for(who: Mapping[str, str]) -> str:
    """Say whom this worker waits for."""
    held = ", ".join(f"{device} is held by {holder}" for device, holder in who.items())
    return f"waiting for the turn: {held}"


async def _nothing() -> Mapping[str, Free]:
    return {}


async def _stop(taking: asyncio.Task[None]) -> None:
    taking.cancel()
    await asyncio.wait({taking})
    if not taking.cancelled():
        taking.exception()  # looked at: nobody else may be left to hear of it
