"""What the end of an attempt means: done, again and when, start over, give up and why. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollout_client import (
    DeadlineExceeded,
    NoReplica,
    RequestError,
    RequestFailed,
    RequestRefused,
    VersionChanged,
)
from rollout_client.generating.attempt_stream import AttemptRefused
from rollout_client.generating.attempt_verdicts import (
    AttemptState,
    AttemptVerdict,
    ContinueOutput,
    FinishOutput,
    GiveUp,
    Next,
    ReplicaExclusion,
    RequestPolicy,
    StartOver,
    finish_if_whole,
    judge_answer,
    judge_broken_attempt,
    judge_refusal,
    out_of_time_error,
)
from rollout_client.results import Outcome
from rollout_worker.schemas import (
    AbortReason,
    DoneOutput,
    SamplingParams,
    StopMatch,
    StopReason,
    WeightsId,
)

OLD, NEW = WeightsId(epoch=1, version=4), WeightsId(epoch=1, version=5)
POLICY = RequestPolicy(key=None, session_id="s", until=100.0, max_failures=2)
FRESH = AttemptState(replica="w0", now=0.0, sampling=SamplingParams(max_tokens=8), policy=POLICY)
BEGUN = replace(FRESH, tokens=(5, 6), first=OLD, last=OLD)
RESTART = replace(BEGUN, policy=replace(POLICY, on_version_change="restart"))
FAIL = replace(BEGUN, policy=replace(POLICY, on_version_change="fail"))


def aborted(reason: AbortReason | None) -> DoneOutput:
    return DoneOutput(index=0, stop_reason=StopReason.ABORTED, abort_reason=reason)


def error_of(step: Next) -> RequestError:
    assert isinstance(step, GiveUp)
    return step.error


# The worker ended the stream.


NO_OUTPUT = "it ended a stream without an output"


@pytest.mark.parametrize(
    ("verdict", "outcome", "cause"),
    [
        (judge_answer(None, BEGUN), "broken", NO_OUTPUT),
        (judge_answer(aborted(AbortReason.ENGINE), BEGUN), "aborted", "aborted: engine"),
        (judge_answer(aborted(AbortReason.CLIENT), BEGUN), "aborted", "aborted: client"),
        (judge_answer(aborted(None), BEGUN), "aborted", "aborted: engine"),
        (judge_broken_attempt("reset", BEGUN), "broken", "reset"),
        (judge_refusal(AttemptRefused(500, "internal-error", "why"), BEGUN), "refused",
         "500 internal-error: why"),
        (judge_refusal(AttemptRefused(502, "", "why"), BEGUN), "refused", "why"),
    ],
)  # fmt: skip
def test_what_broke_goes_on_later_and_leaves_the_replica_alone(
    verdict: AttemptVerdict, outcome: Outcome, cause: str
) -> None:
    assert verdict == AttemptVerdict(
        outcome, cause, ContinueOutput(0.05), broke=True, exclusion=ReplicaExclusion(cause)
    )


MATCH = StopMatch(token_id=6)
STOPPED = DoneOutput(index=0, stop_reason=StopReason.STOP, stop_match=MATCH)
WHOLE = replace(BEGUN, tokens=range(8))
DUPLICATE = AttemptRefused(409, "duplicate-request", "why")
BEHIND = AttemptRefused(409, "version-not-met", "why", active=OLD)
UNKNOWN = AttemptRefused(409, "version-not-met", "why")
FULL = AttemptRefused(429, "queue-full", "why")
SLEEPS = AttemptRefused(503, "asleep", "it sleeps", retry_after=5.0)
AT_ONCE = ContinueOutput(0.0)


def left_out(why: str, seconds: float | None = None) -> tuple[Next, bool, ReplicaExclusion]:
    """The output goes on at once, and the replica gets nothing for so long; None: until a probe."""
    return AT_ONCE, False, ReplicaExclusion(why, seconds)


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (judge_answer(STOPPED, BEGUN), ("finished", "", FinishOutput(StopReason.STOP, MATCH))),
        (judge_answer(aborted(AbortReason.WEIGHTS), BEGUN), ("aborted", "weights", AT_ONCE)),
        (judge_answer(aborted(AbortReason.CONTROL), BEGUN), ("aborted", "control", AT_ONCE)),
        (
            judge_answer(aborted(AbortReason.WEIGHTS), WHOLE),
            ("aborted", "weights", FinishOutput(StopReason.LENGTH)),
        ),
        (
            judge_answer(aborted(AbortReason.SLEEP), BEGUN),
            ("aborted", "sleep", *left_out("it fell asleep")),
        ),
        (judge_refusal(DUPLICATE, BEGUN), ("refused", "duplicate-request", AT_ONCE)),
        (judge_refusal(BEHIND, FRESH), ("refused", "version-not-met", AT_ONCE, False, None, OLD)),
        (judge_refusal(UNKNOWN, FRESH), ("refused", "version-not-met", *left_out("why", 1.0))),
        (
            judge_refusal(replace(UNKNOWN, retry_after=3.0), FRESH),
            ("refused", "version-not-met", *left_out("why", 3.0)),
        ),
        (
            judge_refusal(FULL, BEGUN),
            ("refused", "queue-full", *left_out("its queue is full", 1.0)),
        ),
        (
            judge_refusal(replace(FULL, retry_after=7.0), BEGUN),
            ("refused", "queue-full", *left_out("its queue is full", 7.0)),
        ),
        (judge_refusal(SLEEPS, BEGUN), ("refused", "asleep", *left_out("it sleeps"))),
    ],
)
def test_what_is_no_failure_of_the_replica(
    verdict: AttemptVerdict, expected: tuple[Any, ...]
) -> None:
    assert verdict == AttemptVerdict(*expected)


def test_weights_that_make_no_token_are_told_at_once() -> None:
    why = "weights (1, 5) give logits that are not finite"
    output = aborted(AbortReason.ENGINE).model_copy(
        update={"abort_slug": "not-finite", "abort_detail": why}
    )
    verdict = judge_answer(output, BEGUN)
    error = error_of(verdict.next)
    assert isinstance(error, RequestFailed)
    assert (error.cause, error.replica) == (why, "w0")
    assert (verdict.broke, verdict.exclusion) == (False, None)


# It broke.


@pytest.mark.parametrize(
    ("failures", "gives_up"), [(0, False), (1, False), (2, True), (3, True)], ids=str
)
def test_so_many_failures_are_survived_and_no_more(failures: int, gives_up: bool) -> None:
    step = judge_broken_attempt("reset", replace(BEGUN, failures=failures)).next
    assert isinstance(step, GiveUp) is gives_up
    if gives_up:
        error = error_of(step)
        assert isinstance(error, RequestFailed)
        text = f"{failures + 1} attempts broke, the last one: reset"
        assert (error.cause, error.replica) == (text, "w0")


def test_what_broke_at_its_deadline_is_overdue() -> None:
    for now, late in ((99.9, False), (100.0, True)):
        step = judge_broken_attempt("reset", replace(BEGUN, now=now, failures=9)).next
        assert isinstance(error_of(step), DeadlineExceeded) is late


def test_what_broke_when_it_was_whole_is_whole() -> None:
    verdict = judge_broken_attempt("reset", replace(WHOLE, now=200.0, failures=9))
    assert verdict.next == FinishOutput(StopReason.LENGTH)
    assert verdict.broke
    assert verdict.exclusion == ReplicaExclusion("reset")


@pytest.mark.parametrize(
    ("empty", "pause"), [(0, 0.05), (1, 0.1), (2, 0.2), (5, 1.6), (6, 2.0), (2000, 2.0)], ids=str
)
def test_pauses_double_up_to_two_seconds(empty: int, pause: float) -> None:
    assert judge_broken_attempt(
        "reset", replace(FRESH, empty_attempts=empty)
    ).next == ContinueOutput(pause)


@pytest.mark.parametrize(("empty", "pause"), [(0, 0.0), (1, 0.0), (2, 0.2), (3, 0.4)], ids=str)
def test_attempts_that_give_nothing_do_not_follow_each_other_at_once(
    empty: int, pause: float
) -> None:
    at = replace(FRESH, empty_attempts=empty)
    assert judge_answer(aborted(AbortReason.WEIGHTS), at).next == ContinueOutput(pause)
    assert judge_refusal(AttemptRefused(503, "asleep", "why"), at).next == ContinueOutput(pause)
    assert judge_refusal(
        AttemptRefused(409, "duplicate-request", "why"), at
    ).next == ContinueOutput(pause)


# Whether it is whole without the worker's own word.


@pytest.mark.parametrize(
    ("sampling", "tokens", "end"),
    [
        (SamplingParams(max_tokens=2), (5, 6), FinishOutput(StopReason.LENGTH)),
        (SamplingParams(max_tokens=1), (5, 6), FinishOutput(StopReason.LENGTH)),
        (SamplingParams(max_tokens=3), (5, 6), None),
        (SamplingParams(), (5, 6), None),
        (SamplingParams(), (), None),
        (SamplingParams(), (5, 2), FinishOutput(StopReason.STOP, StopMatch(token_id=2))),
        (SamplingParams(), (2, 5), None),
        (SamplingParams(ignore_eos=True), (5, 2), None),
        (
            SamplingParams(stop_token_ids=(6,), ignore_eos=True),
            (5, 6),
            FinishOutput(StopReason.STOP, StopMatch(token_id=6)),
        ),
        (SamplingParams(min_tokens=3, max_tokens=9), (5, 2), None),
        (
            SamplingParams(min_tokens=1, max_tokens=2),
            (5, 2),
            FinishOutput(StopReason.STOP, StopMatch(token_id=2)),
        ),
        (SamplingParams(min_tokens=2, max_tokens=9), (5, 2), None),
        (SamplingParams(min_tokens=2, max_tokens=2), (5, 2), FinishOutput(StopReason.LENGTH)),
    ],
)
def test_what_has_all_its_tokens_is_whole(
    sampling: SamplingParams, tokens: tuple[int, ...], end: FinishOutput | None
) -> None:
    at = replace(FRESH, sampling=sampling, tokens=tokens, end_tokens={2})
    assert finish_if_whole(at) == end


# The worker refused.


@pytest.mark.parametrize(
    ("status", "slug", "cause"), [(422, "invalid", "invalid"), (499, "", "499"), (404, "x", "x")]
)
def test_a_wrong_request_is_given_up(status: int, slug: str, cause: str) -> None:
    verdict = judge_refusal(AttemptRefused(status, slug, "why"), BEGUN)
    assert (verdict.outcome, verdict.cause, verdict.broke) == ("refused", cause, False)
    assert verdict.exclusion is None
    error = error_of(verdict.next)
    assert isinstance(error, RequestRefused)
    assert (error.status, error.slug, error.cause) == (status, slug, "why")
    assert error.replica == "w0"


def test_the_models_length_is_the_end_only_of_what_asked_for_all_of_it() -> None:
    too_long = AttemptRefused(413, "too-long", "why")
    endless = SamplingParams(max_tokens=None)
    verdict = judge_refusal(too_long, replace(BEGUN, sampling=endless))
    assert verdict.next == FinishOutput(StopReason.LENGTH)
    for at in (BEGUN, replace(FRESH, sampling=endless)):
        assert isinstance(error_of(judge_refusal(too_long, at).next), RequestRefused)


# The weights are not those that the caller wants.


def test_who_minds_a_change_starts_over_or_is_told() -> None:
    moved_on = AttemptRefused(409, "version-not-met", "why", active=NEW)
    assert judge_refusal(moved_on, BEGUN).next == ContinueOutput(0.0)
    assert judge_refusal(moved_on, RESTART).next == StartOver()
    error = error_of(judge_refusal(moved_on, FAIL).next)
    assert isinstance(error, VersionChanged)
    assert error.replica == "w0"
    assert error.cause == "the weights changed from (1, 4) to (1, 5) within an output"
    # The right ones are coming, or nothing was made yet: no reason to give anything up.
    behind = replace(moved_on, active=OLD)
    for at in (RESTART, FAIL):
        assert judge_refusal(behind, at).next == ContinueOutput(0.0)
        nothing = replace(at, tokens=(), first=None, last=None)
        assert judge_refusal(moved_on, nothing).next == ContinueOutput(0.0)
        assert judge_refusal(moved_on, nothing).weights == NEW


# There is nobody to ask, or no time.


def test_without_time_for_an_attempt_the_reason_is_named() -> None:
    nowhere = replace(FRESH, replica=None)
    refused = out_of_time_error(nowhere, "refused", "w0: asleep")
    assert isinstance(refused, NoReplica)
    assert refused.cause == "no replica took the request in time (w0: asleep)"
    for at, last in (
        (nowhere, None),
        (nowhere, "broken"),
        (replace(nowhere, tokens=(5,)), "refused"),
    ):
        assert isinstance(out_of_time_error(at, last, "w0: asleep"), DeadlineExceeded)  # type: ignore[arg-type]
