"""Which tokens vLLM could have drawn, between a request that asks and the delta that brings them.

vLLM (0.32) records masks with its second runner alone, for all requests or none, and each as a list of ids, however many. Its
first runner, which serves on CPUs, gets a `DrawWatch` in the workers, and the core `mask_scheduler.py`: masks of the requests
that ask, as rows of `wire.SamplingMask`, on the way that vLLM has for its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollout_common.wire.rich_requests import mask_row_bytes
from rollout_worker.engines.sampling.token_draw import MIN_LOGPROB, pack_mask_row
from rollout_worker.replay_records import TokenMasks

MASKS_ASK = {"rollout_masks": True}
"""`extra_args` of vLLM's sampling parameters for a request that wants masks."""
MASK_SCHEDULER = "rollout_worker.engines.vllm.ranks.mask_scheduler.MaskScheduler"
"""vLLM's scheduler that passes masks on."""


def can_record_masks(config: Any) -> bool:
    """Whether a vLLM of this configuration has the runner, sampler and scheduler that masks are taken from."""
    overlaps = config.scheduler_config.async_scheduling
    return not (config.use_v2_model_runner or config.speculative_config or overlaps)


def read_masks(found: Any, count: int) -> TokenMasks | None:
    """Return the masks of the first `count` tokens of vLLM's output; None if it has none."""
    if found is None or not count:
        return None
    rows = found.token_ids[:count]
    masks = TokenMasks(vocab_size=rows[0][1])
    for ids, vocab_size, *numbers in rows:
        data = np.array(numbers, dtype="<i4").tobytes()
        masks.append_row(ids, data[: mask_row_bytes(ids, vocab_size)])
    return masks


class DrawWatch:
    """Stands between a runner of a vLLM's worker and its sampler, and notes what could be drawn in the rows that ask."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._allowed: dict[int, torch.Tensor] = {}
        self._draw, self._finish = runner.sampler.sample, runner.sample_tokens
        runner.sampler.sample, runner.sample_tokens = self.sample, self.sample_tokens

    def sample(
        self, logits: torch.Tensor, metadata: Any, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw as vLLM's `Sampler.sample` does."""
        batch = self._runner.input_batch
        asking = [at for at, name in enumerate(batch.req_ids) if self._asks_masks(name)]
        if not asking:
            drawn: tuple[torch.Tensor, torch.Tensor | None] = self._draw(logits, metadata, *rest)
            return drawn
        truncation = self._runner.sampler.topk_topp_sampler
        mode = truncation.logprobs_mode
        # In another mode it keeps what it truncated to itself.
        raw = not mode.startswith("processed")
        truncation.logprobs_mode = "processed_logits" if raw else mode
        try:
            tokens, seen = self._draw(logits, metadata, *rest)
        finally:
            truncation.logprobs_mode = mode
        # Greedy batches are not truncated.
        found = (logits if seen is None else seen)[asking].log_softmax(dim=-1)
        self._allowed = dict(zip(asking, (found > MIN_LOGPROB).cpu(), strict=True))
        return tokens, None if raw else seen

    def _asks_masks(self, name: str) -> bool:
        params = self._runner.requests[name].sampling_params
        return bool(params.extra_args) and params.extra_args.items() >= MASKS_ASK.items()

    @torch.inference_mode()
    def sample_tokens(self, *given: Any) -> Any:
        """Return a step's output, with the masks of its tokens."""
        output = self._finish(*given)
        allowed, self._allowed = self._allowed, {}
        if allowed:
            output.sampling_masks = _join_rows(allowed, len(output.req_ids))
        return output


def _join_rows(allowed: dict[int, torch.Tensor], rows: int) -> Any:
    """Return masks [V] by row as vLLM passes them on: numbers of all rows, and where each begins."""
    from vllm.v1.outputs import SamplingMaskLists

    none = np.empty(0, dtype=np.int32)
    parts = [_row_numbers(allowed[row]) if row in allowed else none for row in range(rows)]
    return SamplingMaskLists(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))


def _row_numbers(allowed: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return how many ids a mask has, of how many, and its row, as numbers of 4 bytes."""
    count, row = pack_mask_row(allowed)
    padded = row + bytes(-len(row) % 4)
    header = np.array([count, len(allowed)], dtype=np.int32)
    return np.concatenate([header, np.frombuffer(padded, dtype="<i4")])
