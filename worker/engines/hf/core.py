"""The queue, who runs, and one step after another; synchronous, owned by the step thread.

Running output i is row i of the KV cache. A step admits what fits, feeds prefixes to the model (at
most `prefill_tokens` a step), then one token of every output that is decoding, and delivers what
was drawn. Weights, KV and admission change only between steps, through the methods below.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch

from rollout_worker.engine import EngineDelta, KvPolicy
from rollout_worker.schemas import CHECKPOINT, AbortReason, WeightsId

from .forward import Forward
from .kv import KvRows
from .sampling import draw
from .sequence import Sequence

logger = logging.getLogger(__name__)

Delivery = tuple[Sequence, EngineDelta]


@dataclass(slots=True)
class Totals:
    """What happened since the start, for `metrics`."""

    steps: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Census:
    """Who runs and how many wait."""

    running: frozenset[str] = frozenset()
    queued: int = 0


class Core:
    """State of the batch; every method runs between two steps."""

    def __init__(
        self,
        forward: Forward,
        kv: KvRows,
        deliver: Callable[[list[Delivery]], None],
        *,
        max_rows: int,
        max_tokens: int,
        prefill_tokens: int,
    ) -> None:
        self._forward = forward
        self._kv = kv
        self._deliver = deliver
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._prefill_tokens = prefill_tokens
        self._waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.identity: WeightsId = CHECKPOINT
        self.paused = False
        self.held = False
        self.unfit = False  # memory is away: no step can be made
        self.totals = Totals()
        self.census = Census()

    def _count(self) -> None:
        """Publish who is here, for other threads: one assignment, so never half of it."""
        names = frozenset(sequence.request.request_id for sequence in self.running)
        self.census = Census(names, len(self._waiting))

    def can_step(self) -> bool:
        """Return whether a step has anything to do and may do it."""
        waiting = bool(self._waiting) and not self.held
        return not self.paused and not self.unfit and (bool(self.running) or waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue an output."""
        heapq.heappush(self._waiting, sequence)
        self._count()

    def abort(self, ids: Collection[str] | None, reason: AbortReason) -> set[str]:
        """End outputs with what they have; None: all. Returns the ids that were known."""
        wanted = None if ids is None else set(ids)
        ended = [
            sequence
            for sequence in (*self.running, *self._waiting)
            if wanted is None or sequence.request.request_id in wanted
        ]
        deliveries = [(sequence, sequence.aborted(reason)) for sequence in ended]
        self._waiting = [sequence for sequence in self._waiting if not sequence.done]
        heapq.heapify(self._waiting)
        self._leave()
        self._deliver(deliveries)
        return {sequence.request.request_id for sequence in ended}

    def commit(self, identity: WeightsId, kv: KvPolicy) -> None:
        """Stamp tokens with `identity` from now on; the weights were swapped just before."""
        self.identity = identity
        for sequence in self.running:
            # An unfinished prefill of an output without tokens is begun again: that makes its
            # tokens of one version, at the cost of less than a prompt.
            if kv == "recompute" or not sequence.produced:
                sequence.forget_kv()
            else:
                sequence.stale = sequence.stale or sequence.cached > 0

    def lose_kv(self) -> None:
        """Give the KV cache back; what runs is prefilled again when there is memory again."""
        for sequence in self.running:
            sequence.preemptions += 1 if sequence.cached else 0
            sequence.forget_kv()
        self._kv.drop()

    def step(self) -> None:
        """Make one step."""
        begin = time.monotonic()
        self._admit()
        for group, width in self._prefill_groups():
            feeds = [s.tokens[s.cached : s.cached + width] for s in group]
            self.totals.prefill_tokens += sum(map(len, feeds))
            self._advance(group, feeds)
        # Outputs amid their prefill keep their rows and feed nothing.
        feeds = [s.tokens[-1:] if s.pending == 1 else [] for s in self.running]
        if any(feeds):
            self.totals.decode_tokens += sum(map(len, feeds))
            self._advance(list(self.running), feeds)
        self.totals.steps += 1
        self.totals.step_seconds += time.monotonic() - begin

    def _admit(self) -> None:
        """Start what waits, in order, as long as rows and tokens allow."""
        before = len(self.running)
        while self._may_admit():
            self._kv.clear(len(self.running))
            sequence = heapq.heappop(self._waiting)
            sequence.started = time.monotonic()
            self.running.append(sequence)
        if len(self.running) > before:
            self._count()

    def _may_admit(self) -> bool:
        if not self._waiting or self.held or len(self.running) >= self._max_rows:
            return False
        # The cache is a rectangle: every row may become as long as the longest.
        longest = max(sequence.reserved for sequence in (*self.running, self._waiting[0]))
        return not self.running or (len(self.running) + 1) * longest <= self._max_tokens

    def _prefill_groups(self) -> Iterable[tuple[list[Sequence], int]]:
        """Yield groups of like length with the number of tokens to feed each, longest first."""
        budget = self._prefill_tokens
        todo = sorted(
            (sequence for sequence in self.running if sequence.pending > 1),
            key=lambda sequence: (sequence.request.priority, sequence.arrival),
        )
        while todo and budget > 0:
            width = min(todo[0].pending, budget)
            alike = [s for s in todo if width // 2 <= s.pending <= width or s is todo[0]]
            group = alike[: max(1, budget // width)]
            budget -= width * len(group)
            todo = [sequence for sequence in todo if sequence not in group]
            yield group, width

    def _advance(self, group: list[Sequence], feeds: list[list[int]]) -> None:
        """Feed tokens to a group; draw for those that have no more to feed."""
        row_of = {id(sequence): row for row, sequence in enumerate(self.running)}
        starts = [sequence.cached for sequence in group]
        ends = [start + max(1, len(feed)) for start, feed in zip(starts, feeds, strict=True)]
        columns = max(*ends, *(sequence.cached for sequence in self.running))
        longest = max(sequence.reserved for sequence in self.running)
        self._kv.reserve(len(self.running), columns, longest)
        logits = self._forward.run([row_of[id(s)] for s in group], feeds, starts)
        for sequence, feed in zip(group, feeds, strict=True):
            sequence.cached += len(feed)
        drawn = [i for i, s in enumerate(group) if feeds[i] and s.pending == 0]
        if drawn:
            self._draw([group[i] for i in drawn], logits[torch.tensor(drawn, device=logits.device)])

    def _draw(self, rows: list[Sequence], logits: torch.Tensor) -> None:
        deliveries: list[Delivery] = []
        for sequence, choice in zip(rows, draw(logits, rows), strict=True):
            if choice is None:
                logger.error(
                    "weights %s give logits that are not finite; request %s is aborted",
                    self.identity,
                    sequence.request.request_id,
                )
                deliveries.append((sequence, sequence.aborted(AbortReason.ENGINE)))
            else:
                deliveries.append((sequence, sequence.take(choice, self.identity)))
        self._leave()
        self._deliver(deliveries)

    def _leave(self) -> None:
        """Free the rows of what ended: the last row takes the place of each."""
        row = 0
        while row < len(self.running):
            if not self.running[row].done:
                row += 1
                continue
            last = self.running.pop()
            if row < len(self.running):
                self._kv.move(len(self.running), row, last.cached)
                self.running[row] = last
        self._count()
