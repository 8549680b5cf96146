"""The part of the adapter that runs inside vLLM's worker processes.

vLLM mixes `Extension` into its worker class; the methods are called by `collective_rpc`, between
steps. New tensors come as the checkpoint has them; vLLM takes the parts that are its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import mmap
import os
import random
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_common.turn.sharing import join
from rollout_worker.engines.shared_memory import rank_mappings
from rollout_worker.engines.shared_memory.copy_plan import TensorRows, open_tensor_memory
from rollout_worker.engines.shared_memory.read_watch import ReadWatch
from rollout_worker.engines.shared_memory.sinks import SLOTS_VARIABLE
from rollout_worker.engines.shared_memory.unread import note_unread
from rollout_worker.observe.processes import find_process

from . import backups
from .load_plan import LoadPlan, LoadRecorder, replay_load
from .settings import MEMBER_VARIABLE, WATCH_VARIABLE
from .under_ray import HEAD_VARIABLE

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
MADV_DONTNEED = 4
PAGE_BYTES = mmap.PAGESIZE
CORE_TITLE = b"::EngineCore"
"""What the process that starts the workers calls itself."""


def _end_with_parent() -> None:
    """See to it that no process of vLLM outlives ours, however that one ends.

    A worker dies with the engine core that started it. The core itself never looks back at its
    parent (vLLM 0.32), so each worker watches ours and ends the core in its place. A worker that
    Ray started watches ours, too: without it the core ends by itself.
    """
    core = os.getppid()
    if os.environ.get(MEMBER_VARIABLE) == str(core):  # a member's worker started it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != core:
            os.kill(os.getpid(), signal.SIGKILL)
        return
    if CORE_TITLE not in _command_line(core):
        head, _, started = os.environ.get(HEAD_VARIABLE, "").partition(".")
        found = find_process(int(head)) if head else None
        if found is not None and str(found.started) == started:
            _kill_after(found.pid, os.getpid())
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    fields = Path(f"/proc/{core}/stat").read_text().rpartition(")")[2].split()
    _kill_after(int(fields[1]), core)


def _kill_after(pid: int, also: int) -> None:
    """Kill a process as soon as another has ended."""
    watched = os.pidfd_open(pid)

    def watch() -> None:
        ended = select.poll()
        ended.register(watched, select.POLLIN)
        ended.poll()
        os.kill(also, signal.SIGKILL)

    threading.Thread(target=watch, name="rollout-parent", daemon=True).start()


def _command_line(pid: int) -> bytes:
    """Return the command line of a process; empty for 0, the parent of a container's first one."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


_end_with_parent()
# vLLM imports this before its worker touches the device (vLLM 0.32: `init_worker`, then `init_device`).
join()


class Extension:
    """Methods that vLLM's worker gets from us; their names must not meet its own."""

    device: Any
    model_runner: Any
    vllm_config: Any
    _rollout_plan: LoadPlan | None = None
    """How a version of this model is loaded, once that was recorded."""
    _rollout_unrecordable: TensorRows | None = None
    """The tensors of a version whose load can't be recorded."""

    def rollout_prepare(self) -> None:
        """Make what a later pipeline stage receives into.

        vLLM makes it in a trial run, which an eager CPU never has: it would die at the first
        request (vLLM 0.32).
        """
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if self.device.type != "cpu" or get_pp_group().is_first_rank:
            return
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )

    def rollout_reach(self, path: str, secret: str) -> int | None:
        """Return the id of this process if it reads the worker's memory, None if it doesn't."""
        try:
            return os.getpid() if Path(path).read_text() == secret else None
        except OSError:
            return None

    def rollout_load(self, ticket: str) -> None:
        """Make the weights of a sink the model's; a failure leaves the model unusable."""
        from vllm.config import set_current_vllm_config

        # Requests stand still meanwhile, and nothing of what is made here is garbage before the end.
        with _without_collection(), set_current_vllm_config(self.vllm_config):
            sink = json.loads(ticket)
            if not self._replay(sink):
                self._load(ticket, [row[:3] for row in sink["tensors"]])
            _finish_load(self)
        rank_mappings.check_unchanged(sink)

    def _load(self, ticket: str, rows: TensorRows) -> None:
        """Load a version by vLLM, and record how, unless that is known to be in vain."""
        # Which experts are here changes between loads where vLLM balances them.
        settled = not self.vllm_config.parallel_config.enable_eplb
        with _read_watched(ticket, settled) as (tensors, watched):
            if watched or not settled or rows == self._rollout_unrecordable:
                self.model_runner.reload_weights(weights_iterator=tensors)
                return
            recorder = LoadRecorder(rows)
            with recorder.record_load(tensors) as tracked:
                self.model_runner.reload_weights(weights_iterator=tracked)
        self._rollout_plan = recorder.plan
        if recorder.plan is None:
            self._rollout_unrecordable = rows
            why = recorder.refusal or "no layer was loaded"
            logger.info("commits load the weights as vLLM does, tensor by tensor: %s", why)

    def _replay(self, sink: dict[str, Any]) -> bool:
        """Load a version as the last one was, if it has the same tensors; returns whether it did."""
        plan = self._rollout_plan
        if plan is None or [row[:3] for row in sink["tensors"]] != plan.rows:
            return False
        memory = open_tensor_memory(sink, plan.rows)
        if not memory.has_tensors(plan.tensor_names):
            return False
        replay_load(plan, self.model_runner, memory)
        return True

    def rollout_reload(self) -> None:
        """Load the model's own checkpoint as `rollout_load` loads a version."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights()
            _finish_load(self)

    def rollout_map(
        self, where: dict[str, str], size: int, tally: tuple[str, str], borrowed: bool
    ) -> None:
        """Map a sink before it is loaded, see `rank_mappings.begin_mapping`."""
        rank_mappings.begin_mapping(
            where, size, tally, borrowed=borrowed, gpu=self.device.type == "cuda"
        )

    def rollout_unmap(self, where: dict[str, str]) -> None:
        """Unmap a sink."""
        rank_mappings.close_mappings(where)

    def rollout_seed(self, seed: int) -> None:
        """Draw from here on what no other replica and no other data-parallel rank draws.

        vLLM begins with the same seed in every process (0.32), so that the same prompt on two
        replicas could get the same output; ranks of one model have to agree.
        """
        mine = (seed + int(self.vllm_config.parallel_config.data_parallel_index)) % (1 << 32)
        random.seed(mine)
        np.random.seed(mine)
        torch.manual_seed(mine)

    def rollout_release(self, level: int, tags: list[str]) -> None:
        """Give memory back: all of it, or the KV cache."""
        if self.device.type == "cpu":
            if "kv_cache" in tags:
                _release_pages(_kv_tensors(self.model_runner))
            if "weights" in tags:
                _drop_weights(self.model_runner.get_model())
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            return
        worker: Any = self
        if "weights" in tags:
            worker.sleep(level)
        else:
            worker.discard(("kv_cache",))

    def rollout_pinned_bytes(self, level: int) -> int:
        """Return how much main memory a sleep of a GPU takes here."""
        return backups.count_pinned_bytes(_allocator_entries(), level)

    def rollout_forget(self) -> None:
        """Give up what sleep at level 1 keeps of a GPU's weights."""
        worker: Any = self
        models = [self.model_runner.get_model(), worker.get_draft_model()]
        buffers = [b for model in models if model is not None for b in model.buffers()]
        backups.drop_weight_backups(_allocator_entries(), buffers)
        torch.accelerator.empty_host_cache()

    def rollout_wake(self, tags: list[str]) -> None:
        """Take memory back; on a CPU pages come back by themselves, as zeros."""
        if self.device.type == "cpu":
            return
        worker: Any = self
        worker.wake_up(tags)
        # Torch would keep the locked copies for itself, beside the books of who asks for the next.
        torch.accelerator.empty_host_cache()


