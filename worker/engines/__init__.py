"""The engines, made by name; importing this module imports none of them.

An adapter for another engine implements `rollout_worker.engine.Engine` and gets a line in `create_engine`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollout_common.wire import LogprobsOf
from rollout_worker.engine import ENGINES, Engine, EngineError, EngineMember, GangMembership
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget


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


def create_engine(engine: str, options: EngineOptions) -> Engine:
    """Make an engine; nothing is loaded before its `start`.

    Raises:
        EngineError: an unknown engine or flag; the text lists those that exist.
    """
    with _without_garbage_collection():
        if engine == "hf":
            if options.gang is not None:
                raise _single_node_error(engine)
            from .hf.hf_engine import HfEngine

            return HfEngine(options)
        if engine == "vllm":
            from .vllm.vllm_engine import VllmEngine

            return VllmEngine(options)
        if engine == "sglang":
            from .sglang.sglang_engine import SglangEngine

            return SglangEngine(options)
    raise EngineError(f"engine {engine!r} is unknown: use one of {', '.join(ENGINES)}")


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Import without garbage collection, which would take a tenth of the time and find nothing: modules stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def create_member(engine: str, options: EngineOptions) -> EngineMember:
    """Make the part of an engine that runs on a node other than the head's.

    Raises:
        EngineError: this engine runs on one node.
    """
    with _without_garbage_collection():
        if engine == "vllm":
            from .vllm.vllm_member import VllmMember

            return VllmMember(options)
        if engine == "sglang":
            from .sglang.sglang_node import SglangMember

            return SglangMember(options)
    raise _single_node_error(engine)


def _single_node_error(engine: str) -> EngineError:
    return EngineError(
        f"parallelism.nodes: the {engine} engine runs on one node: set it to 1, or use vllm or sglang"
    )
