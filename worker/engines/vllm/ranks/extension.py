"""The part of the adapter that runs inside vLLM's worker processes.

vLLM mixes `Extension` into its worker class; the methods are called by `collective_rpc`, between
steps. New tensors come as the checkpoint has them; vLLM takes the parts that are its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import json
import logging
import os
import random
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_common.garbage_collection import without_garbage_collection
from rollout_common.parent_death import die_with_parent
from rollout_common.turn.sharing import join, share_again
from rollout_worker.engines.shared_memory import rank_mappings
from rollout_worker.engines.shared_memory.copy_plan import TensorRows, open_tensor_memory
from rollout_worker.engines.shared_memory.copy_ring import open_ring
from rollout_worker.engines.shared_memory.lent_reading import read_lent
from rollout_worker.engines.shared_memory.ranks import note_unread
from rollout_worker.engines.shared_memory.sinks import SLOTS_VARIABLE
from rollout_worker.engines.shared_memory.tensor_views import ReadWatch
from rollout_worker.engines.vllm.settings import MEMBER_VARIABLE, WATCH_VARIABLE
from rollout_worker.engines.vllm.under_ray import HEAD_VARIABLE
from rollout_worker.engines.vllm.vllm_drafts import (
    DRAFT_PREFIX,
    is_of_draft,
    load_draft,
    mend_draft_sampling,
)
from rollout_worker.observe.processes import command_line_of, find_process

from .direct_writes import catch_lost_writes
from .draw_masks import DrawWatch, can_record_masks
from .load_plan import LoadPlan, LoadRecorder, replay_load
from .rank_memory import (
    allocator_entries,
    count_pinned_bytes,
    drop_weight_backups,
    drop_weights,
    kv_tensors,
    release_pages,
)

logger = logging.getLogger(__name__)

SCORED_POSITIONS = 512
"""Positions of a prompt that are scored at once: 0.3 GB of logits with a vocabulary of 152,000."""
CORE_TITLE = "::EngineCore"
"""Part of the title of the process that starts the workers."""


def _end_with_parent() -> None:
    """Make sure that no process of vLLM outlives ours, however that one ends.

    A worker dies with the engine core that started it. The core itself does not watch its parent (vLLM
    0.32), so each worker watches ours and kills the core. A worker that Ray started watches ours, too:
    without its workers the core ends by itself.
    """
    core = os.getppid()
    started_by_member = os.environ.get(MEMBER_VARIABLE) == str(core)
    if not started_by_member and CORE_TITLE not in command_line_of(core):
        head, _, started = os.environ.get(HEAD_VARIABLE, "").partition(".")
        found = find_process(int(head)) if head else None
        if found is not None and str(found.started) == started:
            _kill_after(found.pid, os.getpid())
        return
    die_with_parent()
    if not started_by_member:
        fields = Path(f"/proc/{core}/stat").read_text().rpartition(")")[2].split()
        _kill_after(int(fields[1]), core)
    elif os.getppid() != core:
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_after(watched: int, victim: int) -> None:
    """Kill the victim as soon as the watched process has ended."""
    descriptor = os.pidfd_open(watched)

    def watch() -> None:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll()
        os.kill(victim, signal.SIGKILL)

    threading.Thread(target=watch, name="rollout-parent", daemon=True).start()


def _score_in_pieces(
    runner: Any, score: Any, hidden: torch.Tensor, scheduled: dict[str, int]
) -> dict[str, Any]:
    """Score the prompts of a step as vLLM's `score` does, but few positions of each at a time.

    vLLM's first runner (0.32) computes the logits of all that a step reads of a prompt at once: 20 GB of a prompt of
    32k tokens and a vocabulary of 152,000, and as much again for their logprobs.
    """
    found: dict[str, Any] = {}
    for name in [each for each in runner.num_prompt_logprobs if each in scheduled]:
        request, count = runner.requests[name], scheduled[name]
        computed = request.num_computed_tokens
        try:
            for done in range(0, count, SCORED_POSITIONS):
                # As if the step had read no more than this.
                request.num_computed_tokens = computed + done
                piece = {name: min(SCORED_POSITIONS, count - done)}
                found |= score(hidden[done:], piece)
        finally:
            request.num_computed_tokens = computed
    return found


def _mend_lora_operations() -> None:
    """Let rows of a CPU's batch without an adapter get none.

    vLLM's operations for CPUs (0.32) index the adapters' slots by -1 for a row without one, which is the last slot: its
    output was another request's adapter's as soon as that slot was in use.
    """
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in ("bgmv_expand", "bgmv_expand_slice"):
        mended = _without_bare_rows(getattr(lora_ops, name))
        for module in (lora_ops, torch_ops, punica_cpu):
            setattr(module, name, mended)


def _without_bare_rows(expand: Callable[..., None]) -> Callable[..., None]:
    def expand_rows(
        inputs: torch.Tensor,
        weights: Any,
        output: Any,
        indices: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        bare = (indices < 0).unsqueeze(1)
        expand(
            inputs.masked_fill(bare[: len(inputs)], 0), weights, output, indices, *args, **kwargs
        )

    return expand_rows


def _make_stage_buffers(runner: Any) -> None:
    """Make the buffers that a later pipeline stage receives into.

    vLLM makes them in a trial run, which an eager CPU never has: it would die at the first request (vLLM 0.32).
    """
    from vllm.distributed import get_pp_group

    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens,
            dtype=runner.model_config.dtype,
            device=runner.device,
        )


def _seed_draws(seed: int) -> None:
    """Draw other numbers than the other replicas and data-parallel ranks do.

    vLLM begins with the same seed in every process (0.32), so that the same prompt on two replicas could get the same
    output; ranks of one model have to agree.
    """
    mine = seed % (1 << 32)
    random.seed(mine)
    np.random.seed(mine)
    torch.manual_seed(mine)


def _allow_matrix_tiles() -> None:
    """Ask the kernel for the processor's matrix tiles (AMX), where it has them.

    vLLM's attention in bfloat16 uses them without asking, and dies of an illegal instruction unless torch has asked
    before, which depends on the model (vLLM 0.32).
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


