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

from rollout_client.discovery.pool_members import Member
from rollout_client.errors import NoReplica, RequestRefused
from rollout_client.hooks import Hook
from rollout_client.results import AttemptReport, OutputReport
from rollout_client.routing.member_clients import MemberClients
from rollout_client.routing.router import AttemptLease, RequestRouter
from rollout_client.routing.weights_bounds import WeightsBounds
from rollout_common.wire import (
    AbortReason,
    GenerateOutput,
    GenerateRequest,
    LogprobsOf,
    StopReason,
    StreamDelta,
    StreamDone,
    WorkerInfo,
)

from .attempt_stream import AttemptBroken, AttemptRefused, run_attempt
from .attempt_verdicts import (
    AttemptState,
    AttemptVerdict,
    ContinueOutput,
    FinishOutput,
    GiveUp,
    Next,
    RequestPolicy,
    StartOver,
    judge_answer,
    judge_broken_attempt,
    judge_new_weights,
    judge_refusal,
    no_replica_error,
    out_of_time_error,
    step_after_weights_change,
)
from .continuation import remaining_bounds, remaining_request, rewind_length
from .output_draft import OutputDraft
from .output_usage import OutputUsage, seconds_per_token
from .settings import ANSWER_GRACE_SECONDS

logger = logging.getLogger(__name__)

MAX_CAUSE_LENGTH = 300
"""Characters of a cause that are reported."""


class _WeightsChanged(Exception):
    """Other weights came within an output whose caller minds."""


@dataclass(slots=True)
class PoolContext:
    """What all outputs of a pool share."""

    router: RequestRouter
    connections: MemberClients
    hook: Hook


