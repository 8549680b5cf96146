"""The adapter: `Engine` of the worker's contract on top of vLLM's `AsyncLLM`.

Everything here runs in the worker's asyncio loop, except starting and stopping, which run in threads:
neither the loop nor an abort ever waits for a disk or a process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from typing_extensions import override

from rollout_common.wire import MAX_TOP_LOGPROBS, AbortReason, Capabilities, Progress
from rollout_worker.engine import EngineCrashed, EngineDelta, EngineError, EngineInfo, EngineRequest
from rollout_worker.engines import selfcheck
from rollout_worker.engines.adapter import EngineAdapter
from rollout_worker.engines.options import EngineOptions
from rollout_worker.engines.vllm.ranks.draw_masks import can_record_masks
from rollout_worker.observe.processes import StandstillDetector, find_descendants
from rollout_worker.pictures.picture import Picture

from . import launch, settings, shutdown
from .intake import check_request
from .steering import SchedulerControl, VllmRequests
from .under_ray import find_rank_processes
from .vllm_streams import WeightLabels
from .vllm_versions import VllmAdapters, VllmVersions

logger = logging.getLogger(__name__)

METRIC_PREFIX = "vllm:"


@dataclass(slots=True)
class _VllmParts:
    """What exists once vLLM runs."""

    launched: launch.LaunchedVllm
    steering: SchedulerControl
    versions: VllmVersions
    traffic: VllmRequests
    adapters: VllmAdapters
    pinned: frozenset[str] = frozenset()

    @property
    def running(self) -> frozenset[str]:
        """Ids of the requests that vLLM has."""
        return self.steering.running


class VllmEngine(EngineAdapter[_VllmParts]):
    """Serves one model with vLLM."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        launch.prepare_environment()
        shutdown.prepare_folder()
        self._settings = settings.parse_flags(options.args, options.gang)
        self._before = find_descendants(os.getpid())
        self._standing = StandstillDetector()
        self.capabilities = Capabilities(
            logprobs=(options.logprobs,),
            prompt_logprobs=True,
            top_logprobs=MAX_TOP_LOGPROBS,
            structured=True,
            return_sampling_mask=True,
            seed=True,
            priority=True,
            stop_strings=True,
            in_flight=("Drain", "Abort", "Keep", "Recompute"),
            # A request inside vLLM keeps the adapter that it came with.
            adapters_in_flight=("Drain", "Abort"),
            sleep_levels=(1, 2),
            memory_release=True,
            prefix_cache=True,
            cache_salt=True,
        )

    @override
    async def start(self, report: Callable[[Progress], None]) -> EngineInfo:
        import vllm

        launched = await shutdown.start_in_thread(
            partial(launch.launch_vllm, self._options, self._settings),
            report,
            self._give_up,
            self._before,
        )
        report(Progress(message="warming up"))
        try:
            if launched.config.parallel_config.use_ray:
                ranks = await find_rank_processes(launched.llm)
                launched.processes |= ranks
                launched.segments |= shutdown.find_shared_memory(ranks)
                launched.vital |= ranks
            parts = await self._assemble_parts(launched)
            await self._warm_up_and_check(parts, report)
        except (EngineError, TimeoutError) as error:
            await asyncio.to_thread(shutdown.shut_down_vllm, launched)
            if isinstance(error, EngineCrashed | TimeoutError):
                raise EngineError(f"vLLM started, but can't generate: {error}") from error
            raise
        await self._freeze_heap()
        self._parts = parts
        model = launched.model
        chunked = launched.config.scheduler_config.enable_chunked_prefill
        cache = bool(launched.config.cache_config.enable_prefix_caching)
        known = {
            # A seed and a prompt taken in parts end vLLM's core on a CPU.
            "seed": not (launched.cpu and chunked),
            "top_logprobs": launch.most_top_logprobs(launched.config),
            "stop_strings": model.tokenizer is not None,
            "structured": launch.can_mask_tokens(model.tokenizer, model.eos_token_ids),
            "return_sampling_mask": can_record_masks(launched.config),
            "multimodal": model.pictures is not None,
            "prefix_cache": cache,
            "cache_salt": cache,
            "adapters": launched.config.lora_config is not None,
        }
        self.capabilities = self.capabilities.model_copy(update=known)
        logger.info("serving %s, weights %s", self._options.model, launched.root_hash)
        version = str(vllm.__version__)
        return self._engine_info("vllm", version, model, launched.root_hash, launched.layout)

    async def _warm_up_and_check(
        self, parts: _VllmParts, report: Callable[[Progress], None]
    ) -> None:
        """Warm up, and check that updates of this model work."""
        launched, options = parts.launched, self._options
        model = launched.model
        probe = selfcheck.UpdateProbe(
            parts.traffic.generate,
            model.vocab_size,
            model.max_length,
            options.logprobs,
            model.pictures,
        )
        async with asyncio.timeout(settings.WARM_UP_TIMEOUT_SECONDS):
            # A long prompt vLLM has tried itself, to measure what memory it takes.
            await probe.warm_up(selfcheck.PROMPT_TOKENS)
        if self._settings.self_update_check:
            key = ("vllm", launched.root_hash, options.args, options.dtype)
            await selfcheck.check_update(probe, parts.versions.reload_checkpoint, report, key)
        await parts.steering.reset_cache()

    async def _assemble_parts(self, launched: launch.LaunchedVllm) -> _VllmParts:
        labels, llm = WeightLabels(), launched.llm
        await llm.engine_core.set_weight_version_async(labels.current)
        seed = None if "seed" in self._settings.given else secrets.randbits(32)
        await llm.collective_rpc("rollout_prepare", args=(seed,))
        # vLLM counts for each of its data-parallel ranks.
        ranks = int(launched.config.parallel_config.data_parallel_size)
        limit = int(launched.config.scheduler_config.max_num_seqs) * ranks
        steering = SchedulerControl(launched, limit, labels)
        adapters = VllmAdapters(llm, self._options.spill_dir)
        versions = VllmVersions(launched, steering, labels, self._options, adapters)
        traffic = VllmRequests(launched, steering, labels, adapters)
        return _VllmParts(launched, steering, versions, traffic, adapters)

    @override
    async def stop(self) -> None:
        self._give_up.set()
        self._ended = self._ended or "the engine was stopped"
        parts, self._parts = self._parts, None
        if parts is None:
            await asyncio.to_thread(shutdown.end_started_processes, self._before)
            return
        parts.traffic.stop_waiting()
        parts.versions.stop_calling_ranks()
        await parts.versions.close_spill()
        await asyncio.to_thread(shutdown.shut_down_vllm, parts.launched)
        await asyncio.to_thread(parts.adapters.delete_files)
        gc.unfreeze()  # what is left of this engine is collected when the next one has started

    @override
    def validate(self, request: EngineRequest) -> None:
        check_request(request, self._require_parts().launched.model)

    @override
    async def prepare_pictures(self, pictures: Sequence[Picture]) -> None:
        taken = self._require_parts().traffic.pictures
        if taken is not None:
            await asyncio.to_thread(taken.prepare_pictures, pictures)

    @override
    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        async for delta in self._require_parts().traffic.generate(request):
            yield delta

    @override
    async def abort(self, request_ids: Collection[str] | None, reason: AbortReason) -> set[str]:
        return await self._require_parts().steering.abort_requests(request_ids, reason)

    @override
    async def hold_admission(self) -> None:
        steering = self._require_parts().steering
        steering.admission_held = True
        await steering.wait_for_first_tokens()
        await steering.requeue_unstarted()

    @override
    async def pause(self) -> None:
        steering = self._require_parts().steering
        await steering.wait_for_first_tokens()
        steering.paused = True
        await steering.sync_scheduler()

    @override
    async def resume(self) -> None:
        steering = self._require_parts().steering
        steering.paused = steering.admission_held = False
        await steering.sync_scheduler()

    @override
    async def reset_cache(self) -> None:
        await self._require_parts().steering.reset_cache()

    @override
    def alive(self) -> str | None:
        parts = self._parts
        if self._ended is not None or parts is None:
            return self._ended
        if parts.launched.llm.errored or not all(p.is_alive() for p in parts.launched.vital):
            self._ended = "vLLM's engine core or one of its workers died"
            return self._ended
        if self._standing.find_stopped(parts.launched.vital):
            self._ended = "one of vLLM's processes was stopped"
            return self._ended
        since, deadline = parts.steering.idle_since(), self._settings.step_deadline_seconds
        if since is not None and (age := time.monotonic() - since) > deadline:
            return f"vLLM made no step for {age:.0f} s, the deadline is {deadline:g} s"
        return None

    @override
    def metrics(self) -> str:
        # What else this process counts is exported by the worker itself.
        if self._parts is None:
            return ""
        registry = CollectorRegistry()
        for collector, names in list(REGISTRY._collector_to_names.items()):
            if any(name.startswith(METRIC_PREFIX) for name in names):
                registry.register(collector)
        return generate_latest(registry).decode()
