"""One output from its first attempt to its end: retries, continuation, deadline.

    choose a member ── attempt ──┬─ stop, length            → done
        ▲                        ├─ aborted: weights, sleep,
        │                        │  control, engine         → go on after the tokens so far
        └────────────────────────┼─ broken, 5xx             → likewise, at most `max_failures` times
                                 ├─ 429, 503, too old       → elsewhere or later, until the deadline
                                 └─ 4xx, aborted: deadline  → error with what was kept

Generation changes nothing on a worker, so it may be sent again at any time; each attempt has a
request id of its own, and a worker ends what its client no longer reads.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rollout_client.discovery.members import Member
from rollout_client.errors import (
    DeadlineExceeded,
    NoReplica,
    RequestError,
    RequestFailed,
    RequestRefused,
    VersionChanged,
)
from rollout_client.hooks import Hook
from rollout_client.results import AttemptReport, Outcome, OutputReport
from rollout_client.routing.balancer import Bounds
from rollout_client.routing.connections import Connections
from rollout_client.routing.router import Lease, Router
from rollout_worker.schemas import (
    AbortReason,
    GenerateOutput,
    GenerateRequest,
    LogprobsOf,
    StopMatch,
    StopReason,
    StreamDelta,
    StreamDone,
    WeightsId,
)

from .draft import Draft, continuable, rest_of, rewind_of
from .wire import Broken, Refusal, attempt

logger = logging.getLogger(__name__)

OnVersionChange = Literal["continue", "restart", "fail"]

MAX_FAILURES = 8
"""Broken attempts of one output: enough for a pool that is being killed, few enough that a request
that kills its engine does not kill them all for ever."""

PACE_TOKENS = 16
"""Fewer tells nothing of a replica's pace."""

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
ANSWER_SECONDS = 2.0
"""What a worker gets beyond the deadline to say that it is over."""


class _Moved(Exception):
    """Other weights came within an output whose caller minds."""


@dataclass(slots=True)
class Shared:
    """What all outputs of a pool share."""

    router: Router
    connections: Connections
    hook: Hook
    ends: set[int] = field(default_factory=set)
    """Ids that were seen to end outputs: the model's EOS, which only workers know."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How one request is to be seen through."""

    key: str | None
    session_id: str
    until: float
    on_version_change: OnVersionChange = "continue"
    max_failures: int = MAX_FAILURES


