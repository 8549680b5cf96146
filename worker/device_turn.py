"""The worker's turn for its devices: taken before an engine allocates their memory, given back with it.

Without `--turn-devices` the worker has none: only its own engine uses the devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping

from rollout_common.turn import Turn, TurnError, TurnReplaced
from rollout_common.turn.device_memory import GIB, GROWS, Free, Look, free_memory, wait_for_memory
from rollout_common.turn.settings import HOLDER_POLL_SECONDS, MEMORY_RETURN_SECONDS
from rollout_common.turn.sharing import Sharing
from rollout_common.wire import Progress, TurnState
from rollout_worker.engine import EngineError
from rollout_worker.observe.worker_telemetry import WorkerTelemetry
from rollout_worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

MARGIN_BYTES = 512 << 20
"""Left free in addition to what the engine needs: memory is never free to the byte."""


class DeviceTurn:
    """The turn of one worker process, shared with the processes of its engine."""

    def __init__(
        self,
        settings: WorkerSettings,
        telemetry: WorkerTelemetry | None,
        look: Look = free_memory,
        memory_seconds: float = MEMORY_RETURN_SECONDS,
    ) -> None:
        """`take` opens the lock files.

        `look` returns the free memory of the devices, empty if it is not known; that of an earlier holder is waited for
        as long as `memory_seconds`.
        """
        assert settings.turn_directory is not None, "checked by the settings"
        self._directory = settings.turn_directory
        self._turn = self._own = Turn(
            settings.turn_directory, settings.turn_devices, settings.turn_holder
        )
        """The turn that this worker has or waits for: its own, or one that a trainer has lent."""
        self.lender_left = asyncio.Event()
        """Set once the trainer that has lent its turn has left it to this worker."""
        self.is_lender_lost = False
        """Whether that trainer has ended without leaving it."""
        self._telemetry = telemetry
        self._look = look if settings.device != "cpu" else _look_at_nothing
        self._memory_seconds = memory_seconds
        self._margin = settings.turn_margin or MARGIN_BYTES
        self._holders_before = ""
        """The holders that this worker has waited for."""
        self._free_at_start: Mapping[str, Free] = {}
        """Free when this turn began."""
        self._free_in_use: Mapping[str, Free] = {}
        """Free while the engine had all its memory."""
        self._needs: dict[str, int] = {}
        """Bytes that must be free for the engine to wake."""
        self._kept_asleep: dict[str, int] = {}
        """Bytes that the sleeping engine keeps: context, graphs, buffers of NCCL."""
        self._sharing: Sharing | None = None
        self._waiting = False
        self._logged_problem: str | None = None

    async def take(
        self, report: Callable[[Progress], None], wanted: Callable[[], bool] = lambda: True
    ) -> bool:
        """Wait for the turn; return False, and hold nothing, once it is no longer `wanted`.

        Raises:
            EngineError: the locks can't be used; the text says what to mount.
            TurnReplaced: processes share an old lock file; they must end first.
        """
        if self.is_lent:
            return await self._await_lender(report, wanted)
        if self._turn.held:
            return True

        def report_holders(holders: Mapping[str, str]) -> None:
            self._holders_before = ", ".join(dict.fromkeys(holders.values()))
            report(Progress(message=waits_for(holders)))

        began = time.monotonic()
        self._waiting, had = True, False
        try:
            if await self._turn.take_async(waiting=report_holders, wanted=wanted):
                self._note_taken(time.monotonic() - began)
                await self._wait_for_room(report, wanted)
                had = wanted()
        except TurnReplaced:
            raise
        except TurnError as error:
            raise EngineError(str(error)) from error
        finally:
            self._waiting = False
            if not had:
                self.give()
        return had

    @property
    def is_lent(self) -> bool:
        """Whether this worker shares the turn that a trainer had first."""
        return self._turn is not self._own

    @property
    def is_in_the_way(self) -> bool:
        """Whether others wait for a lent turn whose trainer has left it."""
        if not self.is_lent or not self.lender_left.is_set() or self._own.is_locking:
            # What waits may be this worker's own thread, of an attempt that was given up.
            return False
        return self._turn.is_waited_for

    def note_lender_left(self) -> None:
        """Note that the trainer has left the turn that it has lent: it is this worker's alone."""
        self._turn.write_notes(self._own.holder)
        self.lender_left.set()

    def adopt_turn(self, files: Mapping[str, tuple[int, int]]) -> None:
        """Share the turn of the trainer's processes, which keep it until they have left it.

        Args:
            files: By device: the descriptors of its lock, which belong to this object, also after an error.

        Raises:
            TurnError: These are not the locks of all devices of this worker, or it has the turn already.
        """
        turn = Turn.adopt(self._directory, files, self._own.holder)
        if self._turn.held or turn.devices != self._own.devices:
            turn.leave()
            raise TurnError(
                "the lent turn is not for the devices of this worker, or it has its turn"
            )
        self._turn, self.lender_left, self.is_lender_lost = turn, asyncio.Event(), False
        logger.info("a trainer lends its turn for the devices")

    async def _await_lender(
        self, report: Callable[[Progress], None], wanted: Callable[[], bool]
    ) -> bool:
        """Wait until the trainer has left the turn that it has lent; return False once that isn't `wanted`."""
        report(Progress(message="waiting until the trainer that lends its turn has left it"))
        left = self.lender_left
        while wanted() and self.is_lent and not left.is_set():
            if self.is_lender_lost:
                raise EngineError(
                    "the trainer that lent its turn has ended, and the engine that shares it does not stop: delete this pod"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HOLDER_POLL_SECONDS):
                    await left.wait()
        return wanted() and left.is_set()

    def _return_lent(self) -> None:
        """Let go of a lent turn, and end it for all processes that share it once its trainer has left it."""
        if self.is_lent:
            lent, self._turn = self._turn, self._own
            if self.lender_left.is_set():
                lent.give()
            lent.leave()

    def _note_taken(self, waited: float) -> None:
        if self._sharing is None:
            self._sharing = Sharing(lambda: self._turn.fileno_list())
            os.environ.update(self._sharing.environment)
        self._observe_wait(waited)
        logger.info("it is this worker's turn for the devices, after %.3f s", waited)

    def _observe_wait(self, seconds: float) -> None:
        if self._telemetry is not None:
            self._telemetry.turn_seconds.observe(seconds)

    async def _wait_for_room(
        self, report: Callable[[Progress], None], wanted: Callable[[], bool]
    ) -> None:
        """Wait until the engine fits next to what others keep.

        The lock of a killed process may end before the driver has returned its memory.
        """

        def report_lack(why: str, now: Mapping[str, Free]) -> None:
            self._export_residue(now)
            report(Progress(message=f"waiting for memory: {why}{self._describe_residue(now)}"))

        seconds = self._memory_seconds
        why, self._free_at_start = await wait_for_memory(
            self._needs, seconds, look=self._look, tell=report_lack, wanted=wanted
        )
        self._export_residue(self._free_at_start)
        if why is not None and why != GROWS:
            raise EngineError(
                f"no room to wake: {why}{self._describe_residue(self._free_at_start)}. Let them free it inside their"
                " turn (torch.cuda.empty_cache(), NCCL groups destroyed or suspended), or let this engine take less;"
                f" tried again, the turn was given back after {seconds:g} s"
            )

    def _residue(self, now: Mapping[str, Free]) -> dict[str, int]:
        """Return the bytes that others keep on each device."""
        return {
            device: max(0, each.total - each.free - self._kept_asleep.get(device, 0))
            for device, each in now.items()
        }

    def _export_residue(self, now: Mapping[str, Free]) -> None:
        if self._telemetry is not None:
            for device, kept in self._residue(now).items():
                self._telemetry.turn_residue.labels(device).set(kept)

    def _describe_residue(self, now: Mapping[str, Free]) -> str:
        kept = max(self._residue(now).values(), default=0)
        before = self._holders_before
        suspects = f" ({before} had the devices before)" if before else ""
        return f"; other processes keep {kept / GIB:.1f} GiB{suspects}"

    def check_files(self) -> str | None:
        """Return what is wrong with the lock files of a held turn, and log it once."""
        problem = None
        if gone := self._turn.replaced_files():
            problem = (
                f"the lock files of {', '.join(gone)} were removed while this worker has the turn, so others don't"
                " wait for it: put the worker to sleep, and find out who removes files in the lock directory"
            )
            if problem != self._logged_problem:
                logger.error("%s", problem)
        self._logged_problem = problem
        return problem

    async def note_use(self) -> None:
        """Note the free memory while the engine has all of its own: its sleep then shows what it needs."""
        if self._turn.held:
            self._free_in_use = await self._look()

    async def give_back(self) -> None:
        """Give the turn back, and remember what the engine needs for its next one."""
        if self._turn.held:
            self._note_needs(await self._look())
        self.give()

    def _note_needs(self, asleep: Mapping[str, Free]) -> None:
        for device, left in asleep.items():
            if (start := self._free_at_start.get(device)) is not None:
                kept = self._kept_asleep.get(device, 0) + start.free - left.free
                self._kept_asleep[device] = max(0, kept)
            if (in_use := self._free_in_use.get(device)) is not None:
                # At most a quarter of what was free next to the awake engine: a larger
                # margin might never be free, and the engine would not wake again.
                margin = min(self._margin, max(0, in_use.free) // 4)
                self._needs[device] = left.free - in_use.free + margin
        self._free_at_start = self._free_in_use = {}

    def give(self) -> None:
        """Give the turn back unused: no process of the engine has memory of the devices."""
        if self._turn.held:
            logger.info("giving back the turn for the devices")
        self._return_lent()
        self._turn.give()

    def leave(self) -> None:
        """Let go of the turn: it stays with those of the engine's processes that haven't ended."""
        self._free_at_start = self._free_in_use = {}
        self._needs, self._kept_asleep = {}, {}
        self._return_lent()
        self._turn.leave()

    def close(self) -> None:
        """Let go for good, and stop sharing."""
        self.leave()
        if self._sharing is not None:
            for name in self._sharing.environment:
                os.environ.pop(name, None)
            self._sharing.close()
            self._sharing = None

    def view(self) -> TurnState:
        """The turn as `/v1/state` shows it."""
        held = self._turn.held
        return TurnState(
            state="Held" if held else "Waiting" if self._waiting else "Released",
            devices=self._turn.devices,
            waiting_for=dict(self._turn.blocked_by) if self._waiting and not held else {},
            lent=self.is_lent,
        )


def waits_for(holders: Mapping[str, str]) -> str:
    """Return the sentence that names the holders of the devices that are waited for."""
    held = ", ".join(f"{device} is held by {holder}" for device, holder in holders.items())
    return f"waiting for the turn: {held}"


async def _look_at_nothing() -> Mapping[str, Free]:
    return {}
