"""What outputs ask of the sampler, as tensors over the rows of a batch.

The tensors are made when the composition of the batch changes, so a step neither waits for the device nor loops
over rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .truncation import TOP_TOKENS, TruncationParams

MAX_BIAS = 1e30
"""Above it sums leave the range of float32; it has the effect of infinity already."""
BIAS_KEYS = ("bias_ids", "bias_values")


@dataclass(slots=True, eq=False)
class SampledRow:
    """One output: `asks` as of `sampling_asks`, its prompt, and the tokens that it has produced."""

    asks: Mapping[str, Any]
    prompt: Sequence[int]
    output: Sequence[int]
    counts: Tensor | None = None  # [V] how often each token was produced, int32
    in_prompt: Tensor | None = None  # [V]
    allowed: Tensor | None = None  # [A] ids; it may ask for all of a vocabulary

    def prepare_counts(self, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `counts` and `in_prompt`; makes them at the first call."""
        if self.counts is None or self.in_prompt is None:
            output = _to_device(self.output, torch.long, device)
            ones = torch.ones(len(output), dtype=torch.int32, device=device)
            self.counts = torch.zeros(vocab, dtype=torch.int32, device=device)
            self.counts.scatter_add_(0, output, ones)
            self.in_prompt = torch.zeros(vocab, dtype=torch.bool, device=device)
            self.in_prompt[_to_device(self.prompt, torch.long, device)] = True
        return self.counts, self.in_prompt

    def prepare_allowed(self, device: torch.device) -> Tensor:
        """Return `allowed`; makes it at the first call, and not with each batch of the row."""
        if self.allowed is None:
            self.allowed = _to_device(self.asks["allowed"], torch.long, device)
        return self.allowed


