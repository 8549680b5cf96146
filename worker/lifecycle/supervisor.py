"""The engine's life inside this process: load, watch, restart with back-off, reload weights.

When an engine dies, its requests end as aborted (`engine`). Its replacement loads the last active
weights from their source before it serves anything; if it dies of that, the next one tries again. If the
source is gone, the worker serves the checkpoint, fenced by a floor until somebody commits the lost weights
or later ones.

If others use the devices by turns, an engine loads only in the worker's turn. If it dies asleep, the worker stays
Asleep without an engine until somebody wakes it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from math import inf

from rollout_common.turn import TurnReplaced
from rollout_common.wire import CHECKPOINT, Lifecycle, Progress, WeightsId
from rollout_worker.core.holds import WantedState
from rollout_worker.core.worker_runtime import WorkerRuntime
from rollout_worker.engine import (
    Engine,
    EngineCrashed,
    EngineError,
    EngineInfo,
    ProcessSpent,
    WeightsRejected,
)
from rollout_worker.gang.gang_addresses import GangBroken
from rollout_worker.requests.in_flight_requests import InFlightRequests
from rollout_worker.updates.weight_updates import WeightUpdates

from .governor import LifecycleGovernor
from .settings import (
    BACKOFF_RESET_SECONDS,
    ENGINE_CALL_SECONDS,
    ENGINE_STOP_SECONDS,
    HEARTBEAT_SLACK_SECONDS,
    RELOAD_WEIGHTS_SECONDS,
    STAGED_RELEASE_SECONDS,
    WATCH_INTERVAL_SECONDS,
)

logger = logging.getLogger(__name__)


class EngineSupervisor:
    """Keeps one engine alive."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        updates: WeightUpdates,
        flights: InFlightRequests,
        governor: LifecycleGovernor,
        create: Callable[[], Engine],
    ) -> None:
        self._runtime = runtime
        self._updates = updates
        self._flights = flights
        self._governor = governor
        self._create = create
        self._spent = False
        self._busy_until = time.monotonic() + HEARTBEAT_SLACK_SECONDS

    def health_problem(self) -> str | None:
        """Return what is wrong, or None while this supervisor makes progress."""
        late = time.monotonic() - self._busy_until
        return None if late < 0 else f"the supervisor has been stuck for {late:.0f} s"

    def _expect_progress(self, seconds: float) -> None:
        """Let `health_problem` report a problem only after this many seconds."""
        self._busy_until = time.monotonic() + seconds + HEARTBEAT_SLACK_SECONDS

    async def supervise_engine(self) -> None:
        """Supervise until cancelled, and replace an engine that fails.

        Raises:
            ProcessSpent: no engine would work in this process any more; its requests have ended.
            GangBroken: the engine failed and spans several nodes.
        """
        runtime, failures = self._runtime, 0
        delays = runtime.settings.restart_delays
        for life in itertools.count():
            if life:
                runtime.restarts += 1
                runtime.telemetry.restarts.inc()
            began = time.monotonic()
            try:
                reason = await self._run_engine_once()
            except ProcessSpent as error:
                self._spent = True
                await self._clean_up_engine(str(error))
                raise
            failures = 0 if time.monotonic() - began > BACKOFF_RESET_SECONDS else failures
            await self._clean_up_engine(reason)
            if runtime.gang is not None:
                raise GangBroken(reason)
            if await self._rest_asleep():
                continue
            delay = delays[min(failures, len(delays) - 1)]
            failures += 1
            logger.warning("restarting the engine in %g s", delay)
            self._expect_progress(delay)
            await asyncio.sleep(delay)

    async def _rest_asleep(self) -> bool:
        """Stay Asleep without an engine while all holds want that and others use the devices."""
        runtime = self._runtime
        if runtime.turn is None or not runtime.hold_target().is_all_released:
            return False
        async with runtime.exclusive:
            self._governor.note_engine_gone()
            self._report_progress(Progress(message="the engine died; it is loaded again to wake"))
            runtime.lifecycle.move_to(Lifecycle.ASLEEP)
        while runtime.hold_target().is_all_released:
            self._expect_progress(WATCH_INTERVAL_SECONDS)
            await runtime.changed.wait_for_change(WATCH_INTERVAL_SECONDS)
        return True

    async def _run_engine_once(self) -> str:
        runtime = self._runtime
        try:
            await self._load_engine()
        except ProcessSpent:
            raise
        except (EngineError, TurnReplaced) as error:
            return str(error)
        except TimeoutError:
            timeout = runtime.settings.start_timeout
            missing = None if runtime.gang is None else runtime.gang.missing_members()
            why = "" if missing is None else f": {missing}"
            return f"the engine did not load within --start-timeout {timeout:g} s{why}"
        except Exception as error:  # the process goes on, whatever the adapter raised
            logger.exception("loading the engine failed")
            return f"{type(error).__name__}: {error}"
        return await self._watch_engine()

    async def _load_engine(self) -> None:
        runtime = self._runtime
        async with runtime.exclusive:
            runtime.lifecycle.move_to(Lifecycle.LOADING)
            self._expect_progress(inf)  # however long others have the devices
            if runtime.turn is not None:
                await runtime.turn.take(self._report_progress)
            self._expect_progress(runtime.settings.start_timeout + RELOAD_WEIGHTS_SECONDS)
            with runtime.telemetry.time_transition("load"):
                await self._create_and_start()
            self._governor.note_engine_replaced()
            runtime.progress = None
            runtime.lifecycle.move_to(_FIRST_STATES[runtime.hold_target().want])

    async def _create_and_start(self) -> None:
        runtime = self._runtime
        self._report_progress(Progress(message="creating the engine"))
        died = runtime.died = asyncio.get_running_loop().create_future()

        def ended(why: str) -> None:
            if runtime.died is died:  # otherwise a newer engine runs
                runtime.report_crash(why)

        async with asyncio.timeout(runtime.settings.start_timeout):
            # In a thread: importing an engine takes seconds, and probes need answers.
            engine = runtime.engine = await asyncio.to_thread(self._create)
            engine.on_end = ended
            info = await self._start_engine(engine)
        self._check_it_sleeps(engine)
        runtime.info = info
        runtime.telemetry.export_info(
            info.engine, info.engine_version, runtime.settings.served_name
        )
        self._updates.note_loaded(info)
        await self._reload_active_weights(engine, info)

    async def _start_engine(self, engine: Engine) -> EngineInfo:
        """Start the engine; in a gang, with all members: the first that fails ends the wait."""
        runtime = self._runtime
        if runtime.gang is None:
            return await engine.start(self._report_progress)
        seconds = (
            runtime.settings.start_timeout + HEARTBEAT_SLACK_SECONDS
        )  # the outer limit ends it first
        info = await runtime.call_engine(
            engine.start(self._report_progress), seconds, "start", fatal=False
        )
        await runtime.call_engine(
            runtime.gang.wait_agreed(info.root_hash), seconds, "start", fatal=False
        )
        return info

    def _report_progress(self, progress: Progress) -> None:
        self._runtime.progress = progress

    def _check_it_sleeps(self, engine: Engine) -> None:
        able = engine.capabilities
        if self._runtime.turn is not None and not (able.memory_release and able.sleep_levels):
            raise EngineError(
                "this engine can't give its memory back, so nobody else would get a turn: leave out what keeps"
                " it from sleeping (SGLang: --enable-memory-saver), or --turn-devices"
            )

    async def _reload_active_weights(self, engine: Engine, info: EngineInfo) -> None:
        identity = self._updates.active_identity
        assert identity is not None, "an engine has loaded weights"
        if identity == CHECKPOINT:
            return
        self._report_progress(Progress(message=f"reloading weights {identity}"))
        why = await self._commit_refilled(engine, identity)
        if why is not None:
            self._runtime.last_error = f"weights {identity} could not be reloaded: {why}"
            logger.warning("%s: the worker is fenced", self._runtime.last_error)
            self._updates.fall_back_to_checkpoint(info)

    async def _commit_refilled(self, engine: Engine, identity: WeightsId) -> str | None:
        """Make these weights serve; return the reason if they are lost.

        Raises:
            EngineError: the engine failed, which proves nothing about the weights: the next engine gets them.
        """
        call = self._runtime.call_engine
        try:
            sink = await call(self._updates.refill_active(), RELOAD_WEIGHTS_SECONDS, "stage")
        except EngineCrashed:
            raise
        except EngineError as error:
            return str(error)
        try:
            await call(engine.pause(), ENGINE_CALL_SECONDS, "pause")
        except BaseException:
            await asyncio.to_thread(sink.close)
            raise
        why = None
        try:
            await call(engine.commit(identity, sink, "recompute"), ENGINE_CALL_SECONDS, "commit")
        except WeightsRejected as error:
            why = str(error)
        await call(engine.resume(), ENGINE_CALL_SECONDS, "resume")
        return why

    async def _watch_engine(self) -> str:
        runtime = self._runtime
        engine, died = runtime.engine, runtime.died
        assert engine is not None
        assert died is not None
        while True:
            self._expect_progress(WATCH_INTERVAL_SECONDS)
            await asyncio.wait({died}, timeout=WATCH_INTERVAL_SECONDS)
            if died.done():
                engine.alive()  # may log more than the report of its end
                return died.result()
            wrong = engine.alive()
            if wrong is not None:
                runtime.report_crash(wrong)
            if runtime.turn is not None and (gone := runtime.turn.check_files()) is not None:
                runtime.last_error = gone

    async def _clean_up_engine(self, reason: str) -> None:
        runtime = self._runtime
        logger.error("the engine failed: %s", reason)
        runtime.report_crash(reason)
        self._flights.fail_all()
        self._expect_progress(2 * ENGINE_STOP_SECONDS + ENGINE_CALL_SECONDS)
        async with runtime.exclusive:
            runtime.last_error, runtime.progress = reason, None
            runtime.holds.lending = False
            runtime.lifecycle.move_to(Lifecycle.FAILED)
            lost = self._release_staged()
            await asyncio.wait({lost}, timeout=STAGED_RELEASE_SECONDS)
            self._flights.fail_all()
            await self._stop_engine()
            await lost

    async def end_engine(self) -> None:
        """Free the engine for good, once nothing that is under way uses it any more."""
        runtime = self._runtime
        runtime.shutting_down = True
        runtime.report_crash("the worker has ended")  # so that no verb goes on with it
        self._flights.fail_all()
        lost: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(ENGINE_STOP_SECONDS), runtime.exclusive:
                lost = self._release_staged()
                await asyncio.wait({lost}, timeout=STAGED_RELEASE_SECONDS)
        except TimeoutError:
            logger.warning("a verb still uses the engine after %g s", ENGINE_STOP_SECONDS)
        await self._stop_engine()
        if lost is not None:
            await asyncio.wait({lost}, timeout=ENGINE_STOP_SECONDS)
            if lost.done():
                lost.result()
            else:  # a thread that reads from a hanging volume can't be ended
                logger.warning("staged weights are not given up after %g s", ENGINE_STOP_SECONDS)
        self._updates.pushes.close()
        if runtime.turn is not None and not self._spent:
            runtime.turn.close()

    def _release_staged(self) -> asyncio.Task[None]:
        """Start to free the staged bytes; the task may not end before the engine is stopped.

        The engine's processes must let go of them, and one that stands still never answers.
        """
        return asyncio.create_task(self._updates.drop_lost_engine())

    async def _stop_engine(self) -> None:
        """Stop the engine; keep the turn for its devices if this process may still have memory of them."""
        runtime = self._runtime
        engine, runtime.engine = runtime.engine, None
        stopped = engine is None or await self._try_to_stop(engine)
        if runtime.turn is not None and stopped and not self._spent:
            runtime.turn.leave()  # a process of the engine that still lives keeps the turn

    async def _try_to_stop(self, engine: Engine) -> bool:
        await asyncio.sleep(0)  # lets calls begin that were made before the stop
        try:
            async with asyncio.timeout(ENGINE_STOP_SECONDS):
                await engine.stop()
            return True
        except TimeoutError:
            logger.warning("the engine did not stop within %g s", ENGINE_STOP_SECONDS)
        except EngineError as error:
            logger.warning("the engine failed to stop: %s", error)
        except Exception:  # another engine starts, whatever the adapter raised
            logger.exception("the engine failed to stop")
        return False


_FIRST_STATES = {
    WantedState.ACTIVE: Lifecycle.ACTIVE,
    WantedState.PAUSED: Lifecycle.PAUSING,
    WantedState.ASLEEP: Lifecycle.DRAINING,
}
"""The first state of a loaded engine; the governor goes on from there."""
