"""The engine's life inside this process: load, watch, restart with back-off, reload weights; whole.

When an engine dies, its requests end as aborted (`engine`). Its replacement loads the last active
weights from their source before it serves anything; if it dies of that, the next one does. If that
source is gone, the worker comes up with the checkpoint, fenced by a floor until someone commits the
lost weights or later ones.

Where others use the devices by turns, no engine loads before it is the worker's turn, and none that is to be
asleep: then the worker stays Asleep without one until somebody wakes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from math import inf

from rollout_worker.core.holds import Want
from rollout_worker.core.runtime import Runtime
from rollout_worker.engine import (
    Engine,
    EngineCrashed,
    EngineError,
    EngineInfo,
    ProcessSpent,
    WeightsRejected,
)
from rollout_worker.gang.places import GangBroken
from rollout_worker.requests.flights import Flights
from rollout_worker.schemas import CHECKPOINT, Lifecycle, Progress, WeightsId
from rollout_worker.turn import TurnReplaced
from rollout_worker.updates.state import Updates

from .governor import Governor
from .turning import check_it_sleeps

logger = logging.getLogger(__name__)

HEALTHY_SECONDS = 600.0
"""An engine that lives this long resets the back-off."""
WATCH_SECONDS = 0.5
STOP_SECONDS = 30.0
LET_GO_SECONDS = 1.0
"""How long the processes of an engine that is to end get to let go of staged bytes before it does."""
HEARTBEAT_SECONDS = 30.0
SEED_SECONDS = 1800.0
CALL_SECONDS = 600.0


class Supervisor:
    """Keeps one engine alive."""

    def __init__(
        self,
        runtime: Runtime,
        updates: Updates,
        flights: Flights,
        governor: Governor,
        create: Callable[[], Engine],
    ) -> None:
        self._runtime = runtime
        self._updates = updates
        self._flights = flights
        self._governor = governor
        self._create = create
        self._spent = False
        self._busy_until = time.monotonic() + HEARTBEAT_SECONDS

    def health(self) -> str | None:
        """None while this supervisor makes progress, else what is wrong."""
        late = time.monotonic() - self._busy_until
        return None if late < 0 else f"the supervisor has been stuck for {late:.0f} s"

    def _expect(self, seconds: float) -> None:
        """Promise progress within this many seconds."""
        self._busy_until = time.monotonic() + seconds + HEARTBEAT_SECONDS

    async def run(self) -> None:
        """Supervise until cancelled; no failure of an engine ends it but one.

        Raises:
            ProcessSpent: no engine would work in this process any more; its requests have ended.
            GangBroken: the engine failed and spans several nodes.
        """
        runtime, failures, first = self._runtime, 0, True
        delays = runtime.settings.restart_delays
        while True:
            if not first:
                runtime.restarts += 1
                runtime.telemetry.restarts.inc()
            first = False
            began = time.monotonic()
            try:
                reason = await self._live_once()
            except ProcessSpent as error:
                self._spent = True
                await self._bury(str(error))
                raise
            failures = 0 if time.monotonic() - began > HEALTHY_SECONDS else failures
            await self._bury(reason)
            if runtime.gang is not None:
                raise GangBroken(reason)
            if await self._rest():
                continue
            delay = delays[min(failures, len(delays) - 1)]
            failures += 1
            logger.warning("restarting the engine in %g s", delay)
            self._expect(delay)
            await asyncio.sleep(delay)

    async def _rest(self) -> bool:
        """Stay asleep without an engine, if it should be asleep and others may have the devices."""
        runtime = self._runtime
        if runtime.turn is None or not runtime.target().all_released:
            return False
        async with runtime.exclusive:
            self._governor.engine_gone()
            self._report(Progress(message="the engine died; it is loaded again to wake"))
            runtime.lifecycle.move(Lifecycle.ASLEEP)
        while runtime.target().all_released:
            self._expect(WATCH_SECONDS)
            await runtime.changed.wait(WATCH_SECONDS)
        return True

    async def _live_once(self) -> str:
        """Load an engine and watch it; return why it ended."""
        runtime = self._runtime
        try:
            await self._load()
        except ProcessSpent:
            raise
        except (EngineError, TurnReplaced) as error:
            return str(error)
        except TimeoutError:
            timeout = runtime.settings.start_timeout
            missing = None if runtime.gang is None else runtime.gang.missing()
            why = "" if missing is None else f": {missing}"
            return f"the engine did not load within --start-timeout {timeout:g} s{why}"
        except Exception as error:  # top loop: whatever the adapter raised, the process goes on
            logger.exception("loading the engine failed")
            return f"{type(error).__name__}: {error}"
        return await self._watch()

    async def _load(self) -> None:
        runtime = self._runtime
        async with runtime.exclusive:
            runtime.lifecycle.move(Lifecycle.LOADING)
            self._expect(inf)  # however long others have the devices
            if runtime.turn is not None:
                await runtime.turn.take(self._report)
            self._expect(runtime.settings.start_timeout + SEED_SECONDS)
            with runtime.telemetry.transition("load"):
                await self._create_and_start()
            self._governor.engine_replaced()
            runtime.progress = None
            runtime.lifecycle.move(_FIRST[runtime.target().want])

    async def _create_and_start(self) -> None:
        runtime = self._runtime
        self._report(Progress(message="creating the engine"))
        died = runtime.died = asyncio.get_running_loop().create_future()

        def ended(why: str) -> None:
            if runtime.died is died:  # else another engine has taken its place
                runtime.crashed(why)

        async with asyncio.timeout(runtime.settings.start_timeout):
            # In a thread: importing an engine takes seconds, and probes need answers.
            engine = runtime.engine = await asyncio.to_thread(self._create)
            engine.on_end = ended
            info = await self._start(engine)
        check_it_sleeps(runtime, engine)
        runtime.info = info
        runtime.telemetry.info(info.engine, info.engine_version, runtime.settings.served_name)
        self._updates.loaded(info)
        await self._seed(engine, info)

    async def _start(self, engine: Engine) -> EngineInfo:
        """Start it; in a gang, with all others, of which one that fails ends the wait."""
        runtime = self._runtime
        if runtime.gang is None:
            return await engine.start(self._report)
        seconds = runtime.settings.start_timeout + HEARTBEAT_SECONDS  # which ends it first
        info = await runtime.call(engine.start(self._report), seconds, "start", fatal=False)
        await runtime.call(runtime.gang.agree(info.root_hash), seconds, "start", fatal=False)
        return info

    def _report(self, progress: Progress) -> None:
        self._runtime.progress = progress

    async def _seed(self, engine: Engine, info: EngineInfo) -> None:
        """Load the last active weights into a new engine."""
        identity = self._updates.identity
        assert identity is not None, "an engine has loaded weights"
        if identity == CHECKPOINT:
            return
        self._report(Progress(message=f"reloading weights {identity}"))
        why = await self._bring(engine, identity)
        if why is not None:
            self._runtime.last_error = f"weights {identity} could not be reloaded: {why}"
            logger.warning("%s: the worker is fenced", self._runtime.last_error)
            self._updates.lost(info)

    async def _bring(self, engine: Engine, identity: WeightsId) -> str | None:
        """Make these weights serve; return why they can't be had any more, if so.

        Raises:
            EngineError: the engine is of no use, which says nothing of the weights: the next one
                is given the same.
        """
        call = self._runtime.call
        try:
            sink = await call(self._updates.refill(), SEED_SECONDS, "stage")
        except EngineCrashed:
            raise
        except EngineError as error:
            return str(error)
        try:
            await call(engine.pause(), CALL_SECONDS, "pause")
        except BaseException:
            await asyncio.to_thread(sink.close)
            raise
        why = None
        try:
            await call(engine.commit(identity, sink, "recompute"), CALL_SECONDS, "commit")
        except WeightsRejected as error:
            why = str(error)
        await call(engine.resume(), CALL_SECONDS, "resume")
        return why

    async def _watch(self) -> str:
        runtime = self._runtime
        engine, died = runtime.engine, runtime.died
        assert engine is not None
        assert died is not None
        while True:
            self._expect(WATCH_SECONDS)
            await asyncio.wait({died}, timeout=WATCH_SECONDS)
            if died.done():
                engine.alive()  # it may know more than who saw its end
                return died.result()
            wrong = engine.alive()
            if wrong is not None:
                runtime.crashed(wrong)
            if runtime.turn is not None and (gone := runtime.turn.check_files()) is not None:
                runtime.last_error = gone

    async def _bury(self, reason: str) -> None:
        """End the dead engine's requests and free its resources."""
        runtime = self._runtime
        logger.error("the engine failed: %s", reason)
        runtime.crashed(reason)
        self._flights.fail()
        self._expect(2 * STOP_SECONDS + CALL_SECONDS)
        async with runtime.exclusive:
            runtime.last_error, runtime.progress = reason, None
            runtime.lifecycle.move(Lifecycle.FAILED)
            lost = self._let_go()
            await asyncio.wait({lost}, timeout=LET_GO_SECONDS)
            self._flights.fail()
            await self._stop_engine()
            await lost

    async def end(self) -> None:
        """Free the engine for good, once nothing that is under way uses it any more."""
        runtime = self._runtime
        runtime.shutting_down = True
        runtime.crashed("the worker has ended")  # so no verb goes on with it
        self._flights.fail()
        lost: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(STOP_SECONDS), runtime.exclusive:
                lost = self._let_go()
                await asyncio.wait({lost}, timeout=LET_GO_SECONDS)
        except TimeoutError:
            logger.warning("a verb still uses the engine after %g s", STOP_SECONDS)
        await self._stop_engine()
        if lost is not None:
            await asyncio.wait({lost}, timeout=STOP_SECONDS)
            if lost.done():
                lost.result()
            else:  # a thread that reads a volume which does not answer can't be ended
                logger.warning("staged weights are not given up after %g s", STOP_SECONDS)
        self._updates.pushes.close()
        if runtime.turn is not None and not self._spent:
            runtime.turn.close()

    def _let_go(self) -> asyncio.Task[None]:
        """Give the staged bytes up; returns what ends once they are, which may take until the engine is stopped.

        Its processes are told, and one that stands still never answers.
        """
        return asyncio.create_task(self._updates.engine_lost())

    async def _stop_engine(self) -> None:
        """Stop the engine; give up on it after `STOP_SECONDS`.

        The turn for its devices stays if there may be memory of them in this process, until it ends.
        """
        runtime = self._runtime
        engine, runtime.engine = runtime.engine, None
        stopped = engine is None or await self._stopped(engine)
        if runtime.turn is not None and stopped and not self._spent:
            runtime.turn.leave()  # one of its processes that lives against all odds keeps the turn

    async def _stopped(self, engine: Engine) -> bool:
        await asyncio.sleep(0)  # calls that were made before this moment begin before it stops
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await engine.stop()
            return True
        except TimeoutError:
            logger.warning("the engine did not stop within %g s", STOP_SECONDS)
        except EngineError as error:
            logger.warning("the engine failed to stop: %s", error)
        except Exception:  # whatever the adapter raised, another engine is started
            logger.exception("the engine failed to stop")
        return False


_FIRST = {
    Want.ACTIVE: Lifecycle.ACTIVE,
    Want.PAUSED: Lifecycle.PAUSING,
    Want.ASLEEP: Lifecycle.DRAINING,
}
"""Where a loaded engine goes first; the governor does the rest."""
