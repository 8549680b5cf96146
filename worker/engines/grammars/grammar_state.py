"""Compile checked grammars for a model's tokens, and follow outputs through them.

The masks are those of llguidance (https://github.com/guidance-ai/llguidance), which vLLM and SGLang use, too.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout_worker.engines.recent_values import RecentValues
from rollout_worker.engines.settings import MAX_COMPILED_GRAMMARS

from .grammar_checker import tokenizer_text

MASK_BITS = 32
"""Tokens in a word of a mask."""


class GrammarState:
    """Where one output is in its grammar; owned by the thread that draws its tokens."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self.words = words
        """Length of its mask."""

    def fill_mask(self, row: Tensor) -> None:
        """Write into `row` [words] int32 which tokens may come next, a bit for each: EOS alone once the text is complete."""
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())

    def accept_token(self, token: int) -> str | None:
        """Advance by a token that the last mask allowed; return why the grammar can't go on, None if it can."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return None  # complete: this is its EOS
        self._matcher.consume_token(token)
        return self._matcher.get_error() or None if self._matcher.is_error() else None


class GrammarCompiler:
    """Compiles grammars for one model; its methods block, for seconds at the first call, and any thread may call them."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Collection[int]) -> None:
        self._tokenizer, self._eos = tokenizer, sorted(eos)
        # Logits may have more columns than there are tokens.
        self._vocab = max(vocab_size, len(tokenizer))
        self._lock = threading.Lock()
        self._tokens: Any | None = None
        self._compiled = RecentValues[str, Any](MAX_COMPILED_GRAMMARS, lambda _: 1)

    def compile_grammar(self, grammar: str) -> GrammarState:
        """Return the state at the beginning of a checked grammar, in llguidance's serialised form.

        Raises:
            ValueError: It can't be compiled, which the check had found.
        """
        with self._lock:
            matcher = self._compiled.find_or_make(grammar, lambda: self._make_matcher(grammar))
            return GrammarState(matcher.deep_copy(), -(-self._vocab // MASK_BITS))

    def _make_matcher(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._load_tokens(), grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def _load_tokens(self) -> Any:
        if self._tokens is None:
            from llguidance import LLTokenizer

            text = tokenizer_text(self._tokenizer)
            self._tokens = LLTokenizer(text, n_vocab=self._vocab, eos_token=self._eos)
        return self._tokens


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """The masks of those rows of a batch that have a grammar: masks [len(rows), words] int32, a bit for each token."""

    rows: Sequence[int]
    masks: Tensor

    def within_rows(self, start: int, end: int) -> GrammarMasks | None:
        """Return the masks of rows [start, end), which are numbered from 0 then; None if there are none."""
        first, last = bisect_left(self.rows, start), bisect_left(self.rows, end)
        if first == last:
            return None
        return GrammarMasks([row - start for row in self.rows[first:last]], self.masks[first:last])


def fill_masks(states: Sequence[GrammarState | None], device: torch.device) -> GrammarMasks | None:
    """Return the masks of a batch's rows; None if no row has a grammar."""
    found = [(row, state) for row, state in enumerate(states) if state is not None]
    if not found:
        return None
    masks = torch.empty((len(found), found[0][1].words), dtype=torch.int32)
    for (_, state), mask in zip(found, masks, strict=True):
        state.fill_mask(mask)
    return GrammarMasks([row for row, _ in found], masks.to(device))


def apply_masks(logits: Tensor, grammars: GrammarMasks) -> None:
    """Set in place what the masks exclude of their rows of the logits [B, V] to minus infinity."""
    # By bytes: wider numbers would be four times as many to write, a bit each.
    places = 1 << torch.arange(8, device=logits.device, dtype=torch.uint8)
    bits = grammars.masks.view(torch.uint8).unsqueeze(2) & places
    excluded = bits.view(len(grammars.rows), -1)[:, : logits.shape[1]] == 0
    if len(grammars.rows) == len(logits):
        logits.masked_fill_(excluded, -torch.inf)
        return
    at = torch.tensor(grammars.rows, device=logits.device)
    logits[at] = logits[at].masked_fill(excluded, -torch.inf)
