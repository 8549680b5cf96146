"""One worker: assembles its parts, offers what both ports call, and shuts down in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from .core.runtime import Runtime
from .engine import Engine, EngineError, Gang, Member
from .engines import EngineOptions, create, create_member
from .engines.shared_memory.staging import Staging
from .lifecycle.governor import Governor
from .lifecycle.supervisor import Supervisor
from .lifecycle.verbs import Verbs, wakes_empty
from .observe.telemetry import resident_bytes
from .requests.admission import check_room, check_version, engine_failed, expand, not_serving
from .requests.flights import Flight, Flights
from .schemas import (
    AbortReason,
    GenerateRequest,
    Lifecycle,
    WorkerInfo,
    WorkerState,
)
from .settings import Settings
from .sources.hub import local_model
from .threads import Shared
from .updates.commits import Commits
from .updates.state import Updates
from .wire.bodies import Limits, data_limits
from .wire.problems import ProblemError

logger = logging.getLogger(__name__)

MEASURE_SECONDS = 5.0
"""How long a scrape waits for the memory to be counted; then it gets what was counted last."""


def engine_factory(
    settings: Settings, staging: Staging, gang: Gang | None = None, *, guest: bool = False
) -> Callable[[], Engine]:
    """How to create the engine that the settings name, downloading a Hub model first.

    `staging`: what its memory of staged weights is charged to. `guest`: as `EngineOptions.guest`.
    """
    return lambda: create(settings.engine, _options(settings, gang, staging, guest=guest))


def member_factory(settings: Settings, gang: Gang, staging: Staging) -> Callable[[], Member]:
    """The same for the part of the engine that runs on a node beside the head's."""
    return lambda: create_member(settings.engine, _options(settings, gang, staging))


def _options(
    settings: Settings, gang: Gang | None, staging: Staging, *, guest: bool = False
) -> EngineOptions:
    return EngineOptions(
        model=local_model(settings.model, settings.model_revision),
        dtype=settings.dtype,
        max_length=settings.max_length,
        device=settings.device,
        max_batch_tokens=settings.max_batch_tokens,
        logprobs=settings.logprobs,
        args=settings.engine_arg,
        gang=gang,
        staging=staging,
        guest=guest,
        **({} if settings.spill_dir is None else {"spill_dir": settings.spill_dir}),
    )