_allow_matrix_tiles()
_end_with_parent()
# vLLM imports this before its worker touches the device (vLLM 0.32: `init_worker`, then `init_device`).
join()


class Extension:
    """Methods that vLLM's worker gets from us; their names must not clash with its own."""

    device: Any
    model_runner: Any
    vllm_config: Any
    _rollout_plan: LoadPlan | None = None
    """The recorded load of this model."""
    _rollout_draft_lost = False
    """Whether sleep took the draft's weights."""
    _rollout_unrecordable: TensorRows | None = None
    """The tensors of a version whose load can't be recorded."""

    def rollout_prepare(self, seed: int | None) -> None:
        """Mend what vLLM leaves, before the first request; `seed`: of draws, None: vLLM's own."""
        config, runner, cpu = self.vllm_config, self.model_runner, self.device.type == "cpu"
        score = getattr(runner, "_get_prompt_logprobs_dict", None)
        if score is not None:  # vLLM's first runner; its second one has pieces of its own
            runner._get_prompt_logprobs_dict = functools.partial(_score_in_pieces, runner, score)
        if can_record_masks(config):
            DrawWatch(runner)
        if cpu and config.lora_config is not None:
            _mend_lora_operations()
        if config.speculative_config is not None:
            mend_draft_sampling(cpu=cpu)
        if cpu and config.parallel_config.pipeline_parallel_size > 1:
            _make_stage_buffers(runner)
        if seed is not None:
            _seed_draws(seed + int(config.parallel_config.data_parallel_index))

    def rollout_reach(self, path: str, secret: str) -> int | None:
        """Return the id of this process if it can read the worker's memory, else None."""
        try:
            return os.getpid() if Path(path).read_text() == secret else None
        except OSError:
            return None

    def rollout_load(self, ticket: str | None) -> None:
        """Load the weights of a sink, or the model's own checkpoint; a failure leaves the model unusable."""
        from vllm.config import set_current_vllm_config

        # No request runs, and nothing that is made here becomes garbage before the end.
        with without_garbage_collection(), set_current_vllm_config(self.vllm_config):
            if ticket is None:
                with catch_lost_writes(self.model_runner.get_model()):
                    self.model_runner.reload_weights()
                _finish_load(self)
                return
            sink = json.loads(ticket)
            if "loaded" in sink:  # lent values, which came before
                return
            if "lent" in sink:
                self._load_lent(sink)
                return
            rows = [row[:3] for row in sink["tensors"] if not is_of_draft(row[0])]
            # The draft first: vLLM may let it share the target's embedding and head, whose values are the target's.
            self._load_draft(sink, brought=len(rows) < len(sink["tensors"]))
            if not self._replay(sink, rows):
                self._load(sink, rows)
            _finish_load(self)

    def _load_lent(self, ticket: dict[str, Any]) -> None:
        """Load what a trainer lends; a draft keeps its own checkpoint."""
        self._load_draft(ticket, brought=False)
        with catch_lost_writes(self.model_runner.get_model()):
            self.model_runner.reload_weights(
                weights_iterator=read_lent(ticket, self.device, skip=DRAFT_PREFIX)
            )
        _finish_load(self)
        if self.device.type != "cpu":
            torch.cuda.empty_cache()  # the KV cache, which wakes next, would lack what torch keeps

    def _load_draft(self, sink: dict[str, Any], *, brought: bool) -> None:
        """Load the draft that a version brought, or the draft's checkpoint if sleep took its weights."""
        draft = self._draft()
        if draft is None or not (brought or self._rollout_draft_lost):
            return
        load_draft(self.vllm_config, draft, rank_mappings.read_tensors(sink) if brought else None)
        self._rollout_draft_lost = False

    def _draft(self) -> Any:
        """Return the model that makes drafts, or None."""
        worker: Any = self
        return worker.get_draft_model()

    def _load(self, sink: dict[str, Any], rows: TensorRows) -> None:
        """Load a version by vLLM, and record the copies unless that failed before."""
        model = self.model_runner.get_model()
        with _read_watched(sink) as (tensors, watched), catch_lost_writes(model):
            if watched or rows == self._rollout_unrecordable:
                self.model_runner.reload_weights(weights_iterator=tensors)
                return
            recorder = LoadRecorder(rows, model)
            with recorder.record_load(tensors) as tracked:
                self.model_runner.reload_weights(weights_iterator=tracked)
        self._rollout_plan = recorder.plan
        if recorder.plan is None:
            self._rollout_unrecordable = rows
            why = recorder.refusal or "no layer was loaded"
            logger.info("commits load the weights as vLLM does, tensor by tensor: %s", why)
        else:  # this commit is slow anyway: the next one finds its buffers locked
            open_ring(self.device, sink["size"])

    def _replay(self, sink: dict[str, Any], rows: TensorRows) -> bool:
        """Load a version by the recorded copies if it has the same tensors; return whether it did."""
        plan = self._rollout_plan
        if plan is None or rows != plan.rows:
            return False
        memory = open_tensor_memory(sink, rows)
        if not memory.has_tensors(plan.tensor_names):
            return False
        replay_load(plan, self.model_runner, memory)
        return True

    def rollout_map(self, where: dict[str, str], size: int, tally: tuple[str, str]) -> None:
        """Map a sink before it is loaded (`rank_mappings.begin_mapping`)."""
        rank_mappings.begin_mapping(where, size, tally)

    def rollout_unmap(self, where: dict[str, str]) -> None:
        """Unmap a sink."""
        rank_mappings.close_mappings(where)

    def rollout_release(self, level: int, tags: list[str]) -> None:
        """Give memory back: all of it, or the KV cache."""
        worker: Any = self
        if "weights" in tags and (level == 2 or self.device.type == "cpu"):
            self._rollout_draft_lost = True  # a GPU's first level has a copy
        if self.device.type != "cpu":
            worker.sleep(level) if "weights" in tags else worker.discard(("kv_cache",))
            return
        if "kv_cache" in tags:
            release_pages(kv_tensors(self.model_runner))
        if "weights" in tags:
            for model in filter(None, (self.model_runner.get_model(), self._draft())):
                drop_weights(model)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def rollout_pinned_bytes(self, level: int) -> int:
        """Return how much main memory a sleep of a GPU takes here."""
        return count_pinned_bytes(allocator_entries(), level)

    def rollout_forget(self) -> None:
        """Free the copy that sleep at level 1 keeps of a GPU's weights, the draft's included."""
        self._rollout_draft_lost = True
        models = [self.model_runner.get_model(), self._draft()]
        buffers = [b for model in models if model is not None for b in model.buffers()]
        drop_weight_backups(allocator_entries(), buffers)
        torch.accelerator.empty_host_cache()

    def rollout_wake(self, tags: list[str]) -> None:
        """Take memory back; on a CPU pages come back by themselves, as zeros."""
        share_again()
        if self.device.type != "cpu":
            worker: Any = self
            worker.wake_up(tags)
            # Torch would cache the locked copies, where no check of free memory sees them.
            torch.accelerator.empty_host_cache()


