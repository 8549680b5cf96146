"""Grammars in SGLang's schedulers: compiled for the tokenizer that SGLang does without, their masks applied by our sampler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, BaseGrammarObject
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor
from typing_extensions import override

from rollout_worker.engines.grammars.grammar_state import GrammarMasks
from rollout_worker.engines.model_folder import load_tokenizer, read_config, read_eos_ids
from rollout_worker.engines.settings import MAX_COMPILED_GRAMMARS


class CheckedGrammarBackend(BaseGrammarBackend):  # type: ignore[misc]
    """Compiles grammars that the worker has checked, in llguidance's serialised form, in threads.

    The tokenizer is read at the first grammar: it takes a second and some hundred MB.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        super().__init__()
        self._folder, self._vocab_size = folder, vocab_size
        self._lock = threading.Lock()
        self._backend: GuidanceBackend | None = None

    def _load_backend(self) -> GuidanceBackend:
        with self._lock:
            if self._backend is None:
                tokenizer = load_tokenizer(self._folder)
                eos = read_eos_ids(self._folder, read_config(self._folder).get("eos_token_id"))
                vocab = max(self._vocab_size, len(tokenizer))  # type: ignore[arg-type]
                self._backend = GuidanceBackend(tokenizer, n_vocab=vocab, eos_token_ids=sorted(eos))
            return self._backend

    @override
    def dispatch_ebnf(self, key_string: str) -> BaseGrammarObject:
        return self._load_backend()._from_serialized(key_string)

    @override
    def set_cache(self, key: tuple[str, str], value: BaseGrammarObject) -> None:
        super().set_cache(key, value)
        if len(self.cache) > MAX_COMPILED_GRAMMARS:  # SGLang itself keeps all
            self.cache.pop(next(iter(self.cache)))


def install_grammars() -> None:
    """Patch SGLang in this process, before it starts."""
    begin: Callable[..., None] = GrammarManager.__init__

    def begin_with_backend(self: Any, scheduler: Any) -> None:
        begin(self, scheduler)
        folder, vocab = Path(scheduler.server_args.model_path), scheduler.model_config.vocab_size
        self.grammar_backend = CheckedGrammarBackend(folder, vocab)

    GrammarManager.__init__ = begin_with_backend
    apply = SamplingBatchInfo.apply_logits_bias

    def keep_masks(self: Any, logits: Tensor) -> None:
        # Ours applies them after it has taken the logprobs of the model's own distribution.
        if getattr(self, "rollout_rows", None) is not None:
            self.rollout_masks, self.grammar_mask = self.grammar_mask, None
        apply(self, logits)

    SamplingBatchInfo.apply_logits_bias = keep_masks
    is_idle: Callable[..., bool] = Scheduler.is_fully_idle

    def is_idle_but_for_grammars(
        self: Any, for_health_check: bool = False, ignore_waiting: bool = False
    ) -> bool:
        # A request whose grammar is being compiled holds no KV, and a paused loop never takes it out of the queue.
        manager = self.grammar_manager
        waiting = manager.grammar_queue
        manager.grammar_queue = [] if ignore_waiting else waiting
        try:
            return is_idle(self, for_health_check, ignore_waiting)
        finally:
            manager.grammar_queue = waiting

    Scheduler.is_fully_idle = is_idle_but_for_grammars


def take_masks(sampling_info: Any) -> GrammarMasks | None:
    """Return the masks of a batch, once; None if no request has a grammar."""
    kept = getattr(sampling_info, "rollout_masks", None)
    sampling_info.rollout_masks = None
    if kept is None:
        return None
    rows = [row for row, grammar in enumerate(sampling_info.grammars) if grammar]
    return GrammarMasks(rows, kept.vocab_mask[rows])
