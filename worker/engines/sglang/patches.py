"""Our changes to each process of SGLang: extensions, and repairs of its faults."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.managers import load_snapshot
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from rollout_common.turn.sharing import join

from . import loader, sampler
from .child import die_with_parent
from .settings import UNREAD_INTERVAL_SECONDS

NEVER_INTERVAL = 1 << 30

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
    sampler.register_sampler()
    # The methods that `serving` calls in all schedulers.
    Scheduler.rollout_keep = loader.spill_weights
    Scheduler.rollout_bring_back = loader.restore_weights
    Scheduler.rollout_forget = loader.drop_spilled_weights
    Scheduler.rollout_meet = loader.wait_for_ranks
    Scheduler.rollout_check = loader.check_updatable
    Scheduler.rollout_map = loader.map_sink
    Scheduler.rollout_unmap = loader.unmap_sink
    _sleep_while_paused()
    _keep_answers_in_order()
    _batch_unread_tokens()
    # Segments in /dev/shm outlive a killed process; our folder is deleted with the engine.
    load_snapshot.shm_path_for = _snapshot_path


def _snapshot_path(ipc_name: str) -> str:
    return os.path.join(tempfile.gettempdir(), f"loads-{os.path.basename(ipc_name)}")


def _sleep_while_paused() -> None:
    """Wait for commands while paused: SGLang's loop would spin."""
    record = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_rest(self: Any) -> None:
        record(self)
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