@contextlib.contextmanager
def _read_watched(
    sink: dict[str, Any],
) -> Iterator[tuple[Iterator[tuple[str, torch.Tensor]], bool]]:
    """Yield the tensors of a sink, and whether reads are watched.

    If so, a member's rank tells its worker which of them the load did not read.
    """
    tensors = ((n, t) for n, t in rank_mappings.read_tensors(sink) if not is_of_draft(n))
    if WATCH_VARIABLE not in os.environ or rank_mappings.is_partial(sink):
        yield tensors, False
        return
    with ReadWatch(tensors) as watching:
        yield iter(watching), True
    given = [(name, dtype, shape) for name, dtype, shape, _ in sink["tensors"]]
    note_unread(Path(os.environ[SLOTS_VARIABLE]), given, watching.untouched_names)


def _finish_load(worker: Extension) -> None:
    """Wait until a GPU has copied; pack again on a CPU what vLLM 0.32 packs after the first load only."""
    if worker.device.type != "cpu":
        torch.cuda.synchronize(worker.device)  # it may still copy from the ring
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    models = filter(None, (worker.model_runner.get_model(), worker._draft()))
    for module in itertools.chain.from_iterable(model.modules() for model in models):
        # vLLM packs a linear layer when its own tensors were loaded. A head that is tied to the
        # embedding has none.
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts):
            experts.process_weights_after_loading(module)
