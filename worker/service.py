"""One worker: its parts put together, the calls of both ports, and the shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from rollout_common.wire import AbortReason, GenerateRequest, Lifecycle, WorkerInfo, WorkerState
from rollout_common.wire.problems import ProblemError

from .core.worker_runtime import StateSequence, WorkerRuntime
from .engine import Engine, EngineError, EngineInfo, EngineMember, GangMembership, can_wake_empty
from .engines import EngineOptions, check_parsers, create_engine, create_member
from .engines.answer_parsers import ParserNames
from .engines.shared_memory.staging_budget import StagingBudget
from .lifecycle.control_verbs import ControlVerbs
from .lifecycle.governor import LifecycleGovernor
from .lifecycle.supervisor import EngineSupervisor
from .observe.worker_telemetry import resident_bytes
from .requests.admission_checks import (
    NO_PARTS,
    PreparedParts,
    check_adapter,
    check_queue_room,
    check_version,
    engine_failed_problem,
    expand_request,
    serving_refusal,
)
from .requests.http_requests import BodyLimits, data_body_limits
from .requests.in_flight_requests import InFlightRequest, InFlightRequests
from .requests.part_preparation import PartPreparation
from .settings import MEMORY_SCAN_SECONDS, WorkerSettings
from .sources.model_hub import local_model_folder
from .threads import SharedCall
from .updates.weight_commits import WeightCommits
from .updates.weight_updates import WeightUpdates

logger = logging.getLogger(__name__)


def make_engine_factory(
    settings: WorkerSettings,
    staging: StagingBudget,
    gang: GangMembership | None = None,
    *,
    guest: bool = False,
) -> Callable[[], Engine]:
    """Return a function that creates the engine that the settings name; it downloads a Hub model first.

    `staging`: the memory of staged weights is charged to it. `guest`: as `EngineOptions.guest`.
    """

    def create() -> Engine:
        options = _engine_options(settings, gang, staging, guest=guest)
        # The engine first: it sets what its library reads of the environment when it is imported.
        engine = create_engine(settings.engine, options)
        check_parsers(parser_names(settings), options.model)
        return engine

    return create


def parser_names(settings: WorkerSettings) -> ParserNames:
    """Return the parsers of answers that the settings name."""
    return ParserNames(settings.engine, settings.tool_call_parser, settings.reasoning_parser)


def make_member_factory(
    settings: WorkerSettings, gang: GangMembership, staging: StagingBudget
) -> Callable[[], EngineMember]:
    """Return a function that creates the part of the engine that runs on a member's node."""
    return lambda: create_member(settings.engine, _engine_options(settings, gang, staging))


