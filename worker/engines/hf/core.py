"""The admission queue, the running outputs and their steps; synchronous, owned by the step thread.

Running output i is row i of the KV cache. A step admits what fits and feeds the model, in one pass,
one token of every output that is decoding and pieces of the prefixes of those that are not, then
draws a token for all whose prefix is complete. Weights, KV and admission change only between steps,
through the methods below. Outputs pinned to the former weights get a pass of their own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rollout_common.wire import CHECKPOINT, AbortReason, MemoryTag, WeightsId
from rollout_worker.engine import EngineDelta, KvPolicy
from rollout_worker.engines.admission_queue import AdmissionQueue

from .forward import ForwardRunner, RowFeed
from .kv import KvRows
from .lora_layers import HfAdapter
from .picture_features import PictureEncoder
from .sequence import NO_RECORD, BatchSampler, OutputSequence, TokenRecord
from .settings import SEND_INTERVAL_SECONDS
from .weights.weights_memory import WeightsMemory

logger = logging.getLogger(__name__)

DeltaDelivery = tuple[OutputSequence, EngineDelta]

SCORED_LOGITS = 1 << 26
"""Logits of prompts that are scored in one pass: 256 MB in float32, some 400 positions of a vocabulary of 152,000."""


@dataclass(slots=True)
class StepTotals:
    """Counts since the start, for `metrics`."""

    steps: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchCensus:
    """Which requests run, which of them on the former weights, how many wait, and the share of the KV cache in use."""

    running: frozenset[str] = frozenset()
    queued: int = 0
    pinned: frozenset[str] = frozenset()
    kv_usage: float = 0.0


class BatchCore:
    """State of the batch; every method runs between two steps."""

    def __init__(
        self,
        forward: ForwardRunner,
        kv: KvRows,
        weights: WeightsMemory,
        deliver: Callable[[list[DeltaDelivery]], None],
        *,
        max_rows: int,
        max_tokens: int,
        prefill_tokens: int,
        encoder: PictureEncoder | None = None,
    ) -> None:
        self._forward = forward
        self._encoder = encoder
        self._kv = kv
        self._weights = weights
        self._deliver = deliver
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._prefill_tokens = prefill_tokens
        self._renew_samplers()
        self.queue = AdmissionQueue[OutputSequence](self._has_capacity, self._start_output)
        self.running: list[OutputSequence] = []
        self._unsent: list[OutputSequence] = []
        self._sent = 0.0
        self.identity: WeightsId = CHECKPOINT
        self._pinned: WeightsId | None = None
        self._adapters: dict[bool, Mapping[str, HfAdapter]] = {False: {}, True: {}}
        """Of the active weights, and of those before them that outputs are pinned to."""
        self.paused = False
        self.asleep: set[MemoryTag] = set()  # while there is some, no step can be made
        self.totals = StepTotals()
        self.census = BatchCensus()

    def _publish_counts(self) -> None:
        """Publish what runs, for other threads: in one assignment, so that they never see half of it."""
        names = frozenset(sequence.request.request_id for sequence in self.running)
        pinned = frozenset(s.request.request_id for s in self.running if s.pinned)
        # What they may fill, not what they have filled: it decides on the next one (`_has_capacity`).
        longest = max((sequence.reserved_tokens for sequence in self.running), default=0)
        kv_usage = len(self.running) * longest / self._max_tokens
        self.census = BatchCensus(names, len(self.queue), pinned, kv_usage)

    def check_weights(self) -> None:
        """Refuse to go on with weights that the trainer has changed, as `WeightsMemory.check_unchanged`."""
        self._weights.check_unchanged()

    def can_step(self) -> bool:
        """Return whether a step has anything to do and may do it."""
        waiting = len(self.queue) > 0 and self.queue.is_open
        return not self.paused and not self.asleep and (bool(self.running) or waiting)

    def add_request(self, sequence: OutputSequence) -> None:
        """Queue an output."""
        self.queue.add_request(sequence)
        self._publish_counts()

    def abort_requests(self, ids: Collection[str] | None, reason: AbortReason) -> set[str]:
        """End outputs (None: all) with the tokens they have. Returns the ids that were known."""
        wanted = None if ids is None else set(ids)
        ended = [
            sequence
            for sequence in (*self.running, *self.queue.requests)
            if wanted is None or sequence.request.request_id in wanted
        ]
        for sequence in ended:
            sequence.abort_output(reason)
        self.queue.remove_done()
        self._free_rows()
        self._publish_counts()
        self._deliver([(sequence, sequence.take_delta()) for sequence in ended])
        return {sequence.request.request_id for sequence in ended}

    def commit_weights(
        self, identity: WeightsId, kv: KvPolicy, adapters: Mapping[str, HfAdapter]
    ) -> None:
        """Stamp tokens with `identity` from now on, and apply its adapters; the weights were swapped just before."""
        former, self.identity = self.identity, identity
        self._adapters = {False: adapters, True: self._adapters[False]}
        self._forward.lora.prepare_layers(adapters)
        for sequence in self.running:
            if kv == "pin" and not sequence.pinned:
                sequence.pinned = True
                continue
            sequence.pinned = False
            # An output without tokens begins its prefill again: all its tokens are then made by one
            # version, at the cost of less than a prompt.
            if kv == "recompute" or not sequence.produced:
                sequence.forget_kv()
            else:
                sequence.stale = sequence.stale or sequence.cached > 0
        self._pinned = former
        self._release_pinned()
        if self._encoder is not None:
            self._encoder.forget_features(
                [identity] if self._pinned is None else [identity, former]
            )
        self._renew_samplers()
        self._publish_counts()

    def drop_kv(self) -> None:
        """Give the KV cache back; what runs is prefilled again once there is memory."""
        for sequence in self.running:
            sequence.preemptions += 1 if sequence.cached else 0
            sequence.forget_kv()
        self._kv.drop_rows()
        if self._encoder is not None:
            self._encoder.forget_features()

    def unpin_outputs(self) -> None:
        """Let pinned outputs go on with the active weights, prefilled again."""
        for sequence in self.running:
            if sequence.pinned:
                sequence.pinned = False
                sequence.forget_kv()
        self._release_pinned()
        self._renew_samplers()
        self._publish_counts()

    def _renew_samplers(self) -> None:
        """Forget the batches of active and pinned outputs: their counts lack what an output made in the other one."""
        self._samplers = {False: BatchSampler(), True: BatchSampler()}

    def _release_pinned(self) -> None:
        """Give the former weights back once none of their outputs runs."""
        if self._pinned is not None and not any(sequence.pinned for sequence in self.running):
            self._pinned = None
            self._adapters[True] = {}
            self._weights.release_pinned()

    def run_step(self) -> None:
        """Make one step."""
        begin = time.monotonic()
        self._admit_requests()
        if self._pinned is None:
            self._run_group(self.running, self.identity, pinned=False)
        else:
            old = [sequence for sequence in self.running if sequence.pinned]
            self._weights.use_weights(pinned=True)
            try:
                self._run_group(old, self._pinned, pinned=True)
            finally:
                self._weights.use_weights(pinned=False)
            new = [sequence for sequence in self.running if not sequence.pinned]
            self._run_group(new, self.identity, pinned=False)
        self._free_rows()
        now = time.monotonic()
        self.totals.steps += 1
        self.totals.step_seconds += now - begin
        self._send_deltas(everything=now - self._sent >= SEND_INTERVAL_SECONDS)

    def flush_deltas(self) -> None:
        """Hand over tokens that wait for more to come."""
        self._send_deltas(everything=True)

    def _send_deltas(self, *, everything: bool) -> None:
        if everything:
            self._sent = time.monotonic()
            chosen, self._unsent = self._unsent, []
        else:
            chosen = [sequence for sequence in self._unsent if sequence.is_urgent]
            if chosen:
                self._unsent = [sequence for sequence in self._unsent if not sequence.is_urgent]
        self._deliver([(sequence, sequence.take_delta()) for sequence in chosen])

    def _admit_requests(self) -> None:
        before = len(self.running)
        self.queue.admit_requests()
        if len(self.running) > before:
            self._publish_counts()

    def _start_output(self, sequence: OutputSequence) -> None:
        self._kv.clear(len(self.running))
        sequence.started = time.monotonic()
        self.running.append(sequence)

    def _has_capacity(self, sequence: OutputSequence) -> bool:
        if len(self.running) >= self._max_rows:
            return False
        # The cache is a rectangle: every row may become as long as the longest.
        longest = max(each.reserved_tokens for each in (*self.running, sequence))
        return not self.running or (len(self.running) + 1) * longest <= self._max_tokens

    def _run_group(self, group: list[OutputSequence], weights: WeightsId, *, pinned: bool) -> None:
        """Make one pass for a group, and draw for those that have no more to feed."""
        group = self._with_adapters(group, pinned=pinned)
        if not group:
            return
        row_of = {id(sequence): row for row, sequence in enumerate(self.running)}
        singles = [each for each in group if each.pending_tokens == 1 and each.scoring is None]
        parts = self._plan_prefill(group)

        def feed(sequence: OutputSequence, count: int) -> RowFeed:
            start = sequence.cached
            tokens = sequence.tokens[start : start + count]
            wanted = [*sequence.scored_tokens(count)]
            if sequence.is_drawn_after(count):
                wanted.append(count - 1)
            end, encoder = start + count, self._encoder
            part = encoder.part_between(sequence.pictures, start, end, weights) if encoder else None
            adapter = self._adapters[pinned].get(sequence.request.adapter or "")
            return RowFeed(row_of[id(sequence)], start, tokens, wanted, part, adapter)

        feeds = [feed(sequence, 1) for sequence in singles], [feed(s, n) for s, n in parts]
        self._reserve_kv(max(each.end for part in feeds for each in part))
        rows = [*singles, *(s for s, count in parts if s.is_drawn_after(count))]
        routed = any(each.routes is not None for each in group)
        found, routes = self._forward.run_pass(*feeds, routed=routed)
        logits = self._score_prompts(found, len(singles), parts)
        records: dict[int, TokenRecord] = {}
        drawn = self._samplers[pinned].draw_tokens(logits, rows, records) if rows else ([], [])
        # The pass may have read what was changed while it ran; it ends, on a GPU, when its results are read.
        self._weights.check_unchanged()
        at = 0
        for sequence, count in (*((s, 1) for s in singles), *parts):
            if sequence.routes is not None:
                size = sequence.routes.row_bytes
                sequence.append_routes(routes[at * size : (at + count) * size], count)
            at += count
            sequence.cached += count
            self._finish_prompt(sequence, weights)
        for row, (sequence, token, logprob) in enumerate(zip(rows, *drawn, strict=True)):
            if not sequence.done:  # its prompt's scores are not finite
                self._take_token(sequence, token, logprob, weights, records.get(row, NO_RECORD))
        self.totals.decode_tokens += len(singles)
        self.totals.prefill_tokens += sum(count for _, count in parts)

    def _with_adapters(self, group: list[OutputSequence], *, pinned: bool) -> list[OutputSequence]:
        """Return a group without the outputs whose adapter is gone, which end: no other weights may go on with them."""
        known = self._adapters[pinned]
        gone = [each for each in group if each.request.adapter not in (None, *known)]
        for sequence in gone:
            sequence.abort_output(AbortReason.WEIGHTS)
        self._unsent.extend(each for each in gone if each not in self._unsent)
        return [each for each in group if not each.done] if gone else group

    def _score_prompts(
        self, logits: Tensor, singles: int, parts: Sequence[tuple[OutputSequence, int]]
    ) -> Tensor:
        """Score what the pass read of prompts; return the logits [K, V] to draw from, without those of the prompts."""
        kept, at = [*range(singles)], singles
        for sequence, count in parts:
            scored = len(sequence.scored_tokens(count))
            if scored:
                sequence.score_tokens(logits[at : at + scored], count)
                at += scored
            if sequence.is_drawn_after(count):
                kept.append(at)
                at += 1
        return logits if len(kept) == len(logits) else logits[kept]

    def _finish_prompt(self, sequence: OutputSequence, weights: WeightsId) -> None:
        if sequence.scoring is None or sequence.pending_tokens:
            return
        sequence.finish_prompt(weights)
        if sequence.done:
            self._log_not_finite(sequence)
            self._unsent.append(sequence)

    def _plan_prefill(self, group: list[OutputSequence]) -> list[tuple[OutputSequence, int]]:
        """Return outputs and how much of their prefixes to feed, in order."""
        todo = [each for each in group if each.pending_tokens > 1 or each.scoring is not None]
        budget = self._prefill_tokens
        room = max(1, SCORED_LOGITS // self._forward.vocab_size)
        found = []
        for sequence in sorted(todo, key=lambda s: (s.request.priority, s.arrival)):
            count = min(sequence.pending_tokens, budget)
            scored = sequence.scored_tokens(count)
            if len(scored) > room:
                count = scored.start + room
                scored = sequence.scored_tokens(count)
            if not count:
                continue
            room -= len(scored)
            found.append((sequence, count))
            budget -= count
            if not budget:
                break
        return found

    def _reserve_kv(self, columns: int) -> None:
        longest = max(sequence.reserved_tokens for sequence in self.running)
        columns = max(columns, *(sequence.cached for sequence in self.running), 1)
        self._kv.reserve_rows(len(self.running), columns, longest)

    def _take_token(
        self,
        sequence: OutputSequence,
        token: int,
        logprob: float,
        weights: WeightsId,
        record: TokenRecord,
    ) -> None:
        waits = sequence.has_undelivered
        if math.isfinite(logprob):
            sequence.append_token(token, logprob, weights, record)
        else:
            sequence.abort_output(AbortReason.ENGINE, not_finite=weights)
            self._log_not_finite(sequence)
        if not waits:
            self._unsent.append(sequence)

    @staticmethod
    def _log_not_finite(sequence: OutputSequence) -> None:
        if sequence.not_finite is not None:
            logger.error(
                "weights %s give logits that are not finite; request %s is aborted",
                sequence.not_finite,
                sequence.request.request_id,
            )

    def _free_rows(self) -> None:
        """Free the rows of outputs that ended: the last row moves into each."""
        row, before = 0, len(self.running)
        while row < len(self.running):
            if not self.running[row].done:
                row += 1
                continue
            last = self.running.pop()
            if row < len(self.running):
                self._kv.move_row(len(self.running), row, last.cached)
                self.running[row] = last
        if len(self.running) < before:
            self._release_pinned()
            self._publish_counts()
