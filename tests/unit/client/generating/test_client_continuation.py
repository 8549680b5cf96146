"""What the next attempt is asked for: one budget, one seed on, the right weights, the right tokens."""

from __future__ import annotations

import pytest

from rollout_client.generating.continuation import (
    remaining_bounds,
    remaining_request,
    remaining_sampling,
    rewind_length,
)
from rollout_client.generating.output_draft import OutputDraft
from rollout_client.routing.member_records import WeightsBounds
from rollout_worker.schemas import (
    GenerateRequest,
    SamplingParams,
    StreamDelta,
    StructuredOutput,
    WeightsSpan,
)


def draft(*versions: int) -> OutputDraft:
    """A draft with a token of each version, in epoch 1."""
    made = OutputDraft(GenerateRequest(token_ids=(1,)))
    made.begin_attempt()
    for at, version in enumerate(versions):
        span = WeightsSpan(epoch=1, version=version, start=at, end=at + 1)
        made.append_delta(
            StreamDelta(index=0, token_ids=(10 + at,), logprobs=None, weights=(span,))
        )
    return made


def test_one_budget_over_all_attempts() -> None:
    sampling = SamplingParams(max_tokens=10, min_tokens=4, temperature=0.7)
    assert remaining_sampling(sampling, 0) is sampling
    rest = remaining_sampling(sampling, 3)
    assert (rest.max_tokens, rest.min_tokens, rest.temperature) == (7, 1, 0.7)
    assert remaining_sampling(sampling, 9).min_tokens == 0
    assert remaining_sampling(SamplingParams(), 1).max_tokens is None


def test_a_continuation_draws_other_numbers_but_always_the_same_ones() -> None:
    sampling = SamplingParams(seed=5)
    seeds = [remaining_sampling(sampling, tokens).seed for tokens in range(5)]
    assert len(set(seeds)) == 5
    assert seeds == [remaining_sampling(sampling, tokens).seed for tokens in range(5)]
    # Part of the contract of a seeded run: it may be repeated with another version of the client.
    assert seeds[:3] == [5, 2177342782468422682, 4354685564936845359]
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert remaining_sampling(SamplingParams(), 3).seed is None


@pytest.mark.parametrize(
    ("sampling", "end_known", "tokens", "rewind"),
    [
        (SamplingParams(), True, 5, 0),
        (SamplingParams(), False, 5, 1),
        (SamplingParams(), False, 0, 0),
        (SamplingParams(ignore_eos=True), False, 5, 0),
        (SamplingParams(stop=("</a>", "é")), True, 5, 4),
        (SamplingParams(stop=("</a>", "é")), False, 5, 4),
        (SamplingParams(stop=("éé",)), True, 5, 4),
        (SamplingParams(stop=("a",)), False, 5, 1),
        (SamplingParams(stop=("a",)), True, 5, 1),
        (SamplingParams(stop=("abcdef",)), True, 2, 2),
        (SamplingParams(repetition_penalty=1.2), True, 5, 0),
        (SamplingParams(presence_penalty=0.1), True, 5, 5),
        (SamplingParams(frequency_penalty=-0.1), True, 5, 5),
    ],
)
def test_what_a_break_could_hide_is_sampled_again(
    sampling: SamplingParams, end_known: bool, tokens: int, rewind: int
) -> None:
    request = GenerateRequest(token_ids=(1,), sampling=sampling)
    assert rewind_length(request, tokens, end_known=end_known) == rewind


def test_a_structured_output_starts_over() -> None:
    """The next worker's grammar begins with the first token that it samples."""
    structured = StructuredOutput(choice=("red", "green"))
    request = GenerateRequest(token_ids=(1,), structured=structured)
    assert rewind_length(request, 3, end_known=True) == 3


@pytest.mark.parametrize(
    ("asked", "versions", "one_version", "rest"),
    [
        (WeightsBounds(2, 3, 4), (), True, WeightsBounds(2, 3, 4)),
        (WeightsBounds(), (), True, WeightsBounds()),
        (WeightsBounds(), (5, 6), False, WeightsBounds(1, 6)),
        (WeightsBounds(0, 2), (5, 6), False, WeightsBounds(1, 6)),
        (WeightsBounds(0, 2), (5,), True, WeightsBounds(1, 2, 5)),
        (WeightsBounds(1, None, 5), (5,), False, WeightsBounds(1, None, 5)),
    ],
)
def test_the_rest_comes_from_the_same_weights_or_from_no_older_ones(
    asked: WeightsBounds, versions: tuple[int, ...], one_version: bool, rest: WeightsBounds
) -> None:
    assert remaining_bounds(asked, draft(*versions), one_version=one_version) == rest


def test_the_rest_is_asked_for_behind_the_tokens_so_far() -> None:
    request = GenerateRequest(token_ids=(1, 2), sampling=SamplingParams(max_tokens=5))

    def rest(made: OutputDraft, seconds: float = 7.5) -> GenerateRequest:
        bounds = WeightsBounds(1, 2, 3)
        return remaining_request(
            request, made, bounds, request_id="r.a1", session_id="s", seconds=seconds
        )

    first, second = rest(draft()), rest(draft(4, 4))
    assert first.token_ids == (1, 2)
    assert first.sampling == request.sampling
    assert second.token_ids == (1, 2, 10, 11)
    assert second.sampling.max_tokens == 3
    assert second.stream
    assert (second.request_id, second.session_id) == ("r.a1", "s")
    assert (second.epoch, second.min_version, second.exact_version) == (1, 2, 3)
    assert second.deadline_seconds == 7.5
    assert rest(draft(), seconds=-1).deadline_seconds == 0.001
