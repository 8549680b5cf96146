"""A loaded model and all that works on it, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout_common.wire import Capabilities
from rollout_worker.engine import EngineError
from rollout_worker.engines import EngineOptions

from .core import BatchCore, DeltaDelivery
from .forward import ForwardRunner
from .hf_versions import HfVersions
from .kv import KvRows
from .prefill_pace import PrefillPace
from .settings import HfSettings
from .thread import StepThread
from .weights.allocations import device_allocator
from .weights.loading import LoadedModel
from .weights.weights_memory import WeightsMemory

DEFAULT_BATCH_TOKENS = 32768
"""KV cache of some hundred MB for a model that a CPU can serve."""

FIRST_PREFILL_TOKENS = {"cpu": 256, "cuda": 4096}
"""Tokens of prefixes in the first steps, before the device's speed is known."""


@dataclass(slots=True)
class HfParts:
    """What exists once the model is loaded."""

    loaded: LoadedModel
    kv: KvRows
    memory: WeightsMemory
    core: BatchCore
    thread: StepThread
    versions: HfVersions

    @property
    def running(self) -> frozenset[str]:
        """Ids of the requests in the batch."""
        return self.core.census.running

    @property
    def pinned(self) -> frozenset[str]:
        """Ids of those that run on the former weights."""
        return self.core.census.pinned


def assemble_parts(
    loaded: LoadedModel,
    options: EngineOptions,
    settings: HfSettings,
    deliver: Callable[[list[DeltaDelivery]], None],
    on_crash: Callable[[str], None],
) -> HfParts:
    """Put the parts together; the step thread is not started.

    Raises:
        EngineError: options that do not fit together.
    """
    max_tokens = options.max_batch_tokens or max(DEFAULT_BATCH_TOKENS, loaded.max_length)
    if max_tokens < loaded.max_length:
        raise EngineError(
            f"max_batch_tokens {max_tokens} is below the maximum length {loaded.max_length}: raise "
            "it or lower max_length, else the longest request could never run"
        )
    kv = KvRows(settings.max_batch_size, max_tokens)
    memory = WeightsMemory(
        loaded, options.spill_dir, options.staging, device_allocator(loaded.model.device)
    )
    core = BatchCore(
        ForwardRunner(loaded.model, kv),
        kv,
        memory,
        deliver,
        max_rows=settings.max_batch_size,
        max_tokens=max_tokens,
        pace=PrefillPace(settings.prefill_tokens, FIRST_PREFILL_TOKENS[loaded.device]),
    )
    thread = StepThread(core, on_crash)
    return HfParts(loaded, kv, memory, core, thread, HfVersions(memory, core, thread))


def make_capabilities(*, stop_strings: bool, reloads: bool) -> Capabilities:
    """Return what the engine can do; `reloads`: the model's weights can be read again."""
    return Capabilities(
        logprobs=("sampling", "raw"),
        seed=True,
        priority=True,
        stop_strings=stop_strings,
        in_flight=("Drain", "Abort", "Keep", "Recompute", "Pin"),
        sleep_levels=(1, 2) if reloads else (1,),
        memory_release=True,
        prefix_cache=False,
        cache_salt=False,
    )
