"""The worker's turn for its devices: had before an engine takes their memory, given back with it.

Without `--turn-devices` there is none: the devices are this engine's alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping

from rollout_common.turn import Turn, TurnError, TurnReplaced
from rollout_common.turn.device_memory import GIB, GROWS, Free, Look, free_memory, wait_for_memory
from rollout_common.turn.settings import BACK_SECONDS
from rollout_common.turn.sharing import Sharing
from rollout_common.wire import Progress, TurnState
from rollout_worker.engine import EngineError
from rollout_worker.observe.worker_telemetry import WorkerTelemetry
from rollout_worker.settings import WorkerSettings

from .settings import TURN_POLL_SECONDS

logger = logging.getLogger(__name__)

MARGIN_BYTES = 512 << 20


class DeviceTurn:
    """The turn of one worker process, shared with the processes of its engine."""

    def __init__(
        self,
        settings: WorkerSettings,
        telemetry: WorkerTelemetry | None,
        changed: Callable[[float], Awaitable[object]],
        look: Look = free_memory,
        memory_seconds: float = BACK_SECONDS,
        *,
        counts: bool = True,
    ) -> None:
        """Prepare; nothing is opened before the turn is wanted.

        Args:
            settings: name the directory, the devices and this holder.
            telemetry: of the worker, if its metrics are seen.
            changed: returns when something has changed in the worker, or after so many seconds.
            look: returns the free memory of the devices, nothing where there is no such thing.
            memory_seconds: how long to wait for memory that others gave back.
            counts: whether to count what the waits took; False where this node's turn is one of several.
        """
        assert settings.turn_directory is not None, "checked by the settings"
        self._turn = Turn(settings.turn_directory, settings.turn_devices, settings.turn_holder)
        self._telemetry = telemetry
        self._changed = changed
        self._look = look if settings.device != "cpu" else _nothing
        self._memory_seconds = memory_seconds
        self._counts = counts
        self._margin = settings.turn_margin or MARGIN_BYTES
        self._before = ""
        """Who had the devices when this worker began to wait for them."""
        self._came: Mapping[str, Free] = {}
        """What was free when this turn was had."""
        self._awake: Mapping[str, Free] = {}
        """What was free while the engine had all its memory."""
        self._needs: dict[str, int] = {}
        """What must be free for the engine to wake, in bytes."""
        self._own: dict[str, int] = {}
        """What the sleeping engine keeps, in bytes: context, graphs, buffers of NCCL."""
        self._sharing: Sharing | None = None
        self._waiting = False
        self._told_gone: str | None = None

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

        def tell(who: Mapping[str, str]) -> None:
            self._before = ", ".join(dict.fromkeys(who.values()))
            report(Progress(message=waits_for(who)))

        began = time.monotonic()
        self._waiting = True
        taking = asyncio.create_task(self._turn.take_async(waiting=tell))
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
        change = asyncio.ensure_future(self._changed(TURN_POLL_SECONDS))
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
        if self._telemetry is not None and self._counts:
            self._telemetry.turn_seconds.observe(waited)
        logger.info("it is this worker's turn for the devices, after %.3f s", waited)

    async def _room(self, report: Callable[[Progress], None], wanted: Callable[[], bool]) -> bool:
        """Wait until there is room for the engine; False if it is not `wanted` any more.

        Others may keep what they like beside it. The lock of a killed process may fall before the driver has taken its
        memory back.

        Raises:
            EngineError: there is none.
        """

        def tell(why: str, now: Mapping[str, Free]) -> None:
            self._count_residue(now)
            report(Progress(message=f"waiting for memory: {why}{self._kept(now)}"))

        seconds = self._memory_seconds
        why, self._came = await wait_for_memory(
            self._needs, seconds, look=self._look, tell=tell, wanted=wanted
        )
        self._count_residue(self._came)
        if why is not None and why != GROWS:
            raise EngineError(
                f"no room to wake: {why}{self._kept(self._came)}. Let them free it inside their turn"
                " (torch.cuda.empty_cache(), NCCL groups destroyed or suspended), or let this engine take less;"
                f" tried again, the turn was given back after {seconds:g} s"
            )
        return wanted()

    def _residue(self, now: Mapping[str, Free]) -> dict[str, int]:
        """What others keep on each device, in bytes."""
        return {
            device: max(0, each.total - each.free - self._own.get(device, 0))
            for device, each in now.items()
        }

    def _count_residue(self, now: Mapping[str, Free]) -> None:
        if self._telemetry is not None:
            for device, kept in self._residue(now).items():
                self._telemetry.turn_residue.labels(device).set(kept)

    def _kept(self, now: Mapping[str, Free]) -> str:
        """Say what others keep, and who they may be."""
        kept = max(self._residue(now).values(), default=0)
        who = f" ({self._before} had the devices before)" if self._before else ""
        return f"; other processes keep {kept / GIB:.1f} GiB{who}"

    def check_files(self) -> str | None:
        """Say what is wrong with the lock files of a turn that is had, and log it once."""
        gone = self._turn.replaced_files()
        if not gone:
            self._told_gone = None
            return None
        why = (
            f"the lock files of {', '.join(gone)} were removed while this worker has the turn, so others don't wait for"
            " it: put the worker to sleep, and find out who removes files in the lock directory"
        )
        if why != self._told_gone:
            logger.error("%s", why)
        self._told_gone = why
        return why

    async def note_use(self) -> None:
        """Note what is free while the engine has all its memory: what its sleep then frees is what it needs."""
        if self._turn.held:
            self._awake = await self._look()

    async def give_back(self) -> None:
        """Give the turn back, and remember what the engine needs for its next one."""
        if self._turn.held:
            self._note_needs(await self._look())
        self.give()

    def _note_needs(self, asleep: Mapping[str, Free]) -> None:
        for device, left in asleep.items():
            if (came := self._came.get(device)) is not None:
                kept = self._own.get(device, 0) + came.free - left.free
                self._own[device] = max(0, kept)
            if (awake := self._awake.get(device)) is not None:
                # Never more than there was beside the awake engine, or it would wait for ever.
                # Of the little that an engine leaves, a part stays as slack: memory is never free to the byte.
                slack = min(self._margin, max(0, awake.free) // 4)
                self._needs[device] = left.free - awake.free + slack
        self._came = self._awake = {}

    def give(self) -> None:
        """Give the turn back: no process of the engine has memory of the devices."""
        if self._turn.held:
            logger.info("giving back the turn for the devices")
        self._turn.give()

    def leave(self) -> None:
        """Let go of the turn: it stays with those of the engine's processes that haven't ended."""
        self._came = self._awake = {}
        self._needs, self._own = {}, {}
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
