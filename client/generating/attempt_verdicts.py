"""What the end of an attempt means for its output. Pure: no clock, no randomness, no network.

stop, length                         → Finish
aborted: weights, sleep, control     → Continue, after the tokens so far
aborted: engine, client; broken, 5xx → Continue, but at most `max_failures` times
aborted: the logits are not finite   → GiveUp: all replicas have these weights
429, 503, weights too old            → Continue elsewhere or later, until the deadline
new weights, and one version wanted  → StartOver, or GiveUp
4xx, aborted: deadline               → GiveUp, with what was received
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from rollout_client import errors
from rollout_client.results import Outcome
from rollout_common import wire

from .attempt_stream import AttemptRefused
from .generate_options import OnVersionChange
from .settings import DEFAULT_RETRY_SECONDS, FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS

MAX_FAILURES = 8
"""Broken attempts that one output survives.

Enough to outlast a pool whose replicas are being killed; few enough that a request that crashes
engines does not crash them all.
"""


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """How to handle one request.

    Attributes:
        key: Requests with the same key go to the same replica if possible.
        session_id: Sent with every attempt.
        until: Deadline on the monotonic clock.
    """

    key: str | None
    session_id: str
    until: float
    on_version_change: OnVersionChange = "continue"
    max_failures: int = MAX_FAILURES

    @property
    def one_version(self) -> bool:
        """Whether all tokens must come from the same weights."""
        return self.on_version_change != "continue"


@dataclass(frozen=True, slots=True)
class AttemptState:
    """Where an output stood when an attempt ended.

    Attributes:
        replica: Name of the replica that the attempt ran on; None without an attempt.
        now: On the monotonic clock.
        tokens: All tokens that are kept.
        first: Weights of the first token.
        last: Weights of the last token.
        failures: Attempts that broke before this one.
        empty_attempts: Attempts in a row, before this one, that gave no token.
        scored: The prompt's scores are there, or were not asked for.
        end_tokens: The model's own ids that end outputs; empty until a worker has sent them.
    """

    replica: str | None
    now: float
    sampling: wire.SamplingParams
    policy: RequestPolicy
    tokens: Sequence[int] = ()
    first: wire.WeightsId | None = None
    last: wire.WeightsId | None = None
    failures: int = 0
    empty_attempts: int = 0
    scored: bool = True
    end_tokens: Set[int] = frozenset()


@dataclass(frozen=True, slots=True)
class FinishOutput:
    """The output is whole."""

    reason: wire.StopReason
    match: wire.StopMatch | None = None


@dataclass(frozen=True, slots=True)
class ContinueOutput:
    """Another attempt continues after the tokens so far.

    Attributes:
        pause: Seconds before it; the caller spreads them so that requests do not all return at once.
    """

    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class StartOver:
    """Another attempt begins from the prompt; the tokens so far are dropped."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The caller gets an error."""

    error: errors.RequestError


Next = FinishOutput | ContinueOutput | StartOver | GiveUp


@dataclass(frozen=True, slots=True)
class ReplicaExclusion:
    """The replica gets no requests.

    Attributes:
        why: The reason, for messages of requests that wait for a replica.
        seconds: For how long; None: until a probe says that it serves.
    """

    why: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class AttemptVerdict:
    """What to report of an attempt, what to do next, and what the balancer should know.

    Attributes:
        broke: It counts towards `max_failures`.
        exclusion: Set if the replica gets no more requests for now.
        weights: The weights that the replica reported, if it did.
    """

    outcome: Outcome
    cause: str
    next: Next
    broke: bool = False
    exclusion: ReplicaExclusion | None = None
    weights: wire.WeightsId | None = None


def judge_answer(output: wire.DoneOutput | None, at: AttemptState) -> AttemptVerdict:
    """Judge the worker's own end of a stream."""
    if output is None:
        return judge_broken_attempt("it ended a stream without an output", at)
    if output.stop_reason is not wire.StopReason.ABORTED and not at.scored:
        return judge_broken_attempt("it ended a stream without the scores of the prompt", at)
    if output.stop_reason is not wire.StopReason.ABORTED:
        return AttemptVerdict("finished", "", FinishOutput(output.stop_reason, output.stop_match))
    if output.abort_slug is not None:  # trying again can't help
        why = output.abort_detail or output.abort_slug
        failed = GiveUp(errors.RequestFailed(why, replica=at.replica))
        return AttemptVerdict("aborted", why, finish_if_whole(at) or failed)
    match output.abort_reason or wire.AbortReason.ENGINE:
        case wire.AbortReason.DEADLINE as reason:
            return AttemptVerdict("aborted", reason, GiveUp(deadline_error(at)))
        case wire.AbortReason.ENGINE | wire.AbortReason.CLIENT as reason:
            return judge_broken_attempt(f"aborted: {reason}", at, "aborted")
        case reason:
            asleep = (
                ReplicaExclusion("it fell asleep") if reason is wire.AbortReason.SLEEP else None
            )
            follows = finish_if_whole(at) or ContinueOutput(_pause_if_empty(at))
            return AttemptVerdict("aborted", reason, follows, exclusion=asleep)