class SampledRows:
    """The rows of one batch; a batch of another composition has another object."""

    def __init__(self, rows: Sequence[SampledRow], device: torch.device) -> None:
        self.rows = list(rows)
        self._device = device
        self._pieces: list[SampledRows] = []
        self._history: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def select_rows(self, indices: Sequence[int]) -> SampledRows:
        """Return the rows at these indices."""
        return SampledRows([self.rows[index] for index in indices], self._device)

    def with_rows(self, other: SampledRows) -> SampledRows:
        """Return these rows, then the others."""
        return SampledRows([*self.rows, *other.rows], self._device)

    def split_rows(self, size: int) -> list[SampledRows]:
        """Return these rows in pieces of a size; the same objects at every call."""
        if len(self.rows) <= size:
            return [self]
        if not self._pieces:
            starts = range(0, len(self.rows), size)
            self._pieces = [SampledRows(self.rows[at : at + size], self._device) for at in starts]
        return self._pieces

    @cached_property
    def greedy_rows(self) -> Tensor:
        """[B] rows that take the most likely token."""
        return self._device_tensor(self._marks("greedy"), torch.bool)

    @cached_property
    def all_greedy(self) -> bool:
        """Whether all rows take the most likely token."""
        return all(self._marks("greedy"))

    @cached_property
    def any_greedy(self) -> bool:
        """Whether any row takes the most likely token."""
        return any(self._marks("greedy"))

    @cached_property
    def raw_rows(self) -> Tensor | None:
        """[B] rows whose logprobs are the model's own; None if there are none."""
        marks = self._marks("raw")
        return self._device_tensor(marks, torch.bool) if any(marks) else None

    @cached_property
    def top_rows(self) -> list[tuple[int, int]]:
        """Rows that ask for their most likely tokens, and how many."""
        return [(index, self.rows[index].asks["top"]) for index in self._rows_with("top")]

    @cached_property
    def mask_rows(self) -> list[int]:
        """Rows that ask which tokens could be drawn."""
        return self._rows_with("mask")

    @cached_property
    def prompt_lengths(self) -> Tensor:
        """[B] lengths of the prompts."""
        return self._device_tensor([len(row.prompt) for row in self.rows], torch.long)

    @cached_property
    def seeded_rows(self) -> tuple[Tensor, Tensor] | None:
        """Indices of the rows with a seed, and their seeds."""
        at = self._rows_with("seed")
        if not at:
            return None
        seeds = [self.rows[index].asks["seed"] for index in at]
        return self._device_tensor(at, torch.long), self._device_tensor(seeds, torch.long)

    @cached_property
    def truncated_rows(self) -> tuple[Tensor, TruncationParams] | None:
        """Indices of the rows that are truncated, and by what."""
        at = self._rows_with("cut")
        if not at:
            return None
        cuts = [self.rows[index].asks["cut"] for index in at]
        min_p, top_k, top_p = (
            self._device_tensor(column, torch.float64).unsqueeze(1)
            for column in zip(*cuts, strict=True)
        )
        sure = all(0 < count <= TOP_TOKENS // 2 for _, count, _ in cuts)
        return self._device_tensor(at, torch.long), TruncationParams(min_p, top_k, top_p, sure)

    def edit_logits(self, logits: Tensor, positions: Tensor) -> None:
        """Apply to `logits` [B, V], in place, all that comes before the temperature."""
        if self._biases is not None:
            at, ids, values = self._biases
            logits[at, ids] += values
        if self._allowed is not None:
            rows, at, ids = self._allowed
            allowed = logits[at, ids]
            logits.index_fill_(0, rows, -torch.inf)
            logits[at, ids] = allowed
        if self._penalties is not None:
            at, factors = self._penalties
            made, prompts = self._token_history(logits.shape[1])
            logits[at] = apply_penalties(logits[at], prompts, made, factors)
        if self._withheld_stops is not None:
            at, ids, least = self._withheld_stops
            early = positions[at] + 1 - self.prompt_lengths[at] < least
            logits[at, ids] = torch.where(early, -torch.inf, logits[at, ids])
        if self._never is not None:
            at, ids, values = self._never
            logits[at, ids] = values

    def _token_history(self, vocab: int) -> tuple[Tensor, Tensor]:
        """Return [P, V] how often tokens were produced in the penalised rows, and which are in their prompts.

        The rows keep views, so that their next batch has the counts of this one.
        """
        if self._history is None:
            rows = [self.rows[index] for index in self._rows_with("penalties")]
            found = [row.prepare_counts(vocab, self._device) for row in rows]
            made, prompts = (torch.stack(column) for column in zip(*found, strict=True))
            for row, *views in zip(rows, made, prompts, strict=True):
                row.counts, row.in_prompt = views
            self._history = made, prompts
        return self._history

    def count_tokens(self, tokens: Tensor) -> None:
        """Count the tokens [B] just drawn."""
        if self._penalties is not None and self._history is not None:
            drawn = tokens[self._penalties[0]].long().unsqueeze(1)
            self._history[0].scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.int32))

    @cached_property
    def _biases(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Rows, tokens, and what is added to their logits."""
        entries = [
            (index, token, max(-MAX_BIAS, min(MAX_BIAS, value)))
            for index in self._rows_with("bias_ids")
            for token, value in zip(*map(self.rows[index].asks.get, BIAS_KEYS), strict=True)
        ]
        return self._column_tensors(entries, torch.long, torch.long, torch.float32)

    @cached_property
    def _allowed(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Restricted rows; then row and token of everything that is allowed in them."""
        restricted = self._rows_with("allowed")
        if not restricted:
            return None
        ids = [self.rows[index].prepare_allowed(self._device) for index in restricted]
        lengths = [len(each) for each in ids]
        rows = self._device_tensor(restricted, torch.long)
        # With its size given, the device is not waited for.
        at = rows.repeat_interleave(
            self._device_tensor(lengths, torch.long), output_size=sum(lengths)
        )
        return rows, at, torch.cat(ids)

    @cached_property
    def _penalties(self) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None:
        """Penalised rows, and their repetition, presence and frequency penalties as columns."""
        at = self._rows_with("penalties")
        if not at:
            return None
        factors = [self.rows[index].asks["penalties"] for index in at]
        repetition, presence, frequency = (
            self._device_tensor(column, torch.float32).unsqueeze(1)
            for column in zip(*factors, strict=True)
        )
        return self._device_tensor(at, torch.long), (repetition, presence, frequency)

    @cached_property
    def _withheld_stops(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Rows, tokens that end them, and how many tokens the row must have before one may."""
        entries = [
            (index, stop, self.rows[index].asks["min_tokens"])
            for index in self._rows_with("min_tokens")
            for stop in self.rows[index].asks["stops"]
        ]
        return self._column_tensors(entries, torch.long, torch.long, torch.long)

    @cached_property
    def _never(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Rows, tokens that they never sample, and the logits of these."""
        entries = [
            (index, token, -torch.inf)
            for index in self._rows_with("never")
            for token in self.rows[index].asks["never"]
        ]
        return self._column_tensors(entries, torch.long, torch.long, torch.float32)

    def _column_tensors(
        self, entries: Sequence[tuple[Any, Any, Any]], *dtypes: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if not entries:
            return None
        first, second, third = (
            self._device_tensor(c, d)
            for c, d in zip(zip(*entries, strict=True), dtypes, strict=True)
        )
        return first, second, third

    def _marks(self, ask: str) -> list[bool]:
        return [bool(row.asks.get(ask)) for row in self.rows]

    def _rows_with(self, ask: str) -> list[int]:
        return [index for index, row in enumerate(self.rows) if ask in row.asks]

    def _device_tensor(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return _to_device(values, dtype, self._device)


def _to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor on the device, without waiting until it is there."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def apply_penalties(
    part: Tensor, prompts: Tensor, counts: Tensor, factors: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Return the logits `part` [B, V], which are not changed, with penalties for earlier tokens.

    Args:
        part: [B, V].
        prompts: [B, V] whether a token is in the prompt.
        counts: [B, V] how often it was produced.
        factors: [B, 1] each: repetition, presence, frequency.
    """
    repetition, presence, frequency = factors
    made = counts > 0
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(prompts | made, repeated, part)
    return (part - presence * made - frequency * counts).clamp_(max=MAX_BIAS)