class OutputGeneration:
    """One output. Call `run_attempts` once; `to_report` says what there is, also after a failure."""

    def __init__(
        self,
        shared: PoolContext,
        request: GenerateRequest,
        request_id: str,
        index: int,
        policy: RequestPolicy,
        on_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        self.draft = OutputDraft(index)
        self.retractable = 0
        """How many of the last tokens may still be taken back: a stream holds them back."""
        self._shared = shared
        self._request = request
        self._id = request_id
        self._policy = policy
        self._on_tokens = on_tokens
        self._tally = OutputUsage(time.monotonic())
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
        self._asked = WeightsBounds(request.epoch, request.min_version, request.exact_version)

    @property
    def to_report(self) -> OutputReport:
        """The output, marked aborted if it has not ended, and how it came."""
        output = self._ended or self.draft.to_output(
            StopReason.ABORTED, abort_reason=AbortReason.CLIENT, logprobs=self._wants_logprobs
        )
        return self._tally.to_report(output, self._logprobs_kind if output.logprobs else None)

    @property
    def _wants_logprobs(self) -> bool:
        return self._request.logprobs != "none"

    @property
    def _logprobs_kind(self) -> LogprobsOf | None:
        """Which logprobs these are, unless a worker said so at the end of a stream; None: not known."""
        asked = self._request.logprobs
        if asked is not None:
            return None if asked == "none" else asked
        return next(iter(self._info.capabilities.logprobs), None) if self._info else None

    async def run_attempts(self) -> None:
        """See the output through.

        Raises:
            RequestError: It did not end by itself; `report` has what was received.
        """
        try:
            while self._ended is None:
                member = await self._choose_member()
                if member is not None:
                    await self._take_next_step(await self._try_member(member))
        finally:
            self._on_tokens()

    async def _choose_member(self) -> Member | None:
        """Return who gets the next attempt; None: the output starts over, choose again."""
        router, policy = self._shared.router, self._policy
        if time.monotonic() >= policy.until:
            last = self._tally.attempts[-1].outcome if self._tally.attempts else None
            raise out_of_time_error(
                self._attempt_state(), last, router.refusal_reasons(self._asked)
            )
        avoid = () if self._last_url is None or not self._failures else (self._last_url,)
        try:
            return await router.choose_member(
                policy.key, policy.until, self._current_bounds(), avoid
            )
        except NoReplica as error:
            raise no_replica_error(error, self._attempt_state()) from None
        except RequestRefused:
            if not (policy.one_version and self.draft):
                raise
        await self._take_next_step(step_after_weights_change(self._attempt_state()))
        return None

    async def _try_member(self, member: Member) -> Next:
        """Make one attempt and report it."""
        began = time.monotonic()
        with self._shared.router.lease_member(member) as lease:
            verdict = await self._send_attempt(member, lease)
            self._update_balancer(member, verdict)
        gained = max(0, len(self.draft) - self._start)
        report = AttemptReport(
            request_id=self._attempt_id,
            replica=member.name,
            outcome=verdict.outcome,
            cause=verdict.cause[:MAX_CAUSE_LENGTH],
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

    async def _send_attempt(self, member: Member, lease: AttemptLease) -> AttemptVerdict:
        """Send what is left to a member and judge how that ends."""
        self.draft.begin_attempt(self._rewind)
        self._rewind = 0
        self._start = len(self.draft)
        left = self._policy.until - time.monotonic()
        request = remaining_request(
            self._request,
            self.draft,
            self._current_bounds(),
            request_id=self._attempt_id,
            session_id=self._policy.session_id,
            seconds=left,
        )
        take = partial(self._take_delta, member.url)
        try:
            with self._shared.connections.client_for(member.url) as client:
                done = await run_attempt(client, lease, request, take, left + ANSWER_GRACE_SECONDS)
        except AttemptRefused as refusal:
            return judge_refusal(refusal, self._attempt_state(member))
        except AttemptBroken as broken:
            return judge_broken_attempt(str(broken), self._attempt_state(member))
        except _WeightsChanged:
            return judge_new_weights(self._attempt_state(member))
        self._note_stream_end(member, done)
        return judge_answer(next(iter(done.outputs), None), self._attempt_state(member))

    async def _take_next_step(self, step: Next) -> None:
        match step:
            case FinishOutput():
                self.retractable = 0
                self._ended = self.draft.to_output(
                    step.reason, step.match, logprobs=self._wants_logprobs
                )
            case ContinueOutput():
                left = max(0.0, self._policy.until - time.monotonic())
                if pause := min(left, step.pause * random.uniform(0.5, 1.0)):
                    await asyncio.sleep(pause)
            case StartOver():
                self.draft.clear_tokens()
                self._update_retractable()
            case GiveUp():
                raise step.error from None
            case _:
                assert_never(step)

    # What verdicts are made of.

    @property
    def _attempt_id(self) -> str:
        return f"{self._id}.a{len(self._tally.attempts)}"

    def _current_bounds(self) -> WeightsBounds:
        return remaining_bounds(self._asked, self.draft, one_version=self._policy.one_version)

    def _attempt_state(self, member: Member | None = None) -> AttemptState:
        return AttemptState(
            replica=member.name if member else None,
            now=time.monotonic(),
            sampling=self._request.sampling,
            policy=self._policy,
            tokens=self.draft.token_ids,
            first=self.draft.first_weights,
            last=self.draft.last_weights,
            failures=self._failures,
            dry=self._dry,
            end_tokens=frozenset(self._info.eos_token_ids if self._info else ()),
        )

    # What comes in.

    def _take_delta(self, url: str, delta: StreamDelta) -> None:
        if len(self.draft) == self._start and delta.token_ids:
            self._sampling_since = time.monotonic()
            self._tally.note_first_token(self._sampling_since)
        self.draft.append_delta(delta)
        if self._policy.one_version and self.draft.last_weights != self.draft.first_weights:
            raise _WeightsChanged
        self._info = self._shared.router.balancer.worker_info(url)
        self._update_retractable()
        self._on_tokens()

    def _update_retractable(self) -> None:
        tokens, end_known = len(self.draft), self._info is not None
        self._rewind = rewind_length(self._request.sampling, tokens, end_known=end_known)
        restarts = self._policy.on_version_change == "restart"
        self.retractable = tokens if restarts else self._rewind

    def _note_stream_end(self, member: Member, done: StreamDone) -> None:
        """Note what a worker says at the end of a stream."""
        self._tally.note_stream_end(done)
        balancer, now = self._shared.router.balancer, time.monotonic()
        balancer.readmit_member(member.url)
        tokens = len(self.draft) - self._start
        if tokens > 0 and self.draft.last_weights is not None:
            balancer.note_weights(member.url, self.draft.last_weights)
        if (pace := seconds_per_token(tokens, now - self._sampling_since)) is not None:
            balancer.note_pace(member.url, pace, now)

    def _update_balancer(self, member: Member, verdict: AttemptVerdict) -> None:
        balancer, now = self._shared.router.balancer, time.monotonic()
        if verdict.weights is not None:
            balancer.note_weights(member.url, verdict.weights)
        if (out := verdict.exclusion) is not None:
            # Never earlier than the worker said, and spread a little.
            later = None if out.seconds is None else out.seconds * random.uniform(1.0, 1.3)
            until = None if later is None else now + later
            balancer.exclude_member(member.url, out.why, now, until)
