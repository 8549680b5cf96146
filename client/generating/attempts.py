"""One output from its first attempt to its end: retries, continuation, deadline.

    choose a member ── attempt ── verdict ──┬─ Finish    → done
        ▲                                   ├─ GiveUp    → error, with what was received
        └───────────────────────────────────┴─ Continue, StartOver

Generation changes nothing on a worker, so a request may be sent again at any time. Each attempt has
a request id of its own, and a worker aborts a request whose client no longer reads.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from rollout_client.discovery.pool_members import Member
from rollout_client.errors import NoReplica, PoolClosed, RequestRefused
from rollout_client.hooks import Hook
from rollout_client.http_clients import MemberClients
from rollout_client.results import AttemptReport
from rollout_client.routing.member_records import MemberRecord, WeightsBounds
from rollout_client.routing.router import AttemptLease, RequestRouter
from rollout_common import wire

from . import attempt_verdicts as verdicts
from .attempt_stream import AttemptBroken, AttemptRefused, StreamFrame, run_attempt
from .continuation import remaining_bounds, remaining_request, rewind_length
from .output_draft import OutputDraft, OutputUsage
from .sent_pictures import UNKNOWN_MEDIA, SentPictures, with_picture_data
from .settings import ANSWER_GRACE_SECONDS

logger = logging.getLogger(__name__)

MAX_CAUSE_LENGTH = 300
"""Characters of a cause that are reported."""

PACE_TOKENS = 16
"""Fewer tokens than this say nothing reliable about a replica's pace."""


class _WeightsChanged(Exception):
    """The weights changed within an output that must come from one version."""


@dataclass(slots=True)
class PoolContext:
    """What all outputs of a pool share."""

    router: RequestRouter
    connections: MemberClients
    hook: Hook
    sent: SentPictures = field(default_factory=SentPictures)


