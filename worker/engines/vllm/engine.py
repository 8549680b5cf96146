"""The adapter: `Engine` of the worker's contract on top of vLLM's `AsyncLLM`.

Everything here runs in the worker's asyncio loop; starting and stopping run in threads, so that
neither the loop nor an abort ever waits for a disk or a process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from rollout_worker.engine import (
    EngineCrashed,
    EngineDelta,
    EngineError,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Entry,
    Given,
    KvPolicy,
    Refill,
    Sink,
)
from rollout_worker.engines import EngineOptions, selfcheck
from rollout_worker.observe import processes
from rollout_worker.schemas import (
    AbortReason,
    Capabilities,
    LogprobsOf,
    MemoryTag,
    Progress,
    Resident,
    WeightsId,
)
from rollout_worker.sources.files import ReadCancelled

from . import ending, environment, launch, leftovers, settings, under_ray
from .gate import Gate
from .intake import check
from .labels import Labels
from .steering import Steering
from .traffic import Traffic
from .versions import Versions

logger = logging.getLogger(__name__)

WARM_UP_SECONDS = 600.0


@dataclass(slots=True)
class _Parts:
    """What exists once vLLM runs."""

    launched: launch.Launched
    gate: Gate
    steering: Steering
    versions: Versions
    traffic: Traffic


class VllmEngine:
    """Serves one model with vLLM."""

    def __init__(self, options: EngineOptions) -> None:
        environment.prepare_environment()
        leftovers.prepare()
        self._options = options
        self._settings = settings.parse(options.args, options.gang)
        self._parts: _Parts | None = None
        self._ended: str | None = None
        self._give_up = threading.Event()
        self._before = processes.descendants(os.getpid())
        self._standing = processes.Standing()
        self.capabilities = _capabilities(options.logprobs, seed=True, strings=True, cache=True)
        self.on_end: Callable[[str], None] = lambda why: None

    async def start(self, report: Callable[[Progress], None]) -> EngineInfo:
        """See `Engine.start`."""
        launched = await self._launch(report)
        report(Progress(message="warming up"))
        try:
            if launched.config.parallel_config.use_ray:
                launched.adopt(await under_ray.ranks(launched.llm))
            parts = await self._assemble(launched)
            await self._prove(parts, report)
        except (EngineCrashed, TimeoutError) as error:
            await asyncio.to_thread(ending.shut_down, launched)
            raise EngineError(f"vLLM started, but can't generate: {error}") from error
        except EngineError:
            await asyncio.to_thread(ending.shut_down, launched)
            raise
        self._parts = parts
        model = launched.model
        chunked = launched.config.scheduler_config.enable_chunked_prefill
        self.capabilities = _capabilities(
            self._options.logprobs,
            # A seed and a prompt taken in parts end vLLM's core on a CPU.
            seed=not (launched.cpu and chunked),
            strings=model.tokenizer is not None,
            cache=bool(launched.config.cache_config.enable_prefix_caching),
        )
        logger.info("serving %s, weights %s", self._options.model, launched.root_hash)
        return EngineInfo(
            engine="vllm",
            engine_version=launched.version,
            model=str(self._options.model),
            max_length=model.max_length,
            eos_token_ids=model.eos,
            root_hash=launched.root_hash,
            layout=launched.layout,
        )

    async def _prove(self, parts: _Parts, report: Callable[[Progress], None]) -> None:
        """Warm up, and see that updates of this model work."""
        launched, options = parts.launched, self._options
        model = launched.model
        probe = selfcheck.Probe(
            parts.traffic.generate, model.vocab_size, model.max_length, options.logprobs
        )
        async with asyncio.timeout(WARM_UP_SECONDS):
            # Long prompts vLLM has tried by itself, to see what memory they take.
            await probe.warm_up(selfcheck.PROMPT_TOKENS)
        if self._settings.self_update_check:
            key = ("vllm", launched.root_hash, options.args, options.dtype)
            await selfcheck.check_update(probe, parts.versions.reload, report, key)
        await parts.steering.reset_cache()

    async def _launch(self, report: Callable[[Progress], None]) -> launch.Launched:
        loop = asyncio.get_running_loop()

        def relay(progress: Progress) -> None:
            loop.call_soon_threadsafe(report, progress)

        def work(cancelled: Callable[[], bool]) -> launch.Launched:
            return launch.launch(self._options, self._settings, relay, cancelled)

        starting = loop.run_in_executor(None, work, self._give_up.is_set)
        try:
            return await asyncio.shield(starting)
        except ReadCancelled:
            raise EngineError("the engine was stopped while it loaded") from None
        except asyncio.CancelledError:
            self._give_up.set()
            await asyncio.to_thread(ending.end_start, self._before)
            done, _ = await asyncio.wait([starting], timeout=ending.STOP_SECONDS)
            for future in done:
                future.exception()  # looked at: a start that was given up is no unheard error
            raise

    async def _assemble(self, launched: launch.Launched) -> _Parts:
        labels, llm = Labels(), launched.llm
        await llm.engine_core.set_weight_version_async(labels.current)
        if "seed" not in self._settings.given:
            await llm.collective_rpc("rollout_seed", args=(secrets.randbits(32),))
        if launched.config.parallel_config.pipeline_parallel_size > 1:
            await llm.collective_rpc("rollout_prepare")
        # vLLM counts for each of its data-parallel ranks.
        ranks = int(launched.config.parallel_config.data_parallel_size)
        gate = Gate(int(launched.config.scheduler_config.max_num_seqs) * ranks)
        steering = Steering(launched, gate, labels)
        versions = Versions(launched, steering, labels, self._options)
        traffic = Traffic(launched, gate, steering, labels)
        return _Parts(launched, gate, steering, versions, traffic)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._give_up.set()
        self._end("the engine was stopped")
        parts, self._parts = self._parts, None
        if parts is None:
            await asyncio.to_thread(ending.end_start, self._before)
            return
        parts.traffic.end()
        parts.versions.end()
        await parts.versions.forget_spill()
        await asyncio.to_thread(ending.shut_down, parts.launched)

    def validate(self, request: EngineRequest) -> None:
        """See `Engine.validate`."""
        check(request, self._live().launched.model)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        """See `Engine.generate`."""
        self.validate(request)
        async for delta in self._live().traffic.generate(request):
            yield delta

    async def abort(self, request_ids: Collection[str] | None, reason: AbortReason) -> set[str]:
        """See `Engine.abort`."""
        return await self._live().steering.abort(request_ids, reason)

    async def hold_admission(self) -> None:
        """See `Engine.hold_admission`."""
        steering = self._live().steering
        steering.held = True
        await steering.ripen()
        await steering.take_back()

    async def pause(self) -> None:
        """See `Engine.pause`."""
        steering = self._live().steering
        await steering.ripen()
        steering.paused = True
        await steering.settle()

    async def resume(self) -> None:
        """See `Engine.resume`."""
        steering = self._live().steering
        steering.paused = steering.held = False
        await steering.settle()

    async def open_slot(
        self, entries: Sequence[Entry], *, on_disk: bool = False, given: Given | None = None
    ) -> Sink:
        """See `Engine.open_slot`."""
        return await self._live().versions.open_slot(entries, on_disk=on_disk, given=given)

    async def commit(self, identity: WeightsId, sink: Sink, kv: KvPolicy) -> None:
        """See `Engine.commit`."""
        await self._live().versions.commit(identity, sink, kv)

    async def sleep(
        self, level: Literal[1, 2], tags: Collection[MemoryTag], refill: Refill
    ) -> None:
        """See `Engine.sleep`."""
        await self._live().versions.sleep(level, tags, refill)

    async def wake(self, tags: Collection[MemoryTag], refill: Refill | None) -> None:
        """See `Engine.wake`."""
        await self._live().versions.wake(tags, refill)

    async def reset_cache(self) -> None:
        """See `Engine.reset_cache`."""
        await self._live().steering.reset_cache()

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        parts = self._parts
        if parts is None:
            return EngineStats(0, Resident(weights=False, kv_cache=False))
        running = parts.gate.inside
        return EngineStats(
            running=len(running),
            resident=parts.versions.resident(),
            running_ids=running,
        )

    def alive(self) -> str | None:
        """See `Engine.alive`."""
        parts = self._parts
        if self._ended is not None or parts is None:
            return self._ended
        if parts.launched.llm.errored or not all(p.alive() for p in parts.launched.vital):
            self._ended = "vLLM's engine core or one of its workers died"
            return self._ended
        if self._options.gang is not None and self._standing.still(parts.launched.vital):
            self._ended = "one of vLLM's processes was stopped"
            return self._ended
        since, deadline = parts.steering.idle_since(), self._settings.step_deadline_seconds
        if since is not None and (age := time.monotonic() - since) > deadline:
            return f"vLLM made no step for {age:.0f} s, the deadline is {deadline:g} s"
        return None

    def metrics(self) -> str:
        """Return vLLM's own families."""
        from .metrics import render

        return render() if self._parts is not None else ""

    def _live(self) -> _Parts:
        if self._ended is not None:
            raise EngineCrashed(self._ended)
        if self._parts is None:
            raise EngineError("the engine is not started")
        return self._parts

    def _end(self, why: str) -> None:
        self._ended = self._ended or why


def _capabilities(kind: LogprobsOf, *, seed: bool, strings: bool, cache: bool) -> Capabilities:
    return Capabilities(
        logprobs=(kind,),
        seed=seed,
        priority=True,
        stop_strings=strings,
        in_flight=("Drain", "Abort", "Keep", "Recompute"),
        sleep_levels=(1, 2),
        memory_release=True,
        prefix_cache=cache,
        cache_salt=cache,
    )
