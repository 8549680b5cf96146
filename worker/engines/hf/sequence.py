"""One output in the making."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout_worker.engine import EngineDelta, EngineRequest
from rollout_worker.engines.stopping import StopChecker, Verdict
from rollout_worker.schemas import (
    AbortReason,
    LogprobsOf,
    StopReason,
    WeightsId,
    WeightsSpan,
)

from .processing import SamplerState
from .sampling import random_key


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way: prompt and output so far, and how much of it the KV cache holds.

    The rest (`pending`) must go through the model: one token in normal decoding, the whole prefix
    at first and after its KV was lost. `stale` says that the KV holds entries of older weights,
    `pinned` that it runs on the weights before the active ones. Tokens are handed over by `delta`,
    one or many at a time.
    """

    request: EngineRequest
    sampler: SamplerState
    stop: StopChecker
    arrival: int
    sink: Callable[[EngineDelta], None]
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    stale: bool = False
    pinned: bool = False
    preemptions: int = 0
    key: int = 0
    done: bool = False
    entered: float = field(default_factory=time.monotonic)
    started: float | None = None
    _prompt: int = 0
    _delivered: int = 0
    _logprobs: list[float] = field(default_factory=list)
    _spans: list[tuple[WeightsId, bool, int]] = field(default_factory=list)
    _verdict: Verdict | None = None
    _abort: AbortReason | None = None
    _not_finite: WeightsId | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.token_ids)
        self._prompt = len(self.tokens)
        given = self.request.sampling.seed
        self.key = random_key(secrets.randbits(63) if given is None else given)

    def __lt__(self, other: Sequence) -> bool:
        """Order of the queue: priority, then arrival."""
        mine = (self.request.priority, self.arrival)
        return mine < (other.request.priority, other.arrival)

    @property
    def produced(self) -> int:
        """Length of the output so far."""
        return len(self.tokens) - self._prompt

    @property
    def logprobs_of(self) -> LogprobsOf | None:
        """Which log-probability to record."""
        return self.request.logprobs

    @property
    def pending(self) -> int:
        """How many tokens the model has not seen yet."""
        return len(self.tokens) - self.cached

    @property
    def reserved(self) -> int:
        """Longest that it can become, in tokens."""
        return self._prompt + (self.request.sampling.max_tokens or 1)

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for what is undelivered: its first token, or its end."""
        return self.done or not self._delivered

    @property
    def waits(self) -> bool:
        """Whether it has tokens that were not handed over."""
        return self.produced > self._delivered

    def forget_kv(self) -> None:
        """Nothing of it is in the KV cache any more."""
        self.cached = 0
        self.stale = False

    def take(self, token: int, logprob: float, weights: WeightsId) -> None:
        """Append a drawn token; sets `done` with the last one."""
        start = self.produced
        last = self._spans[-1] if self._spans else None
        if last is None or last[0] is not weights or last[1] is not self.stale:
            self._spans.append((weights, self.stale, start))
        self.tokens.append(token)
        self._logprobs.append(logprob)
        self._verdict = self.stop.check(token, start + 1)
        self.done = self._verdict is not None

    def abort(self, reason: AbortReason, not_finite: WeightsId | None = None) -> None:
        """End it from outside, or because of weights whose logits are not finite; what it has stays."""
        self.done = True
        self._abort, self._not_finite = reason, not_finite

    def delta(self) -> EngineDelta:
        """Return what is new since the last call; with the reason of the end once it is done."""
        begin, end = self._delivered, self.produced
        reason, match = self._verdict or (None, None)
        if self._abort is not None:
            reason, match = StopReason.ABORTED, None
        logprobs = None if self.request.logprobs is None else tuple(self._logprobs)
        found = EngineDelta(
            token_ids=tuple(self.tokens[self._prompt + begin :]),
            logprobs=logprobs,
            spans=self._new_spans(end),
            stop_reason=reason,
            stop_match=match,
            abort_reason=self._abort,
            not_finite=self._not_finite,
            preemptions=self.preemptions,
            queued_seconds=(self.started or time.monotonic()) - self.entered,
        )
        self._delivered = end
        self._logprobs.clear()
        return found

    def _new_spans(self, end: int) -> tuple[WeightsSpan, ...]:
        stops = [*(start for _, _, start in self._spans[1:]), end][: len(self._spans)]
        spans = tuple(
            WeightsSpan(
                epoch=weights.epoch,
                version=weights.version,
                start=start,
                end=stop,
                stale_kv=stale,
            )
            for (weights, stale, start), stop in zip(self._spans, stops, strict=True)
        )
        self._spans.clear()
        return spans