class Worker:
    """One worker process without its sockets."""

    def __init__(
        self,
        settings: Settings,
        make_engine: Callable[[], Engine] | None = None,
        gang: Gang | None = None,
    ) -> None:
        self.settings = settings
        self._grace = settings.shutdown_grace
        self.runtime = Runtime(settings, gang)
        self._memory = Shared(resident_bytes, "memory")
        self.flights = Flights(self.runtime)
        staging = Staging(settings.staging_memory)
        self.updates = Updates(self.runtime, staging)
        self.commits = Commits(self.runtime, self.updates, self.flights)
        self.governor = Governor(self.runtime, self.updates, self.flights)
        self.verbs = Verbs(self.runtime, self.flights, self.governor)
        self.supervisor = Supervisor(
            self.runtime,
            self.updates,
            self.flights,
            self.governor,
            make_engine or engine_factory(settings, staging, gang),
        )

    async def run(self) -> None:
        """Supervise and govern until cancelled; a bug in either ends the process."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.supervisor.run())
            tasks.create_task(self.governor.run())
            if self.runtime.gang is not None:
                tasks.create_task(self.runtime.gang.run())

    # The data port.

    def submit(self, request: GenerateRequest) -> Flight:
        """Accept a request, or refuse it without side effects.

        Never awaits: checks and registration are one step, so no commit can come in between.

        Raises:
            ProblemError: 4xx or 503, which names the fix.
        """
        with self._counting_refusals():
            try:
                return self._submit(request)
            except EngineError as error:
                self.runtime.crashed(str(error))  # the supervisor has not looked since it died
                raise engine_failed() from error

    def _submit(self, request: GenerateRequest) -> Flight:
        self._check_serving()
        engine, info = self.runtime.loaded()
        active = self.updates.identity
        assert active is not None, "an engine has loaded weights"
        exact = check_version(request, active)
        request_id = request.request_id or uuid.uuid4().hex
        # Before the queue's 429, after which the client would retry its duplicate.
        if request_id in self.flights:
            raise ProblemError(
                "duplicate-request",
                f"request_id {request_id!r} is already in flight: use a new one, or abort that"
                " request first",
            )
        check_room(self.runtime, self.flights.waiting, request.sampling.n)
        requests = expand(request, request_id, engine, info, self.settings.logprobs)
        flight = Flight(request_id, requests, exact)
        self.flights.launch(flight, request.deadline_seconds)
        return flight

    def body_limits(self) -> Limits:
        """What a request's body may hold, which follows from the model's maximum length.

        Raises:
            ProblemError: nothing is loaded yet.
        """
        with self._counting_refusals():
            return data_limits(self.max_length)

    @property
    def max_length(self) -> int:
        """The model's maximum length.

        Raises:
            ProblemError: nothing is loaded yet.
        """
        if self.runtime.info is None:
            raise _starting()
        return self.runtime.info.max_length

    def check_serving(self) -> None:
        """Refuse requests while none may run.

        Raises:
            ProblemError: 503, which says why.
        """
        with self._counting_refusals():
            self._check_serving()

    @contextlib.contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except ProblemError as refusal:
            self.count_refusal(refusal.slug)
            raise

    def count_refusal(self, slug: str) -> None:
        """Count a request that was refused with this problem."""
        self.runtime.telemetry.refused.labels(slug).inc()

    def _check_serving(self) -> None:
        refusal = not_serving(self.runtime, self.updates.identity, self.updates.fence.floor)
        if refusal is not None:
            raise refusal

    def readiness(self) -> ProblemError | None:
        """None if requests may be sent here, else why not."""
        if self.runtime.shutting_down:
            return ProblemError("shutting-down", "the worker is shutting down", retry_after=1)
        return not_serving(self.runtime, self.updates.identity, self.updates.fence.floor)

    def model_folder(self) -> Path:
        """The folder of the model that the engine has loaded.

        Raises:
            ProblemError: nothing is loaded yet.
        """
        if self.runtime.info is None:
            raise _starting()
        return Path(self.runtime.info.model)

    def info(self, *, chat: bool, tool_parser: str | None) -> WorkerInfo:
        """What is served; `chat` and `tool_parser` say what the OpenAI routes support.

        Raises:
            ProblemError: nothing is loaded yet.
        """
        if self.runtime.info is None or self.runtime.engine is None:
            raise _starting()
        engine, info = self.runtime.engine, self.runtime.info
        kinds = sorted(engine.capabilities.logprobs, key=self.settings.logprobs.__ne__)
        return WorkerInfo(
            engine=info.engine,
            engine_version=info.engine_version,
            model=self.settings.served_name,
            max_length=info.max_length,
            eos_token_ids=tuple(sorted(info.eos_token_ids)),
            capabilities=engine.capabilities.model_copy(
                update={"chat": chat, "tool_parser": tool_parser, "logprobs": tuple(kinds)}
            ),
        )

    async def measure(self) -> None:
        """Bring up to date what takes too long to be counted in `metrics`."""
        with contextlib.suppress(TimeoutError):
            self.runtime.telemetry.memory.set(await self._memory.get(MEASURE_SECONDS))

    def metrics(self) -> bytes:
        """The metrics page that Prometheus scrapes."""
        runtime = self.runtime
        own = runtime.engine is not None and runtime.lifecycle.has_engine
        return runtime.telemetry.page(runtime.engine.metrics() if own and runtime.engine else "")

    # The control port.

    def state(self, caller: str = "") -> WorkerState:
        """Everything an operator or a trainer needs to know about this worker."""
        runtime, now = self.runtime, time.monotonic()
        stats = runtime.stats()
        engine = runtime.engine if runtime.info is not None else None  # it knows itself by then
        return WorkerState(
            boot_id=runtime.boot_id,
            engine=self.settings.engine,
            lifecycle=runtime.lifecycle.state,
            serving=self.readiness() is None,
            weights=self.updates.view(),
            resident=stats.resident,
            holds=runtime.holds.listing(now),
            caller=caller,
            generation=runtime.generation,
            drain_seconds=runtime.drain_seconds,
            in_flight=stats.running,
            queued=self.flights.waiting,
            restarts=runtime.restarts,
            last_error=runtime.last_error,
            progress=runtime.progress,
            turn=None if runtime.turn is None else runtime.turn.view(),
            in_flight_policies=engine.capabilities.in_flight if engine else (),
            wakes_empty=engine is not None and wakes_empty(engine),
        )

    # Shutdown.

    def hurry(self) -> None:
        """Let a shutdown wait for nobody."""
        self._grace = self.runtime.drain_seconds = 0.0

    async def shut_down(self) -> None:
        """Keep serving for a grace period while not ready, then drain, then abort the rest."""
        runtime, grace = self.runtime, self._grace
        runtime.shutting_down = True
        runtime.changed.fire()
        logger.info("shutting down: no longer ready, still serving for %g s", grace)
        await asyncio.sleep(grace)
        runtime.admitting = False
        until = time.monotonic() + runtime.drain_seconds
        with contextlib.suppress(ProblemError):
            if not runtime.lifecycle.has_engine:
                return
            # Let a running commit finish first: half a commit is of no use.
            async with runtime.alone(runtime.drain_seconds):
                frozen = runtime.lifecycle.state is not Lifecycle.ACTIVE
                if runtime.lifecycle.state in (Lifecycle.ACTIVE, Lifecycle.PAUSED):
                    runtime.lifecycle.move(Lifecycle.DRAINING)
                while len(self.flights) and not frozen and time.monotonic() < until:
                    await runtime.changed.wait(until - time.monotonic())
        if len(self.flights):
            logger.info("the drain is over: aborting %d requests", len(self.flights))
            await self.flights.abort_all(AbortReason.CONTROL)


def _starting() -> ProblemError:
    return ProblemError("starting", "the engine has not loaded yet: try again", retry_after=2)
