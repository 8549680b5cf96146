"""Which tokens vLLM could have drawn, between a request that asks and the delta that brings them.

vLLM (0.32) records masks with its second runner alone, for all requests or none, and each as a list of ids, however many. Its
first runner, which serves on CPUs, gets `draw_watch.py` in the workers, and the core `mask_scheduler.py`: masks of the requests
that ask, as rows of `wire.SamplingMask`, on the way that vLLM has for its own.
"""

from __future__ import annotations

from typing import Any

from rollout_common.wire.rich_requests import mask_row_bytes
from rollout_worker.replay_records import TokenMasks

MASKS_ASK = {"rollout_masks": True}
"""`extra_args` of vLLM's sampling parameters for a request that wants masks."""
MASK_SCHEDULER = "rollout_worker.engines.vllm.mask_scheduler.MaskScheduler"
"""vLLM's scheduler that passes masks on."""


def can_record_masks(config: Any) -> bool:
    """Whether a vLLM of this configuration has the runner, sampler and scheduler that masks are taken from."""
    overlaps = config.scheduler_config.async_scheduling
    return not (config.use_v2_model_runner or config.speculative_config or overlaps)


def read_masks(found: Any, count: int) -> TokenMasks | None:
    """Return the masks of the first `count` tokens of vLLM's output; None if it has none."""
    if found is None or not count:
        return None
    import numpy

    rows = found.token_ids[:count]
    masks = TokenMasks(vocab_size=rows[0][1])
    for ids, vocab_size, *numbers in rows:
        data = numpy.array(numbers, dtype="<i4").tobytes()
        masks.append_row(ids, data[: mask_row_bytes(ids, vocab_size)])
    return masks