@dataclass(eq=False, repr=False)
class OutputGeneration:
    """One output. Call `run_attempts` once; `output` is what there is, also after a failure."""

    shared: PoolContext
    request: wire.GenerateRequest
    request_id: str
    index: int
    policy: verdicts.RequestPolicy
    pictures: Mapping[str, str] = field(default_factory=dict)
    first_token_at: float | None = field(default=None, init=False)
    """On the monotonic clock."""

    def __post_init__(self) -> None:
        asked = self.request
        self.on_tokens: Callable[[], None] = lambda: None
        """Called whenever the tokens have changed, and at the end."""
        self.draft = OutputDraft(asked, self.index)
        self.usage = OutputUsage()
        self._failures = 0
        self._empty_attempts = 0
        """Attempts in a row that gave no token."""
        self._active: wire.WeightsId | None = None
        """Weights that the member was known to serve when the attempt began."""
        self._sampling_since = 0.0
        self._last_url: str | None = None
        self._rewind = 0
        """How many of the last tokens the next attempt samples again."""
        self._info: wire.WorkerInfo | None = None
        """Describes the worker that made the last token; None: not known yet."""
        self._ended: wire.GenerateOutput | None = None
        self._asked = WeightsBounds(asked.epoch, asked.min_version, asked.exact_version)

    @property
    def output(self) -> wire.GenerateOutput:
        """The output; marked aborted if it has not ended."""
        return self._ended or self.draft.to_output(
            wire.StopReason.ABORTED,
            abort_reason=wire.AbortReason.CLIENT,
            logprobs=self._wants_logprobs,
        )

    @property
    def retractable(self) -> int:
        """How many of the last tokens may still be sampled again: a stream holds them back."""
        if self._ended is not None:
            return 0
        return len(self.draft) if self.policy.on_version_change == "restart" else self._rewind

    @property
    def _wants_logprobs(self) -> bool:
        return self.request.logprobs != "none"

    @property
    def logprobs_of(self) -> wire.LogprobsOf | None:
        """The kind of the logprobs; None: not known, or there are none.

        A worker that is killed right after the last token has not said so: then it is the kind that
        was asked for, or the worker's default.
        """
        asked = self.request.logprobs
        if self.usage.logprobs_of or not self.draft.logprobs or asked == "none":
            return self.usage.logprobs_of
        return asked or next(iter(self._info.capabilities.logprobs if self._info else ()), None)

    async def run_attempts(self) -> None:
        """Make attempts until the output has ended.

        Raises:
            RequestError: It did not end by itself; `output` has what was received.
        """
        try:
            while self._ended is None:
                member = await self._choose_member()
                if member is not None:
                    await self._take_next_step(await self._try_member(member))
        finally:
            self.on_tokens()

    async def _choose_member(self) -> Member | None:
        """Return the member for the next attempt; None: the output starts over, choose again."""
        router, policy = self.shared.router, self.policy
        if time.monotonic() >= policy.until:
            last = self.usage.attempts[-1].outcome if self.usage.attempts else None
            reasons = router.refusal_reasons(self._asked)
            raise verdicts.out_of_time_error(self._attempt_state(), last, reasons)
        avoid = () if self._last_url is None or not self._failures else (self._last_url,)
        one_version = policy.one_version and bool(self.draft)
        may_move = one_version and self._asked.exact_version is None
        try:
            bounds = self._current_bounds()
            return await router.choose_member(
                policy.key, policy.until, bounds, avoid, may_move=may_move
            )
        except NoReplica as error:
            raise verdicts.no_replica_error(error, self._attempt_state()) from None
        except RequestRefused:
            if not one_version:
                raise
        await self._take_next_step(verdicts.step_after_weights_change(self._attempt_state()))
        return None

    async def _try_member(self, member: Member) -> verdicts.Next:
        """Make one attempt and report it."""
        began = time.monotonic()
        with self.shared.router.lease_member(member) as lease:
            verdict = await self._send_attempt(member, lease)
            self._update_record(member, verdict)
        gained = self.draft.attempt_tokens
        report = AttemptReport(
            request_id=self._attempt_id,
            replica=member.name,
            outcome=verdict.outcome,
            cause=verdict.cause[:MAX_CAUSE_LENGTH],
            tokens=gained,
            seconds=time.monotonic() - began,
        )
        self._last_url = member.url
        self._empty_attempts = 0 if gained else self._empty_attempts + 1
        self._failures += verdict.broke
        self.usage.attempts.append(report)
        self.shared.hook.attempt(report)
        if report.outcome != "finished":
            logger.debug("%s", report.cause, extra={"request": report.request_id})
        return verdict.next

    async def _send_attempt(self, member: Member, lease: AttemptLease) -> verdicts.AttemptVerdict:
        """Ask a member for the remaining tokens and judge how that ends."""
        self.draft.begin_attempt(self._rewind)
        self._rewind = 0
        self._active = self._record_of(member.url).active
        try:
            try:
                done = await self._stream_attempt(member, lease)
            except AttemptRefused as refusal:
                if refusal.slug != UNKNOWN_MEDIA or not self.pictures:
                    raise
                done = await self._stream_attempt(member, lease, again=True)
        except AttemptRefused as refusal:
            return verdicts.judge_refusal(refusal, self._attempt_state(member))
        except AttemptBroken as broken:
            if self.shared.router.closed:
                raise PoolClosed("the pool was closed") from broken
            return verdicts.judge_broken_attempt(str(broken), self._attempt_state(member))
        except _WeightsChanged:
            return verdicts.judge_new_weights(self._attempt_state(member))
        self._note_stream_end(member, done)
        return verdicts.judge_answer(next(iter(done.outputs), None), self._attempt_state(member))

    async def _stream_attempt(
        self, member: Member, lease: AttemptLease, *, again: bool = False
    ) -> wire.StreamDone:
        """Send the request with the pictures that the member lacks; `again`: with all of them."""
        url, until = member.url, self.policy.until
        left = until - time.monotonic()
        async with self.shared.sent.claim_pictures(url, self.pictures, left, again=again) as claim:
            left = until - time.monotonic()
            request = remaining_request(
                self.request, self.draft, self._current_bounds(), request_id=self._attempt_id,
                session_id=self.policy.session_id, seconds=left,
            )  # fmt: skip
            request = with_picture_data(request, {ref: self.pictures[ref] for ref in claim.missing})
            take = partial(self._take_frame, url)
            with self.shared.connections.client_for(url) as client:
                return await run_attempt(
                    client, lease, request, take, left + ANSWER_GRACE_SECONDS, claim.note_taken
                )

    async def _take_next_step(self, step: verdicts.Next) -> None:
        match step:
            case verdicts.FinishOutput():
                wants = self._wants_logprobs
                self._ended = self.draft.to_output(step.reason, step.match, logprobs=wants)
            case verdicts.ContinueOutput():
                left = max(0.0, self.policy.until - time.monotonic())
                if pause := min(left, step.pause * random.uniform(0.5, 1.0)):
                    await asyncio.sleep(pause)
            case verdicts.StartOver():
                self.draft.clear_tokens()
                self._rewind = 0
            case verdicts.GiveUp():
                raise step.error from None
            case _:
                assert_never(step)

    # Input of the verdicts.

    @property
    def _attempt_id(self) -> str:
        return f"{self.request_id}.a{len(self.usage.attempts)}"

    def _current_bounds(self) -> WeightsBounds:
        return remaining_bounds(self._asked, self.draft, one_version=self.policy.one_version)

    def _attempt_state(self, member: Member | None = None) -> verdicts.AttemptState:
        return verdicts.AttemptState(
            replica=member.name if member else None,
            now=time.monotonic(),
            sampling=self.request.sampling,
            policy=self.policy,
            tokens=self.draft.token_ids,
            first=self.draft.first_weights,
            last=self.draft.last_weights,
            failures=self._failures,
            empty_attempts=self._empty_attempts,
            scored=self.draft.prompt.is_whole,
            end_tokens=frozenset(self._info.eos_token_ids if self._info else ()),
        )

    # What workers send.

    def _take_frame(self, url: str, frame: StreamFrame) -> None:
        if isinstance(frame, wire.PromptLogprobs):
            self.draft.prompt.append_frame(frame)
        elif isinstance(frame, wire.RoutedExperts):
            if self.draft.routes is not None:
                self.draft.routes.append_rows(frame)
        else:
            self._take_delta(url, frame)

    def _take_delta(self, url: str, delta: wire.StreamDelta) -> None:
        if not self.draft.attempt_tokens and delta.token_ids:
            self._sampling_since = time.monotonic()
            self.first_token_at = self.first_token_at or self._sampling_since
        self.draft.append_delta(delta)
        if self.policy.one_version and self.draft.last_weights != self.draft.first_weights:
            raise _WeightsChanged
        self._info = self._record_of(url).info
        known = self._info is not None
        self._rewind = rewind_length(self.request, len(self.draft), end_known=known)
        self.on_tokens()

    def _record_of(self, url: str) -> MemberRecord:
        """Return what is known of a member; as long as an attempt runs there, it is known."""
        return self.shared.router.balancer.records[url]

    def _note_stream_end(self, member: Member, done: wire.StreamDone) -> None:
        self.usage.note_stream_end(done)
        record, now = self._record_of(member.url), time.monotonic()
        record.admit_again()
        tokens, last = self.draft.attempt_tokens, self.draft.last_weights
        # What was committed during the attempt serves, though the output ended on the weights before.
        known = record.active
        if tokens > 0 and last is not None and (known in (None, self._active) or last > known):
            record.active = last
        if tokens >= PACE_TOKENS:
            # Without the wait for the first token.
            pace = (now - self._sampling_since) / (tokens - 1)
            self.shared.router.balancer.note_pace(member.url, pace, now)

    def _update_record(self, member: Member, verdict: verdicts.AttemptVerdict) -> None:
        record, now = self._record_of(member.url), time.monotonic()
        if verdict.weights is not None:
            record.active = verdict.weights
        if (out := verdict.exclusion) is not None:
            # Never earlier than the worker said, and spread so that not all come back at once.
            later = None if out.seconds is None else now + out.seconds * random.uniform(1.0, 1.3)
            record.exclude_until(out.why, now, later)