def _engine_options(
    settings: WorkerSettings,
    gang: GangMembership | None,
    staging: StagingBudget,
    *,
    guest: bool = False,
) -> EngineOptions:
    return EngineOptions(
        model=local_model_folder(settings.model, settings.model_revision),
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


class WorkerService:
    """One worker process without its sockets."""

    def __init__(
        self,
        settings: WorkerSettings,
        make_engine: Callable[[], Engine] | None = None,
        gang: GangMembership | None = None,
    ) -> None:
        self.settings = settings
        self._grace = settings.shutdown_grace
        self.runtime = WorkerRuntime(settings, gang)
        self._memory = SharedCall(resident_bytes, "memory")
        self.flights = InFlightRequests(self.runtime)
        staging = StagingBudget(settings.staging_memory)
        self.updates = WeightUpdates(self.runtime, staging)
        self._preparation = PartPreparation(self.model_folder)
        self.commits = WeightCommits(self.runtime, self.updates, self.flights)
        self.governor = LifecycleGovernor(self.runtime, self.updates, self.flights)
        self.verbs = ControlVerbs(self.runtime, self.flights, self.governor)
        self.states = StateSequence(
            self.worker_state, self.runtime.changed, lambda: self.runtime.shutting_down
        )
        self.supervisor = EngineSupervisor(
            self.runtime,
            self.updates,
            self.flights,
            self.governor,
            make_engine or make_engine_factory(settings, staging, gang),
        )

    async def run_until_cancelled(self) -> None:
        """Supervise and govern until cancelled; a bug in either ends the process."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.supervisor.supervise_engine())
                tasks.create_task(self.governor.follow_holds())
                tasks.create_task(self.updates.pushes.restore_kept())
                if self.runtime.gang is not None:
                    tasks.create_task(self.runtime.gang.watch_members())
        finally:
            await self._preparation.stop()

    # The data port.

    async def prepare_parts(self, request: GenerateRequest) -> PreparedParts:
        """Make the parts of a request for `submit_request`, as `PartPreparation` does; 503 while none may run."""
        with self._counting_refusals():
            self._check_serving()
            engine, info = self.runtime.loaded_engine()
            return await self._preparation.prepare_parts(request, engine, info)

    def submit_request(
        self, request: GenerateRequest, parts: PreparedParts = NO_PARTS
    ) -> InFlightRequest:
        """Accept a request, or refuse it without side effects.

        `parts`: what `prepare_parts` returned for it. Never awaits: checks and registration are one step, so no commit
        can come in between.

        Raises:
            ProblemError: 4xx or 503; it names the fix.
        """
        with self._counting_refusals():
            try:
                return self._admit_request(request, parts)
            except EngineError as error:
                self.runtime.report_crash(str(error))  # before the supervisor has noticed
                raise engine_failed_problem() from error

    def _admit_request(self, request: GenerateRequest, parts: PreparedParts) -> InFlightRequest:
        self._check_serving()
        engine, info = self.runtime.loaded_engine()
        active = self.updates.active
        assert active is not None, "an engine has loaded weights"
        exact = check_version(request, active.identity)
        check_adapter(request.adapter, active, engine.capabilities)
        request_id = request.request_id or uuid.uuid4().hex
        # Before the queue's 429, after which the client would send its duplicate again.
        if request_id in self.flights:
            raise ProblemError(
                "duplicate-request",
                f"request_id {request_id!r} is already in flight: use a new one, or abort that"
                " request first",
            )
        check_queue_room(self.runtime, self.flights.waiting_count, request.sampling.n)
        requests = expand_request(request, request_id, engine, info, self.settings.logprobs, parts)
        flight = InFlightRequest(request_id, requests, exact)
        self.flights.launch_request(flight, request.deadline_seconds)
        return flight

    def body_limits(self) -> BodyLimits:
        """The largest body of a request, by the model's maximum length; raises as `model_folder` does."""
        with self._counting_refusals():
            length, engine = self.max_model_length, self.runtime.engine
            takes_pictures = engine is not None and engine.capabilities.multimodal
            return data_body_limits(length, pictures=takes_pictures)

    @property
    def max_model_length(self) -> int:
        """The maximum length of the loaded model; raises as `model_folder` does."""
        return self._loaded_info().max_length

    def check_serving(self) -> None:
        """Refuse requests while none may run.

        Raises:
            ProblemError: 503; it names the reason.
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
        refusal = self._serving_refusal()
        if refusal is not None:
            raise refusal

    def _serving_refusal(self) -> ProblemError | None:
        return serving_refusal(self.runtime, self.updates.active_identity, self.updates.fence.floor)

    def readiness_problem(self) -> ProblemError | None:
        """Why no requests may be sent here; None if they may."""
        if self.runtime.shutting_down:
            return ProblemError("shutting-down", "the worker is shutting down", retry_after=1)
        return self._serving_refusal()

    def model_folder(self) -> Path:
        """The folder of the loaded model.

        Raises:
            ProblemError: None is loaded yet.
        """
        return Path(self._loaded_info().model)

    def _loaded_info(self) -> EngineInfo:
        if self.runtime.info is None:
            raise _starting_problem()
        return self.runtime.info

    def worker_info(self, *, chat: bool, tool_parser: str | None) -> WorkerInfo:
        """The served model; `chat` and `tool_parser` say what the OpenAI routes support. Raises as `model_folder` does."""
        info, engine = self._loaded_info(), self.runtime.engine
        if engine is None:
            raise _starting_problem()
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

    async def update_measurements(self) -> None:
        """Measure what takes too long for `render_metrics`."""
        with contextlib.suppress(TimeoutError):
            self.runtime.telemetry.memory.set(await self._memory.get_result(MEMORY_SCAN_SECONDS))

    def render_metrics(self) -> bytes:
        """The metrics page that Prometheus scrapes."""
        runtime = self.runtime
        engine = runtime.engine if runtime.lifecycle.has_engine else None
        return runtime.telemetry.render_page("" if engine is None else engine.metrics())

    # The control port.

    def worker_state(self, caller: str = "") -> WorkerState:
        """Everything an operator or a trainer needs to know about this worker."""
        runtime, now = self.runtime, time.monotonic()
        stats = runtime.engine_stats()
        engine = runtime.engine if runtime.info is not None else None  # capabilities are final then
        state = WorkerState(
            boot_id=runtime.boot_id,
            engine=self.settings.engine,
            lifecycle=runtime.lifecycle.current_state,
            serving=self.readiness_problem() is None,
            weights=self.updates.to_view(),
            resident=stats.resident,
            holds=runtime.holds.list_holds(now),
            caller=caller,
            generation=runtime.generation,
            drain_seconds=runtime.drain_seconds,
            in_flight=stats.running,
            queued=self.flights.waiting_count,
            restarts=runtime.restarts,
            last_error=runtime.last_error,
            progress=runtime.progress,
            turn=None if runtime.turn is None else runtime.turn.view(),
            in_flight_policies=engine.capabilities.in_flight if engine else (),
            wakes_empty=engine is not None and can_wake_empty(engine),
        )
        return self.states.number_state(state)

    # Shutdown.

    def hurry_shutdown(self) -> None:
        """Let a shutdown wait for no requests."""
        self._grace = self.runtime.drain_seconds = 0.0

    async def shut_down(self) -> None:
        """Keep serving for a grace period while not ready, then drain, then abort the rest."""
        runtime, grace = self.runtime, self._grace
        runtime.shutting_down = True
        runtime.changed.notify_all()
        logger.info("shutting down: no longer ready, still serving for %g s", grace)
        await asyncio.sleep(grace)
        runtime.admitting = False
        until = time.monotonic() + runtime.drain_seconds
        with contextlib.suppress(ProblemError):
            if not runtime.lifecycle.has_engine:
                return
            # Let a running commit finish first: half a commit serves nobody.
            async with runtime.exclusive_within(runtime.drain_seconds):
                frozen = self.governor.is_frozen
                if runtime.lifecycle.current_state in (Lifecycle.ACTIVE, Lifecycle.PAUSED):
                    runtime.lifecycle.move_to(Lifecycle.DRAINING)
                while len(self.flights) and not frozen and time.monotonic() < until:
                    await runtime.changed.wait_for_change(until - time.monotonic())
        if len(self.flights):
            logger.info("the drain is over: aborting %d requests", len(self.flights))
            await self.flights.abort_all(AbortReason.CONTROL)


def _starting_problem() -> ProblemError:
    return ProblemError("starting", "the engine has not loaded yet: try again", retry_after=2)