def judge_broken_attempt(why: str, at: AttemptState, outcome: Outcome = "broken") -> AttemptVerdict:
    """Judge an attempt that broke: the connection, the engine or the worker failed."""
    failures = at.failures + 1
    follows: Next = finish_if_whole(at) or ContinueOutput(_backoff_pause(at))
    if isinstance(follows, ContinueOutput) and at.now >= at.policy.until:
        follows = GiveUp(deadline_error(at))
    elif isinstance(follows, ContinueOutput) and failures > at.policy.max_failures:
        text = f"{failures} attempts broke, the last one: {why}"
        follows = GiveUp(errors.RequestFailed(text, replica=at.replica))
    return AttemptVerdict(outcome, why, follows, broke=True, exclusion=ReplicaExclusion(why))


def judge_refusal(refusal: AttemptRefused, at: AttemptState) -> AttemptVerdict:
    """Judge an answer that is a problem instead of a stream."""
    slug = refusal.slug or str(refusal.status)
    follows: Next = ContinueOutput(_pause_if_empty(at))
    exclusion = None
    if refusal.status == 429:
        seconds = refusal.retry_after or DEFAULT_RETRY_SECONDS
        exclusion = ReplicaExclusion("its queue is full", seconds)
    elif refusal.status == 503:
        exclusion = ReplicaExclusion(refusal.detail)
    elif slug == "version-not-met":
        return _judge_wrong_weights(refusal, at)
    elif slug == "duplicate-request":
        pass
    elif refusal.status >= 500 or refusal.status == 408:
        # 408: the body came too slowly, or this process stood still.
        return judge_broken_attempt(str(refusal), at, "refused")
    elif slug == "too-long" and at.tokens and at.sampling.max_tokens is None:
        # The request asked for as many tokens as the model's length allows, and has them.
        follows = FinishOutput(wire.StopReason.LENGTH)
    else:
        follows = GiveUp(
            errors.RequestRefused(
                refusal.detail, replica=at.replica, status=refusal.status, slug=refusal.slug
            )
        )
    return AttemptVerdict("refused", slug, follows, exclusion=exclusion)


def _judge_wrong_weights(refusal: AttemptRefused, at: AttemptState) -> AttemptVerdict:
    """Judge a refusal of a replica whose weights are too old or too new."""
    if refusal.active is None:
        later = ReplicaExclusion(refusal.detail, refusal.retry_after or DEFAULT_RETRY_SECONDS)
        return AttemptVerdict("refused", refusal.slug, ContinueOutput(), exclusion=later)
    follows: Next = ContinueOutput()
    if at.policy.one_version and at.first is not None and refusal.active != at.first:
        follows = step_after_weights_change(at, refusal.active)
    return AttemptVerdict("refused", refusal.slug, follows, weights=refusal.active)


def judge_new_weights(at: AttemptState) -> AttemptVerdict:
    """Judge an attempt that was ended because the weights changed and one version is wanted."""
    return AttemptVerdict("moved", "the weights changed", step_after_weights_change(at, at.last))


def step_after_weights_change(at: AttemptState, to: wire.WeightsId | None = None) -> Next:
    """Return what follows when no replica serves the weights of the tokens so far."""
    if at.policy.on_version_change == "fail":
        text = f"the weights changed from {at.first} to {to or 'others'} within an output"
        return GiveUp(errors.VersionChanged(text, replica=at.replica))
    return StartOver()


def finish_if_whole(at: AttemptState) -> FinishOutput | None:
    """Return the end if the tokens so far are complete, though no worker said so.

    As on a worker, none of the first `min_tokens` is an end.
    """
    sampling, tokens = at.sampling, at.tokens
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else at.end_tokens)}
    if tokens and tokens[-1] in stops and len(tokens) > sampling.min_tokens:
        return FinishOutput(wire.StopReason.STOP, wire.StopMatch(token_id=tokens[-1]))
    if not at.scored:
        return None
    if sampling.max_tokens is not None and len(tokens) >= sampling.max_tokens:
        return FinishOutput(wire.StopReason.LENGTH)
    return None


def deadline_error(at: AttemptState) -> errors.DeadlineExceeded:
    """Return the error of a request whose deadline has passed."""
    return errors.DeadlineExceeded("its deadline passed", replica=at.replica)


def out_of_time_error(at: AttemptState, last: Outcome | None, reasons: str) -> errors.RequestError:
    """Return the error when no time is left for another attempt; `last` is how the last one ended."""
    if at.tokens or last != "refused":
        return deadline_error(at)
    return errors.NoReplica(f"no replica took the request in time ({reasons})")


def no_replica_error(error: errors.NoReplica, at: AttemptState) -> errors.RequestError:
    """Return the error when no replica came: with tokens, the deadline ended the output."""
    return errors.DeadlineExceeded(error.cause) if at.tokens else error


def _pause_if_empty(at: AttemptState) -> float:
    # Attempts that give no token must not follow each other without a pause until the deadline.
    return _backoff_pause(at) if at.empty_attempts > 1 else 0.0


def _backoff_pause(at: AttemptState) -> float:
    return min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(at.empty_attempts, 10))
