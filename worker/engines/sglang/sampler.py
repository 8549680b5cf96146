"""Our sampler inside SGLang: registered in place of its own, fed by three of its extension points.

SGLang keeps what requests ask for in one `SamplingBatchInfo` for each batch, which it filters and merges
as requests come and go; `SampledRows` is filtered and merged with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers import sampler as base
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from rollout_worker.engines.sampling.batch_rows import SampledRow, SampledRows
from rollout_worker.engines.sampling.token_draw import draw_tokens

REPLACED_BACKENDS = ("flashinfer", "pytorch")
"""SGLang's samplers that ours replaces; the platform decides which one SGLang asks for."""


class RolloutSampler(base.Sampler):  # type: ignore[misc]
    """Draws as `token_draw` does; SGLang's own draw serves batches that are not ours (warm-up, idle ranks)."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: torch.Tensor,
        **more: Any,
    ) -> torch.Tensor:
        """Return the next token of each row."""
        rows: SampledRows | None = getattr(sampling_info, "rollout_rows", None)
        logits = logits_output.next_token_logits
        if rows is None or len(rows) != logits.shape[0]:
            return super().forward(  # type: ignore[no-any-return]
                logits_output,
                sampling_info,
                return_logprob,
                top_logprobs_nums,
                token_ids_logprobs,
                positions,
                **more,
            )
        logits = self._preprocess_logits(logits, sampling_info)
        tokens, logprobs = draw_tokens(logits, rows, sampling_info.temperatures, positions)
        if return_logprob:
            logits_output.next_token_logprobs = logprobs
        tokens = tokens.to(torch.int32)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def _rows_from_batch(self: Any, batch: Any, vocab_size: int) -> None:
    self.rollout_rows = SampledRows(
        [_make_row(request) for request in batch.reqs], torch.device(batch.device)
    )


def _make_row(request: Any) -> SampledRow:
    asks = request.sampling_params.custom_params or {"greedy": request.sampling_params.top_k == 1}
    return SampledRow(asks, tuple(request.origin_input_ids), tuple(request.output_ids))


def _filter_rows(self: Any, keep_indices: Sequence[int], keep_indices_device: Any) -> None:
    if getattr(self, "rollout_rows", None) is not None:
        self.rollout_rows = self.rollout_rows.select_rows([int(index) for index in keep_indices])


def _merge_rows(self: Any, other: Any) -> None:
    mine, theirs = getattr(self, "rollout_rows", None), getattr(other, "rollout_rows", None)
    self.rollout_rows = None if mine is None or theirs is None else mine.with_rows(theirs)


def register_sampler() -> None:
    """Make the sampler known in this process."""
    copy = SamplingBatchInfo.copy_for_forward

    def copy_with_rows(self: Any) -> Any:
        made = copy(self)
        made.rollout_rows = getattr(self, "rollout_rows", None)
        return made

    SamplingBatchInfo.copy_for_forward = copy_with_rows
    SamplingBatchInfo.adjusted_from_schedule_batch = _rows_from_batch
    SamplingBatchInfo.adjusted_filter_batch = _filter_rows
    SamplingBatchInfo.adjusted_merge_batch = _merge_rows
    for backend in REPLACED_BACKENDS:
        base.register_sampler_backend(backend, RolloutSampler)
