"""One output in the making."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout_common.wire import AbortReason, StopReason, WeightsId
from rollout_worker.engine import EngineDelta, EngineRequest
from rollout_worker.engines.request_checks import (
    StopChecker,
    StopVerdict,
    make_stop_checker,
    stop_ids,
    with_max_tokens,
)
from rollout_worker.engines.sampling.asks import sampling_asks
from rollout_worker.engines.sampling.batch_rows import SampledRow
from rollout_worker.engines.weight_versions import WeightsChange, spans_within

from .weights.loading import LoadedModel


@dataclass(slots=True, eq=False)
class OutputSequence:
    """A request on its way: prompt and output so far, and how much of it the KV cache holds.

    The rest (`pending_tokens`) must go through the model: one token in normal decoding, the whole prefix
    at first and after its KV was lost. `stale` says that the KV holds entries of older weights,
    `pinned` that it runs on the weights before the active ones. Tokens are handed over by `delta`,
    one or many at a time.
    """

    request: EngineRequest
    row: SampledRow
    stop: StopChecker
    arrival: int
    sink: Callable[[EngineDelta], None]
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    stale: bool = False
    pinned: bool = False
    preemptions: int = 0
    done: bool = False
    entered: float = field(default_factory=time.monotonic)
    started: float | None = None
    _prompt: int = 0
    _delivered: int = 0
    _logprobs: list[float] = field(default_factory=list)
    _changes: list[WeightsChange] = field(default_factory=list)
    _verdict: StopVerdict | None = None
    _abort: AbortReason | None = None
    _not_finite: WeightsId | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.token_ids)
        self._prompt = len(self.tokens)

    @property
    def produced(self) -> int:
        """Length of the output so far."""
        return len(self.tokens) - self._prompt

    @property
    def temperature(self) -> float:
        """What its logits are divided by."""
        return self.request.sampling.temperature

    @property
    def pending_tokens(self) -> int:
        """How many tokens the model has not seen yet."""
        return len(self.tokens) - self.cached

    @property
    def reserved_tokens(self) -> int:
        """Longest that it can become, in tokens."""
        return self._prompt + (self.request.sampling.max_tokens or 1)

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for what is undelivered: its first token, or its end."""
        return self.done or not self._delivered

    @property
    def has_undelivered(self) -> bool:
        """Whether it has tokens that were not handed over."""
        return self.produced > self._delivered

    def forget_kv(self) -> None:
        """Nothing of it is in the KV cache any more."""
        self.cached = 0
        self.stale = False

    def append_token(self, token: int, logprob: float, weights: WeightsId) -> None:
        """Append a drawn token; sets `done` with the last one."""
        start = self.produced
        last = self._changes[-1] if self._changes else None
        if last is None or last[1] is not weights or last[2] is not self.stale:
            self._changes.append((start, weights, self.stale))
        self.tokens.append(token)
        self._logprobs.append(logprob)
        self._verdict = self.stop.check_token(token, start + 1)
        self.done = self._verdict is not None

    def abort_output(self, reason: AbortReason, not_finite: WeightsId | None = None) -> None:
        """End it from outside, or because of weights whose logits are not finite; what it has stays."""
        self.done = True
        self._abort, self._not_finite = reason, not_finite

    def take_delta(self) -> EngineDelta:
        """Return what is new since the last call; with the reason of the end once it is done."""
        begin, end = self._delivered, self.produced
        reason, match = self._verdict or (None, None)
        if self._abort is not None:
            reason, match = StopReason.ABORTED, None
        logprobs = None if self.request.logprobs is None else tuple(self._logprobs)
        found = EngineDelta(
            token_ids=tuple(self.tokens[self._prompt + begin :]),
            logprobs=logprobs,
            spans=spans_within(self._changes, begin, end),
            stop_reason=reason,
            stop_match=match,
            abort_reason=self._abort,
            not_finite=self._not_finite,
            preemptions=self.preemptions,
            queued_seconds=(self.started or time.monotonic()) - self.entered,
        )
        self._delivered = end
        self._logprobs.clear()
        self._changes.clear()
        return found


def make_sequence(
    request: EngineRequest, loaded: LoadedModel, arrival: int, sink: Callable[[EngineDelta], None]
) -> OutputSequence:
    """Set up a checked request; `sink` takes its deltas, in the asyncio loop."""
    request = with_max_tokens(request, loaded)
    asks = sampling_asks(request, stop_ids(request.sampling, loaded.eos_token_ids))
    # Of its own: torch's generator may be a trainer's, and seeded alike on each replica.
    asks.setdefault("seed", secrets.randbits(63))
    return OutputSequence(
        request=request,
        row=SampledRow(asks, request.token_ids, ()),
        stop=make_stop_checker(request.sampling, loaded),
        arrival=arrival,
        sink=sink,
    )