@contextlib.contextmanager
def _read_watched(
    ticket: str, settled: bool
) -> Iterator[tuple[Iterator[tuple[str, torch.Tensor]], bool]]:
    """Give what a sink has, and whether its reader is watched: a member's rank reports what the load left alone.

    Args:
        ticket: Of the sink.
        settled: Whether the next load reads the same tensors.
    """
    tensors = rank_mappings.read_tensors(ticket)
    if WATCH_VARIABLE not in os.environ or not settled or rank_mappings.is_partial(ticket):
        yield tensors, False
        return
    with ReadWatch(tensors) as watching:
        yield iter(watching), True
    told = [(name, dtype, shape) for name, dtype, shape, _ in json.loads(ticket)["tensors"]]
    note_unread(Path(os.environ[SLOTS_VARIABLE]), told, watching.untouched_names)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Let Python look for no garbage inside of the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _allocator_entries() -> dict[int, Any]:
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    return dict(allocator.pointer_to_data)


def _finish_load(worker: Extension) -> None:
    if worker.device.type == "cpu":
        _repack_heads(worker.model_runner.get_model())
        _repack_experts(worker.model_runner.get_model())
    else:
        torch.cuda.synchronize(worker.device)  # it may still read locked memory


def _repack_heads(model: Any) -> None:
    """Pack output heads anew that are tied to the embedding.

    vLLM packs a linear layer's weights when that layer's own tensors were loaded. A tied head has
    none: its packed copy stays the old one, and every logit would be wrong (vLLM 0.32).
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _repack_experts(model: Any) -> None:
    """Pack experts that a load has just brought: vLLM packs them after the first one only (vLLM 0.32)."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts):
            experts.process_weights_after_loading(module)


def _kv_tensors(runner: Any) -> list[torch.Tensor]:
    """Return the tensors of the KV cache, also of layers that keep a list of them."""
    found: list[torch.Tensor] = []
    for cache in runner.kv_caches:
        found += [cache] if isinstance(cache, torch.Tensor) else list(cache)
    return found


def _drop_weights(model: Any) -> None:
    """Give a CPU model's weights back; only a load makes it usable again."""
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = _raise_asleep  # the packed copy goes with the old function
    _release_pages([parameter.data for parameter in model.parameters()])


def _raise_asleep(*_: object) -> torch.Tensor:
    raise RuntimeError("the weights are asleep")


def _release_pages(tensors: list[torch.Tensor]) -> None:
    """Let the system take the pages of tensors; they are zero when they are touched again."""
    libc = ctypes.CDLL(None, use_errno=True)
    for start, size in {(s.data_ptr(), s.nbytes()) for s in map(_tensor_storage, tensors)}:
        first = -(-start // PAGE_BYTES) * PAGE_BYTES
        last = (start + size) // PAGE_BYTES * PAGE_BYTES
        if last > first and libc.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED
        ):
            raise OSError(ctypes.get_errno(), "madvise failed")


def _tensor_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
