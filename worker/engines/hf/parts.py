"""A loaded model with the objects that work on it, and their metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout_worker.engines.grammars.grammar_checker import supports_grammars
from rollout_worker.engines.grammars.grammar_state import GrammarCompiler
from rollout_worker.engines.model_folder import resolve_batch_tokens
from rollout_worker.engines.options import EngineOptions

from .core import BatchCore, DeltaDelivery
from .expert_routes import RouterRecorder
from .forward import ForwardRunner
from .hf_versions import HfVersions
from .kv import KvRows
from .picture_features import PictureEncoder
from .settings import HfSettings
from .thread import StepThread
from .weights.buffers import device_allocator
from .weights.loading import LoadedModel
from .weights.weights_memory import WeightsMemory

PREFILL_TOKENS = {"cpu": 256, "cuda": 4096}
"""Tokens of prefixes in a step unless `--prefill-tokens` says how many: a tenth of a second of usual models."""


@dataclass(slots=True)
class HfParts:
    """What exists once the model is loaded."""

    loaded: LoadedModel
    kv: KvRows
    memory: WeightsMemory
    core: BatchCore
    thread: StepThread
    versions: HfVersions
    grammars: GrammarCompiler | None = None
    routers: RouterRecorder | None = None
    encoder: PictureEncoder | None = None

    @property
    def running(self) -> frozenset[str]:
        """Ids of the requests in the batch."""
        return self.core.census.running

    @property
    def pinned(self) -> frozenset[str]:
        """Ids of those that run on the former weights."""
        return self.core.census.pinned

    def render_metrics(self) -> str:
        """Return the engine's own metrics in the Prometheus text format."""
        totals, census = self.core.totals, self.core.census
        fed_again = "Tokens fed as prefixes, again after a lost cache included."
        reserved = "Share of the KV cache that running outputs have reserved."
        weights = "Memory of the weights, those of pinned outputs included."
        lines = []
        for name, value, meaning in (
            ("hf_engine_steps_total", totals.steps, "Steps made."),
            ("hf_engine_step_seconds_total", totals.step_seconds, "Time in steps."),
            ("hf_engine_prefill_tokens_total", totals.prefill_tokens, fed_again),
            ("hf_engine_decode_tokens_total", totals.decode_tokens, "Tokens fed one by one."),
            ("hf_engine_batch_rows", len(census.running), "Outputs in the batch."),
            ("hf_engine_waiting", census.queued, "Outputs waiting for a row."),
            ("hf_engine_kv_cache_bytes", self.kv.nbytes, "Memory of keys and values."),
            ("hf_engine_kv_cache_usage", census.kv_usage, reserved),
            ("hf_engine_weights_bytes", self.memory.nbytes, weights),
        ):
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name} {value}"]
        return "\n".join(lines) + "\n"


def assemble_parts(
    loaded: LoadedModel,
    options: EngineOptions,
    settings: HfSettings,
    deliver: Callable[[list[DeltaDelivery]], None],
    on_crash: Callable[[str], None],
) -> HfParts:
    """Make the parts; the step thread is not started.

    Raises:
        EngineError: the KV cache is smaller than the longest request.
    """
    max_tokens = resolve_batch_tokens(options.max_batch_tokens, loaded.max_length)
    kv = KvRows(settings.max_batch_size, max_tokens)
    memory = WeightsMemory(
        loaded, options.spill_dir, options.staging, device_allocator(loaded.model.device)
    )
    forward = ForwardRunner(loaded.model, kv)
    encoder = None if loaded.pictures is None else PictureEncoder(loaded.model, loaded.pictures)
    core = BatchCore(
        forward,
        kv,
        memory,
        deliver,
        max_rows=settings.max_batch_size,
        max_tokens=max_tokens,
        prefill_tokens=settings.prefill_tokens or PREFILL_TOKENS[loaded.device],
        encoder=encoder,
    )
    thread = StepThread(core, on_crash)
    grammars = None
    if supports_grammars(loaded.tokenizer, loaded.eos_token_ids):
        grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
    versions = HfVersions(memory, core, thread, forward.lora)
    return HfParts(loaded, kv, memory, core, thread, versions, grammars, forward.routers, encoder)
