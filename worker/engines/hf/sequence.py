"""One output in the making."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout_worker.engine import EngineDelta, EngineRequest
from rollout_worker.schemas import (
    AbortReason,
    LogprobsOf,
    StopMatch,
    StopReason,
    WeightsId,
    WeightsSpan,
)

from .sampling import Choice, SamplerState
from .stopping import StopChecker


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way: prompt and output so far, and how much of it the KV cache holds.

    The rest (`pending`) must go through the model: one token in normal decoding, the whole prefix
    at first and after its KV was lost. `stale` says that the KV holds entries of older weights.
    """

    request: EngineRequest
    sampler: SamplerState
    stop: StopChecker
    arrival: int
    sink: Callable[[EngineDelta], None]
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    stale: bool = False
    preemptions: int = 0
    seed: int = 0
    done: bool = False
    entered: float = field(default_factory=time.monotonic)
    started: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.token_ids)
        given = self.request.sampling.seed
        self.seed = secrets.randbits(63) if given is None else given

    def __lt__(self, other: Sequence) -> bool:
        """Order of the queue: priority, then arrival."""
        mine = (self.request.priority, self.arrival)
        return mine < (other.request.priority, other.arrival)

    @property
    def produced(self) -> int:
        """Length of the output so far."""
        return len(self.tokens) - len(self.request.token_ids)

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
        return len(self.request.token_ids) + (self.request.sampling.max_tokens or 1)

    def forget_kv(self) -> None:
        """Nothing of it is in the KV cache any more."""
        self.cached = 0
        self.stale = False

    def take(self, choice: Choice, weights: WeightsId) -> EngineDelta:
        """Append a drawn token and return the delta to send; sets `done` with the last one."""
        start = self.produced
        self.tokens.append(choice.token)
        self.sampler.count(choice.token)
        verdict = self.stop.check(choice.token, start + 1)
        self.done = verdict is not None
        reason, match = verdict or (None, None)
        span = WeightsSpan(
            epoch=weights.epoch,
            version=weights.version,
            start=start,
            end=start + 1,
            stale_kv=self.stale,
        )
        logprobs = None if self.request.logprobs is None else (choice.logprob,)
        return self._delta((choice.token,), logprobs, (span,), reason, match, None)

    def aborted(self, reason: AbortReason) -> EngineDelta:
        """Return the last delta of an output that was ended from outside."""
        self.done = True
        logprobs = None if self.request.logprobs is None else ()
        return self._delta((), logprobs, (), StopReason.ABORTED, None, reason)

    def _delta(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[float, ...] | None,
        spans: tuple[WeightsSpan, ...],
        reason: StopReason | None,
        match: StopMatch | None,
        abort: AbortReason | None,
    ) -> EngineDelta:
        return EngineDelta(
            token_ids=token_ids,
            logprobs=logprobs,
            spans=spans,
            stop_reason=reason,
            stop_match=match,
            abort_reason=abort,
            preemptions=self.preemptions,
            queued_seconds=(self.started or time.monotonic()) - self.entered,
        )
