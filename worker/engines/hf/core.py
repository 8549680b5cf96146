"""The queue, who runs, and one step after another; synchronous, owned by the step thread; whole.

Running output i is row i of the KV cache. A step admits what fits and feeds the model, in one pass,
one token of every output that is decoding and pieces of the prefixes of those that are not, then
draws a token for all that are complete. Weights, KV and admission change only between steps,
through the methods below. Outputs pinned to the former weights get a pass of their own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection

from rollout_common.wire import CHECKPOINT, AbortReason, WeightsId
from rollout_worker.engine import EngineDelta, KvPolicy
from rollout_worker.engines.admission_queue import AdmissionQueue

from .forward import ForwardRunner, RowFeed
from .kv import KvRows
from .metrics import BatchCensus, StepTotals
from .prefill_pace import PrefillPace
from .sampling import BatchSampler
from .sequence import OutputSequence
from .settings import SEND_INTERVAL_SECONDS
from .weights.weights_memory import WeightsMemory

logger = logging.getLogger(__name__)

DeltaDelivery = tuple[OutputSequence, EngineDelta]


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
        pace: PrefillPace,
    ) -> None:
        self._forward = forward
        self._kv = kv
        self._weights = weights
        self._deliver = deliver
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._pace = pace
        self._samplers = {False: BatchSampler(), True: BatchSampler()}
        self.queue = AdmissionQueue[OutputSequence](self._has_capacity, self._start_output)
        self.running: list[OutputSequence] = []
        self._unsent: list[OutputSequence] = []
        self._sent = 0.0
        self.identity: WeightsId = CHECKPOINT
        self._pinned: WeightsId | None = None
        self.paused = False
        self.unfit = False  # memory is away: no step can be made
        self.totals = StepTotals()
        self.census = BatchCensus()

    def _publish_counts(self) -> None:
        """Publish who is here, for other threads: one assignment, so never half of it."""
        names = frozenset(sequence.request.request_id for sequence in self.running)
        pinned = frozenset(s.request.request_id for s in self.running if s.pinned)
        self.census = BatchCensus(names, len(self.queue), pinned)

    def check_weights(self) -> None:
        """Refuse to go on with weights that somebody else changed.

        Raises:
            EngineError: names a tensor, and the fix.
        """
        self._weights.check_unchanged()

    def can_step(self) -> bool:
        """Return whether a step has anything to do and may do it."""
        waiting = len(self.queue) > 0 and self.queue.is_open
        return not self.paused and not self.unfit and (bool(self.running) or waiting)

    def add_request(self, sequence: OutputSequence) -> None:
        """Queue an output."""
        self.queue.add_request(sequence)
        self._publish_counts()

    def abort_requests(self, ids: Collection[str] | None, reason: AbortReason) -> set[str]:
        """End outputs with what they have; None: all. Returns the ids that were known."""
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

    def commit_weights(self, identity: WeightsId, kv: KvPolicy) -> None:
        """Stamp tokens with `identity` from now on; the weights were swapped just before."""
        former, self.identity = self.identity, identity
        for sequence in self.running:
            if kv == "pin" and not sequence.pinned:
                sequence.pinned = True
                continue
            sequence.pinned = False
            # An unfinished prefill of an output without tokens is begun again: that makes its
            # tokens of one version, at the cost of less than a prompt.
            if kv == "recompute" or not sequence.produced:
                sequence.forget_kv()
            else:
                sequence.stale = sequence.stale or sequence.cached > 0
        self._pinned = former
        self._release_pinned()
        self._publish_counts()

    def drop_kv(self) -> None:
        """Give the KV cache back; what runs is prefilled again when there is memory again."""
        for sequence in self.running:
            sequence.preemptions += 1 if sequence.cached else 0
            sequence.forget_kv()
        self._kv.drop_rows()

    def unpin_outputs(self) -> None:
        """Let pinned outputs go on with the active weights, prefilled anew."""
        for sequence in self.running:
            if sequence.pinned:
                sequence.pinned = False
                sequence.forget_kv()
        self._release_pinned()
        self._publish_counts()

    def _release_pinned(self) -> None:
        """Give the former weights back with their last output."""
        if self._pinned is not None and not any(sequence.pinned for sequence in self.running):
            self._pinned = None
            self._weights.release_pinned()

    def run_step(self) -> None:
        """Make one step."""
        begin = time.monotonic()
        self._admit_requests()
        if self._pinned is None:
            self._run_group(self.running, self.identity, pinned=False)
        else:
            self._run_both_groups(self._pinned)
        self._free_rows()
        now = time.monotonic()
        self.totals.steps += 1
        self.totals.step_seconds += now - begin
        self._send_deltas(everything=now - self._sent >= SEND_INTERVAL_SECONDS)

    def _run_both_groups(self, former: WeightsId) -> None:
        old = [sequence for sequence in self.running if sequence.pinned]
        self._weights.use_weights(pinned=True)
        try:
            self._run_group(old, former, pinned=True)
        finally:
            self._weights.use_weights(pinned=False)
        new = [sequence for sequence in self.running if not sequence.pinned]
        self._run_group(new, self.identity, pinned=False)

    def flush_deltas(self) -> None:
        """Hand over what waits for more tokens to come."""
        self._send_deltas(everything=True)

    def _send_deltas(self, *, everything: bool) -> None:
        if everything:
            self._sent = time.monotonic()
            chosen, self._unsent = self._unsent, []
        else:
            chosen = [sequence for sequence in self._unsent if sequence.is_urgent]
            if chosen:
                self._unsent = [sequence for sequence in self._unsent if not sequence.is_urgent]
        deltas = [(sequence, sequence.take_delta()) for sequence in chosen]
        self._deliver(deltas)

    def _admit_requests(self) -> None:
        """Start what waits, in order, as long as rows and tokens allow."""
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
        if not group:
            return
        # The thread's own time: what others take of a busy machine says nothing of the pass.
        begin = time.thread_time()
        row_of = {id(sequence): row for row, sequence in enumerate(self.running)}
        singles = [sequence for sequence in group if sequence.pending_tokens == 1]
        parts = self._plan_prefill(group)

        def feed(sequence: OutputSequence, count: int) -> RowFeed:
            start = sequence.cached
            return RowFeed(row_of[id(sequence)], start, sequence.tokens[start : start + count])

        feeds = [feed(sequence, 1) for sequence in singles], [feed(s, n) for s, n in parts]
        self._reserve_kv(max(each.end for part in feeds for each in part))
        rows = [*singles, *(s for s, count in parts if count == s.pending_tokens)]
        logits = self._forward.run_pass(*feeds, asked=len(rows) - len(singles))
        for sequence, count in (*((s, 1) for s in singles), *parts):
            sequence.cached += count
        if rows:
            drawn = self._samplers[pinned].draw_tokens(logits, rows)
            self._weights.check_unchanged()  # after the pass: what was changed meanwhile, it may have read
            for sequence, token, logprob in zip(rows, *drawn, strict=True):
                self._take_token(sequence, token, logprob, weights)
        fed = sum(count for _, count in parts)
        self.totals.decode_tokens += len(singles)
        self.totals.prefill_tokens += fed
        self._pace.note_pass(time.thread_time() - begin, fed)

    def _plan_prefill(self, group: list[OutputSequence]) -> list[tuple[OutputSequence, int]]:
        """Return whose prefix to feed how much of, in order; all but the last one to its end."""
        todo = [sequence for sequence in group if sequence.pending_tokens > 1]
        if not todo:
            return []
        budget = self._pace.prefill_budget()
        found = []
        for sequence in sorted(todo, key=lambda s: (s.request.priority, s.arrival)):
            count = min(sequence.pending_tokens, budget)
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
        self, sequence: OutputSequence, token: int, logprob: float, weights: WeightsId
    ) -> None:
        waits = sequence.has_undelivered
        if math.isfinite(logprob):
            sequence.append_token(token, logprob, weights)
        else:
            logger.error(
                "weights %s give logits that are not finite; request %s is aborted",
                weights,
                sequence.request.request_id,
            )
            sequence.abort_output(AbortReason.ENGINE, not_finite=weights)
        if not waits:
            self._unsent.append(sequence)

    def _free_rows(self) -> None:
        """Free the rows of what ended: the last row takes the place of each."""
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
