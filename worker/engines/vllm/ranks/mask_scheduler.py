"""vLLM's scheduler, in its core's process, with the masks that the workers send passed on.

The scheduler passes masks on if its flag is set. vLLM (0.32) sets it from a configuration that it refuses for the runner
of CPUs, and that would refuse requests without `top_k` besides.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class MaskScheduler(Scheduler):  # type: ignore[misc,unused-ignore]
    """vLLM's own scheduler, which passes on each mask with its token."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.return_sampling_mask = True
