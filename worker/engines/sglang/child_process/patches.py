"""Our changes to each process of SGLang: the sampler, other extensions, and repairs of its faults."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.managers import load_snapshot
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from rollout_common.garbage_collection import freeze_heap
from rollout_common.parent_death import die_with_parent
from rollout_common.turn.sharing import join, share_again
from rollout_worker.engines.sampling.batch_rows import SampledRow, SampledRows
from rollout_worker.engines.sampling.token_draw import DrawRecords, draw_tokens, pack_mask_row
from rollout_worker.engines.sglang.settings import UNREAD_INTERVAL_SECONDS
from rollout_worker.engines.sglang.sglang_records import install_records, sampled_masks

from . import loader
from .sglang_grammars import install_grammars, take_masks

NEVER_INTERVAL = 1 << 30
REPLACED_BACKENDS = ("flashinfer", "pytorch")
"""SGLang's samplers that ours replaces; the platform decides which one SGLang asks for."""

_installed = False


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Run a scheduler of SGLang with our changes."""
    die_with_parent()
    join()  # before anything touches the device
    install_patches()
    return run_scheduler_process(*args, **kwargs)


def install_patches() -> None:
    """Patch SGLang in this process, before it starts."""
    global _installed
    if _installed:
        return
    _installed = True
    _register_sampler()
    install_grammars()
    install_records()
    # The methods that `serving` calls in all schedulers.
    Scheduler.rollout_keep = loader.spill_weights
    Scheduler.rollout_bring_back = loader.restore_weights
    Scheduler.rollout_forget = loader.drop_spilled_weights
    Scheduler.rollout_meet = loader.wait_for_ranks
    Scheduler.rollout_share_turn = lambda _: share_again()
    Scheduler.rollout_check = loader.check_updatable
    Scheduler.rollout_map = loader.map_sink
    Scheduler.rollout_unmap = loader.unmap_sink
    Scheduler.rollout_freeze_heap = lambda _: freeze_heap()
    _sleep_while_paused()
    _keep_answers_in_order()
    _batch_unread_tokens()
    _leave_processors_out()
    # Segments in /dev/shm outlive a killed process; our folder is deleted with the engine.
    load_snapshot.shm_path_for = lambda name: os.path.join(
        tempfile.gettempdir(), f"loads-{os.path.basename(name)}"
    )


def _leave_processors_out() -> None:
    """Start without SGLang's processors of pictures: `child_pictures` makes the inputs."""

    def skip_processors(self: Any) -> None:
        self.tokenizer = self.processor = self.mm_processor = None

    TokenizerManager.init_tokenizer_and_processor = skip_processors


def _sleep_while_paused() -> None:
    """Wait for commands while paused: SGLang's loop would spin, and its watchdog end it as hung (`--watchdog-timeout`)."""
    record = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_rest(self: Any) -> None:
        record(self)
        self.cur_batch_for_debug = None  # by which the watchdog knows that a step is owed
        if self.idle_sleeper is not None:
            self.idle_sleeper.maybe_sleep()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_rest


def _keep_answers_in_order() -> None:
    """Send tokens and answers through one socket: two of them may overtake each other."""
    create = SchedulerIpcChannels.create

    def create_ordered(cls: Any, /, **kwargs: Any) -> Any:
        channels = create(**kwargs)
        if not kwargs["skip_tokenizer_init"]:
            return channels
        return replace(channels, send_to_detokenizer=channels.send_to_tokenizer)

    SchedulerIpcChannels.create = classmethod(create_ordered)


def _requests_with_unsent_tokens(scheduler: Any) -> Iterator[Any]:
    batches = [b.reqs for b in (scheduler.running_batch, scheduler.last_batch) if b is not None]
    # A retracted request waits in the queue; where steps overlap, the pause has given it one more token.
    for req in itertools.chain(*batches, scheduler.waiting_queue):
        if not req.finished() and len(req.output_ids) > req.send_token_offset:
            yield req


def _batch_unread_tokens() -> None:
    """Send tokens that nobody reads as they come at intervals, and before a pause."""
    send, pause = SchedulerOutputStreamer._stream_output_generation, Scheduler.pause_generation
    last = 0.0

    def send_due(self: Any, reqs: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        nonlocal last
        now = time.monotonic()
        due = now - last >= UNREAD_INTERVAL_SECONDS
        if due:
            last = now
        for req in reqs:
            if (req.sampling_params.custom_params or {}).get("unread"):
                # SGLang sends the first and the last tokens at once whatever the interval.
                req.sampling_params.stream_interval = 1 if due else NEVER_INTERVAL
        send(self, reqs, *args, **kwargs)

    def pause_and_send(self: Any, command: Any) -> None:
        nonlocal last
        pause(self, command)
        rest = {req.rid: req for req in _requests_with_unsent_tokens(self)}
        if rest:
            last = 0.0
            logprobs = any(req.return_logprob for req in rest.values())
            self.output_streamer.stream_output(list(rest.values()), logprobs)

    SchedulerOutputStreamer._stream_output_generation = send_due
    Scheduler.pause_generation = pause_and_send


class RolloutSampler(sampler.Sampler):  # type: ignore[misc]
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
        records = DrawRecords()
        masks = take_masks(sampling_info)
        heat = sampling_info.temperatures
        tokens, logprobs = draw_tokens(logits, rows, heat, positions, records, masks)
        if return_logprob:
            logits_output.next_token_logprobs = logprobs
        if records.allowed:
            packed = {row: pack_mask_row(each) for row, each in records.allowed.items()}
            logits_output.customized_info = sampled_masks(packed, len(rows))
        if records.top:
            none = tokens.new_empty(0), logprobs.new_empty(0)
            ids, values = zip(
                *(records.top.get(row, none) for row in range(len(rows))), strict=True
            )
            logits_output.next_token_top_logprobs_idx = list(ids)
            logits_output.next_token_top_logprobs_val = list(values)
        tokens = tokens.to(torch.int32)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def _rows_from_batch(self: Any, batch: Any, vocab_size: int) -> None:
    self.rollout_rows = SampledRows(
        [_make_row(request) for request in batch.reqs], torch.device(batch.device)
    )


def _make_row(request: Any) -> SampledRow:
    asks = request.sampling_params.custom_params or {"greedy": request.sampling_params.top_k == 1}
    return SampledRow(
        # In the other list placeholders are replaced by numbers that stand for pictures.
        asks,
        tuple(request.origin_input_ids_unpadded),
        tuple(request.output_ids),
    )


def _filter_rows(self: Any, keep_indices: Sequence[int], keep_indices_device: Any) -> None:
    if getattr(self, "rollout_rows", None) is not None:
        self.rollout_rows = self.rollout_rows.select_rows([int(index) for index in keep_indices])


def _merge_rows(self: Any, other: Any) -> None:
    mine, theirs = getattr(self, "rollout_rows", None), getattr(other, "rollout_rows", None)
    self.rollout_rows = None if mine is None or theirs is None else mine.with_rows(theirs)


def _register_sampler() -> None:
    # SGLang keeps what requests ask for in one `SamplingBatchInfo` for each batch, which it filters and
    # merges as requests come and go; our `SampledRows` is filtered and merged with it.
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
        sampler.register_sampler_backend(backend, RolloutSampler)
