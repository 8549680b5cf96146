"""One output from its first attempt to its end: retries, continuation, deadline.

    choose a member ── attempt ── verdict ──┬─ Finish    → done
        ▲                                   ├─ GiveUp    → error, with what was received
        └───────────────────────────────────┴─ Continue, StartOver

Generation changes nothing on a worker, so it may be sent again at any time; each attempt has a
request id of its own, and a worker ends what its client no longer reads.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from rollout_client.discovery.members import Member
from rollout_client.errors import NoReplica, RequestRefused
from rollout_client.hooks import Hook
from rollout_client.results import AttemptReport, OutputReport
from rollout_client.routing.bounds import Bounds
from rollout_client.routing.connections import Connections
from rollout_client.routing.router import Lease, Router
from rollout_worker.schemas import (
    AbortReason,
    GenerateOutput,
    GenerateRequest,
    LogprobsOf,
    StopReason,
    StreamDelta,
    StreamDone,
    WorkerInfo,
)

from .continuation import bounds_of_rest, rest_of, rewind_of
from .draft import Draft
from .tally import Tally, pace_of
from .verdicts import (
    Continue,
    Finish,
    GiveUp,
    Next,
    Policy,
    Standing,
    StartOver,
    Verdict,
    after_answer,
    after_break,
    after_new_weights,
    after_refusal,
    no_replica,
    out_of_time,
    when_weights_changed,
)
from .wire import Broken, Refusal, attempt

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""What a worker gets beyond the deadline to say that it is over."""

MOST_CAUSE = 300
"""Characters of a cause that are reported."""


class _WeightsChanged(Exception):
    """Other weights came within an output whose caller minds."""