class Generation:
    """One output. `run` it once; `report` says what there is, also after a failure."""

    def __init__(
        self,
        shared: Shared,
        request: GenerateRequest,
        request_id: str,
        index: int,
        policy: Policy,
        on_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        self.draft = Draft(index)
        self.held = 0
        """Of the last tokens, how many may still be taken back: a stream keeps them."""
        self._shared = shared
        self._request = request
        self._id = request_id
        self._policy = policy
        self._on_tokens = on_tokens
        self._began = time.monotonic()
        self._first_token: float | None = None
        self._logprobs_of: LogprobsOf | None = None
        self._attempts: list[AttemptReport] = []
        self._failures = 0
        self._dry = 0
        """Attempts in a row that gave no token."""
        self._start = 0
        self._sampling_since = 0.0
        self._cached = 0
        self._queued = 0.0
        self._preemptions = 0
        self._last_url: str | None = None
        self._rewind = 0
        self._string_bytes = rewind_of(request.sampling)
        self._ended: GenerateOutput | None = None
        self._bounds = Bounds(request.epoch, request.min_version, request.exact_version)
        self._minds = policy.on_version_change != "continue"

    # The end.

    @property
    def report(self) -> OutputReport:
        """The output, marked aborted if it has not ended, and how it came."""
        output = self._ended or self.draft.output(
            StopReason.ABORTED, abort_reason=AbortReason.CLIENT, logprobs=self._wants_logprobs
        )
        return OutputReport(
            output=output,
            logprobs_of=self._logprobs_of,
            cached_tokens=self._cached,
            queued_seconds=self._queued,
            first_token_seconds=self._first_token,
            preemptions=self._preemptions,
            attempts=tuple(self._attempts),
        )

    @property
    def _wants_logprobs(self) -> bool:
        return self._request.logprobs != "none"

    def _end(self, reason: StopReason, match: StopMatch | None = None) -> None:
        self.held = 0
        self._ended = self.draft.output(reason, match, logprobs=self._wants_logprobs)

    # The loop.

    async def run(self) -> None:
        """See the output through.

        Raises:
            RequestError: It did not end by itself; `report` has what was kept.
        """
        try:
            while self._ended is None:
                await self._once()
        finally:
            self._on_tokens()

    async def _once(self) -> None:
        """Make one attempt and take its end into account."""
        if time.monotonic() >= self._policy.until:
            raise self._out_of_time()
        avoid = () if self._last_url is None or not self._failures else (self._last_url,)
        try:
            member = await self._shared.router.choose(
                self._policy.key, self._policy.until, self._wire_bounds(), avoid
            )
        except NoReplica as error:
            raise self._no_replica(error) from None
        except RequestRefused:
            if not (self._minds and self.draft):
                raise
            # The weights that the tokens so far came from are served no more.
            if isinstance(moved := self._moved(), RequestError):
                raise moved from None
            return
        began = time.monotonic()
        with self._shared.router.lease(member) as lease:
            outcome, cause, follow = await self._attempt(member, lease)
        self._last_url = member.url
        gained = max(0, len(self.draft) - self._start)
        self._dry = 0 if gained else self._dry + 1
        told = AttemptReport(
            request_id=self._attempt_id,
            replica=member.name,
            outcome=outcome,
            cause=cause[:300],
            tokens=gained,
            seconds=time.monotonic() - began,
        )
        self._attempts.append(told)
        self._shared.hook.attempt(told)
        if outcome != "finished":
            logger.debug("%s", told.cause, extra={"request": told.request_id})
        if isinstance(follow, Exception):
            raise follow
        if follow:
            await asyncio.sleep(follow)

    @property
    def _attempt_id(self) -> str:
        return f"{self._id}.a{len(self._attempts)}"

    async def _attempt(
        self, member: Member, lease: Lease
    ) -> tuple[Outcome, str, RequestError | float]:
        """Return how it ended, why, and what follows: an error, or a pause before the next."""
        self.draft.begin(self._rewind)
        self._start = len(self.draft)
        request = self._rest()
        seconds = self._policy.until - time.monotonic() + ANSWER_SECONDS
        try:
            with self._shared.connections.to(member.url) as client:
                done = await attempt(client, lease, request, self._take, seconds)
        except Refusal as refusal:
            return self._refused(member, refusal)
        except Broken as broken:
            return self._broken(member, str(broken))
        except _Moved:
            return ("moved", "the weights changed", self._moved(member))
        return self._done(member, done)

    def _rest(self) -> GenerateRequest:
        """The request for what is left."""
        kept = self.draft.token_ids
        left = max(0.001, self._policy.until - time.monotonic())
        changes: dict[str, object] = {
            "request_id": self._attempt_id,
            "session_id": self._policy.session_id,
            "token_ids": (*self._request.token_ids, *kept) if kept else self._request.token_ids,
            "sampling": rest_of(self._request.sampling, kept),
            "deadline_seconds": min(86400.0, left),
            "stream": True,
        }
        bounds = self._wire_bounds()
        changes |= {
            "epoch": bounds.epoch,
            "min_version": bounds.min_version,
            "exact_version": bounds.exact_version,
        }
        return self._request.model_copy(update=changes)

    def _wire_bounds(self) -> Bounds:
        """Bounds of what is left: the caller's, until there are tokens.

        One who minds a change, or asked for exact ones, wants the rest from the same weights;
        everybody else from no older ones: while replicas commit one after the other, the next one
        may still be behind.
        """
        first, last = self.draft.first, self.draft.last
        if first is None or last is None:
            return self._bounds
        if self._minds or self._bounds.exact_version is not None:
            return Bounds(first.epoch, self._bounds.min_version, first.version)
        return Bounds(last.epoch, last.version)

    def _take(self, delta: StreamDelta) -> None:
        first = self.draft.first
        if len(self.draft) == self._start and delta.token_ids:
            self._sampling_since = time.monotonic()
            if self._first_token is None:
                self._first_token = self._sampling_since - self._began
        self.draft.take(delta)
        if first is None:
            first = self.draft.first
        if self._minds and self.draft.last != first:
            raise _Moved
        self._update_held()
        self._on_tokens()

    def _update_held(self) -> None:
        sampling, length = self._request.sampling, len(self.draft)
        if continuable(sampling):
            # An output cut off right after its EOS must not go on beyond it: as long as nobody
            # has told which id that is, the last token is sampled again.
            unsure = not sampling.ignore_eos and not self._shared.ends
            self._rewind = min(length, max(self._string_bytes, int(unsure)))
        else:
            self._rewind = length
        self.held = length if self._policy.on_version_change == "restart" else self._rewind

    # How attempts end.

    def _done(self, member: Member, done: StreamDone) -> tuple[Outcome, str, RequestError | float]:
        balancer = self._shared.router.balancer
        balancer.bring_back(member.url)
        if self.draft.last is not None and len(self.draft) > self._start:
            balancer.saw_weights(member.url, self.draft.last)
        self._account(done)
        self._tell_pace(member)
        if not done.outputs:
            return self._broken(member, "it ended a stream without an output")
        output = done.outputs[0]
        if output.stop_reason is not StopReason.ABORTED:
            match = output.stop_match
            if match is not None and match.token_id is not None:
                self._shared.ends.add(match.token_id)
            self._end(output.stop_reason, match)
            return ("finished", "", 0.0)
        return self._aborted(member, output.abort_reason or AbortReason.ENGINE)

    def _tell_pace(self, member: Member) -> None:
        tokens, now = len(self.draft) - self._start, time.monotonic()
        if tokens >= PACE_TOKENS:
            pace = (now - self._sampling_since) / (tokens - 1)
            self._shared.router.balancer.saw_pace(member.url, pace, now)

    def _account(self, done: StreamDone) -> None:
        if not self._attempts:
            self._cached = done.usage.cached_tokens
        self._logprobs_of = done.logprobs_of or self._logprobs_of
        self._queued += done.timing.queued_seconds
        self._preemptions += done.timing.preemptions

    def _aborted(
        self, member: Member, reason: AbortReason
    ) -> tuple[Outcome, str, RequestError | float]:
        if reason is AbortReason.DEADLINE:
            return ("aborted", reason, self._overdue(member))
        if reason is AbortReason.SLEEP:
            self._take_out(member, "it fell asleep")
        if reason in (AbortReason.ENGINE, AbortReason.CLIENT):
            return self._broken(member, f"aborted: {reason}", "aborted")
        if self._complete():
            return ("aborted", reason, 0.0)
        return ("aborted", reason, self._pause_if_dry())

    def _broken(
        self, member: Member, why: str, outcome: Outcome = "broken"
    ) -> tuple[Outcome, str, RequestError | float]:
        self._take_out(member, why)
        self._failures += 1
        follow: RequestError | float = self._pause()
        if self._complete():
            return (outcome, why, 0.0)
        if time.monotonic() >= self._policy.until:
            follow = self._overdue(member)
        elif self._failures > self._policy.max_failures:
            text = f"{self._failures} attempts broke, the last one: {why}"
            follow = RequestFailed(text, replica=member.name)
        return (outcome, why, follow)

    def _complete(self) -> bool:
        """End the output if nothing is missing but the worker's own word for it."""
        sampling, tokens = self._request.sampling, self.draft.token_ids
        last = tokens[-1] if tokens else None
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._shared.ends)
        if last is not None and last in stops and len(tokens) >= sampling.min_tokens:
            self._end(StopReason.STOP, StopMatch(token_id=last))
        elif sampling.max_tokens is not None and len(tokens) >= sampling.max_tokens:
            self._end(StopReason.LENGTH)
        return self._ended is not None

    def _refused(
        self, member: Member, refusal: Refusal
    ) -> tuple[Outcome, str, RequestError | float]:
        balancer, now = self._shared.router.balancer, time.monotonic()
        slug = refusal.slug or str(refusal.status)
        if refusal.status == 429:
            balancer.take_out(member.url, "its queue is full", now, now + _jittered(refusal))
        elif refusal.status == 503:
            self._take_out(member, refusal.detail)
        elif slug == "version-not-met":
            return ("refused", slug, self._not_met(member, refusal, now))
        elif slug == "duplicate-request":
            return ("refused", slug, self._pause_if_dry())
        elif refusal.status >= 500:
            return self._broken(member, str(refusal), "refused")
        elif slug == "too-long" and self.draft and self._request.sampling.max_tokens is None:
            # Up to the model's length was asked for, and that is reached.
            self._end(StopReason.LENGTH)
        else:
            error = RequestRefused(
                refusal.detail, replica=member.name, status=refusal.status, slug=refusal.slug
            )
            return ("refused", slug, error)
        return ("refused", slug, self._pause_if_dry())

    def _not_met(self, member: Member, refusal: Refusal, now: float) -> RequestError | float:
        balancer = self._shared.router.balancer
        if refusal.active is None:
            balancer.take_out(member.url, refusal.detail, now, now + _jittered(refusal))
            return 0.0
        balancer.saw_weights(member.url, refusal.active)
        first = self.draft.first
        if self._minds and first is not None and refusal.active != first:
            return self._moved(member, refusal.active)
        return 0.0

    def _moved(
        self, member: Member | None = None, to: WeightsId | None = None
    ) -> RequestError | float:
        """Begin anew, or say so, as the caller wants."""
        was, now = self.draft.first, to or self.draft.last
        if self._policy.on_version_change == "fail":
            text = f"the weights changed from {was} to {now} within an output"
            return VersionChanged(text, replica=member.name if member else None)
        self.draft.clear()
        self._update_held()
        return 0.0

    # Words and pauses.

    def _take_out(self, member: Member, why: str) -> None:
        self._shared.router.balancer.take_out(member.url, why, time.monotonic())

    def _pause_if_dry(self) -> float:
        """Attempts that give nothing must not follow each other at once for ever."""
        return self._pause() if self._dry > 1 else 0.0

    def _pause(self) -> float:
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self._dry, 10))
        left = max(0.0, self._policy.until - time.monotonic())
        return min(left, pause * random.uniform(0.5, 1.0))

    def _overdue(self, member: Member | None = None) -> DeadlineExceeded:
        replica = member.name if member else None
        return DeadlineExceeded("its deadline passed", replica=replica)

    def _out_of_time(self) -> RequestError:
        if self.draft or not self._attempts or self._attempts[-1].outcome != "refused":
            return self._overdue()
        why = self._shared.router.reasons(self._bounds)
        return NoReplica(f"no replica took the request in time ({why})")

    def _no_replica(self, error: NoReplica) -> RequestError:
        """The right word for it: with tokens in hand it is the deadline that ended the output."""
        return DeadlineExceeded(error.cause) if self._attempts and self.draft else error


def _jittered(refusal: Refusal) -> float:
    """Retry-After, never earlier and a little spread."""
    return (refusal.retry_after or 1.0) * random.uniform(1.0, 1.3)
