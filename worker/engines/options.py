"""What a worker tells any engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollout_common.wire import LogprobsOf
from rollout_worker.engine import GangMembership

from .shared_memory.staging_budget import StagingBudget


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options that a worker gives any engine.

    Attributes:
        model: The folder of the checkpoint.
        dtype: What the weights are computed in; auto: the checkpoint's.
        max_length: Most tokens of prompt and output together; None: the model's.
        device: auto: a GPU if there is one.
        spill_dir: Where weights go at sleep level 1; None: the temporary folder.
        max_batch_tokens: Upper bound of the KV cache, in tokens; None leaves it to the engine.
        logprobs: The kind that requests get by default, for engines that record only one kind.
        args: The engine's own flags, as on its command line.
        staging: What memory of staged weights is charged to; all engines of a process share it.
        gang: Set if the engine spans several nodes.
        guest: The worker runs in a trainer's process, so the engine must not change what outlives it or
            affects the trainer.
    """

    model: Path
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_length: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    spill_dir: Path | None = None
    max_batch_tokens: int | None = None
    logprobs: LogprobsOf = "sampling"
    args: tuple[str, ...] = ()
    staging: StagingBudget = field(default_factory=StagingBudget)
    gang: GangMembership | None = None
    guest: bool = False