@dataclass(slots=True)
class Shared:
    """What all outputs of a pool share."""

    router: Router
    connections: Connections
    hook: Hook


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
        self.retractable = 0
        """How many of the last tokens may still be taken back: a stream holds them back."""
        self._shared = shared
        self._request = request
        self._id = request_id
        self._policy = policy
        self._on_tokens = on_tokens
        self._tally = Tally(time.monotonic())
        self._failures = 0
        self._dry = 0
        """Attempts in a row that gave no token."""
        self._start = 0
        """Tokens there were when the attempt began."""
        self._sampling_since = 0.0
        self._last_url: str | None = None
        self._rewind = 0
        self._info: WorkerInfo | None = None
        """What the worker is that made the last token; None: it has not told."""
        self._ended: GenerateOutput | None = None
        self._asked = Bounds(request.epoch, request.min_version, request.exact_version)

    @property
    def report(self) -> OutputReport:
        """The output, marked aborted if it has not ended, and how it came."""
        output = self._ended or self.draft.output(
            StopReason.ABORTED, abort_reason=AbortReason.CLIENT, logprobs=self._wants_logprobs
        )
        return self._tally.report(output, self._logprobs_of if output.logprobs else None)

    @property
    def _wants_logprobs(self) -> bool:
        return self._request.logprobs != "none"

    @property
    def _logprobs_of(self) -> LogprobsOf | None:
        """Which logprobs these are, unless a worker said so at the end of a stream; None: not known."""
        asked = self._request.logprobs
        if asked is not None:
            return None if asked == "none" else asked
        return next(iter(self._info.capabilities.logprobs), None) if self._info else None

    async def run(self) -> None:
        """See the output through.

        Raises:
            RequestError: It did not end by itself; `report` has what was received.
        """
        try:
            while self._ended is None:
                member = await self._choose()
                if member is not None:
                    await self._follow(await self._try(member))
        finally:
            self._on_tokens()

    async def _choose(self) -> Member | None:
        """Return who gets the next attempt; None: the output starts over, choose again."""
        router, policy = self._shared.router, self._policy
        if time.monotonic() >= policy.until:
            last = self._tally.attempts[-1].outcome if self._tally.attempts else None
            raise out_of_time(self._standing(), last, router.reasons(self._asked))
        avoid = () if self._last_url is None or not self._failures else (self._last_url,)
        try:
            return await router.choose(policy.key, policy.until, self._bounds(), avoid)
        except NoReplica as error:
            raise no_replica(error, self._standing()) from None
        except RequestRefused:
            if not (policy.one_version and self.draft):
                raise
        await self._follow(when_weights_changed(self._standing()))
        return None

    async def _try(self, member: Member) -> Next:
        """Make one attempt and report it."""
        began = time.monotonic()
        with self._shared.router.lease(member) as lease:
            verdict = await self._attempt(member, lease)
            self._tell_balancer(member, verdict)
        gained = max(0, len(self.draft) - self._start)
        report = AttemptReport(
            request_id=self._attempt_id,
            replica=member.name,
            outcome=verdict.outcome,
            cause=verdict.cause[:MOST_CAUSE],
            tokens=gained,
            seconds=time.monotonic() - began,
        )
        self._last_url = member.url
        self._dry = 0 if gained else self._dry + 1
        self._failures += verdict.broke
        self._tally.attempts.append(report)
        self._shared.hook.attempt(report)
        if report.outcome != "finished":
            logger.debug("%s", report.cause, extra={"request": report.request_id})
        return verdict.next

    async def _attempt(self, member: Member, lease: Lease) -> Verdict:
        """Send what is left to a member and judge how that ends."""
        self.draft.begin(self._rewind)
        self._rewind = 0
        self._start = len(self.draft)
        left = self._policy.until - time.monotonic()
        request = rest_of(
            self._request,
            self.draft,
            self._bounds(),
            request_id=self._attempt_id,
            session_id=self._policy.session_id,
            seconds=left,
        )
        take = partial(self._take, member.url)
        try:
            with self._shared.connections.to(member.url) as client:
                done = await attempt(client, lease, request, take, left + ANSWER_SECONDS)
        except Refusal as refusal:
            return after_refusal(refusal, self._standing(member))
        except Broken as broken:
            return after_break(str(broken), self._standing(member))
        except _WeightsChanged:
            return after_new_weights(self._standing(member))
        self._account(member, done)
        return after_answer(next(iter(done.outputs), None), self._standing(member))

    async def _follow(self, step: Next) -> None:
        match step:
            case Finish():
                self.retractable = 0
                self._ended = self.draft.output(
                    step.reason, step.match, logprobs=self._wants_logprobs
                )
            case Continue():
                left = max(0.0, self._policy.until - time.monotonic())
                if pause := min(left, step.pause * random.uniform(0.5, 1.0)):
                    await asyncio.sleep(pause)
            case StartOver():
                self.draft.clear()
                self._update_retractable()
            case GiveUp():
                raise step.error from None
            case _:
                assert_never(step)

    # What verdicts are made of.

    @property
    def _attempt_id(self) -> str:
        return f"{self._id}.a{len(self._tally.attempts)}"

    def _bounds(self) -> Bounds:
        return bounds_of_rest(self._asked, self.draft, one_version=self._policy.one_version)

    def _standing(self, member: Member | None = None) -> Standing:
        return Standing(
            replica=member.name if member else None,
            now=time.monotonic(),
            sampling=self._request.sampling,
            policy=self._policy,
            tokens=self.draft.token_ids,
            first=self.draft.first,
            last=self.draft.last,
            failures=self._failures,
            dry=self._dry,
            end_tokens=frozenset(self._info.eos_token_ids if self._info else ()),
        )

    # What comes in.

    def _take(self, url: str, delta: StreamDelta) -> None:
        if len(self.draft) == self._start and delta.token_ids:
            self._sampling_since = time.monotonic()
            self._tally.token(self._sampling_since)
        self.draft.take(delta)
        if self._policy.one_version and self.draft.last != self.draft.first:
            raise _WeightsChanged
        self._info = self._shared.router.balancer.info(url)
        self._update_retractable()
        self._on_tokens()

    def _update_retractable(self) -> None:
        tokens, end_known = len(self.draft), self._info is not None
        self._rewind = rewind_of(self._request.sampling, tokens, end_known=end_known)
        restarts = self._policy.on_version_change == "restart"
        self.retractable = tokens if restarts else self._rewind

    def _account(self, member: Member, done: StreamDone) -> None:
        """Note what a worker says at the end of a stream."""
        self._tally.end(done)
        balancer, now = self._shared.router.balancer, time.monotonic()
        balancer.readmit(member.url)
        tokens = len(self.draft) - self._start
        if tokens > 0 and self.draft.last is not None:
            balancer.saw_weights(member.url, self.draft.last)
        if (pace := pace_of(tokens, now - self._sampling_since)) is not None:
            balancer.saw_pace(member.url, pace, now)

    def _tell_balancer(self, member: Member, verdict: Verdict) -> None:
        balancer, now = self._shared.router.balancer, time.monotonic()
        if verdict.weights is not None:
            balancer.saw_weights(member.url, verdict.weights)
        if (out := verdict.exclusion) is not None:
            # Never earlier than the worker said, and spread a little.
            later = None if out.seconds is None else out.seconds * random.uniform(1.0, 1.3)
            until = None if later is None else now + later
            balancer.exclude(member.url, out.why, now, until)
