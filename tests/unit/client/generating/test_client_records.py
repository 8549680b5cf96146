"""Replay records over several attempts: each row once, whatever was cut off, repeated or sampled again."""

from __future__ import annotations

import base64
import random

import pytest

from rollout_client.generating.output_draft import BadDelta, OutputDraft
from rollout_common.wire import (
    GenerateRequest,
    RoutedExperts,
    SamplingMask,
    StopReason,
    StreamDelta,
    WeightsSpan,
)

PROMPT = 5
REQUEST = GenerateRequest(
    token_ids=(1,) * PROMPT, return_routed_experts=True, return_sampling_mask=True
)


def routes(start: int, values: list[int]) -> RoutedExperts:
    data = base64.b64encode(bytes(values)).decode()
    return RoutedExperts(start=start, rows=len(values), layers=1, top_k=1, dtype="uint8", data=data)


def masks(counts: list[int]) -> SamplingMask:
    rows = b"".join(bytes(4 * count) for count in counts)
    return SamplingMask(vocab_size=1000, counts=tuple(counts), data=base64.b64encode(rows).decode())


def delta(at: int, prompt: int, values: list[int]) -> StreamDelta:
    """Tokens of an attempt from its `at`-th on; the record of a token is its value."""
    return StreamDelta(
        index=0,
        token_ids=tuple(values),
        logprobs=None,
        routed_experts=routes(prompt - 1 + at, values),
        sampling_mask=masks([1 + value % 9 for value in values]),
        weights=(WeightsSpan(epoch=1, version=1, start=at, end=at + len(values)),),
    )


@pytest.mark.parametrize("seed", range(40))
def test_attempts_join_to_one_record(seed: int) -> None:
    rng = random.Random(seed)
    draft = OutputDraft(REQUEST)
    made: list[int] = []
    for attempt in range(rng.randrange(1, 6)):
        rewind = rng.randrange(0, 3) if attempt else 0
        draft.begin_attempt(rewind)
        made = made[: max(0, len(made) - rewind)]
        prompt, at = PROMPT + len(made), 0
        known = [200] * (PROMPT - 1) + made  # other values than those of the first attempt
        if rng.random() < 0.9:
            frames = rng.randrange(0, prompt)
            assert draft.routes is not None
            draft.routes.append_rows(routes(0, [100] * frames if attempt == 0 else known[:frames]))
            draft.routes.append_rows(routes(frames, ([100] * prompt)[frames : prompt - 1]))
            for _ in range(rng.randrange(0, 4)):
                values = [rng.randrange(100) for _ in range(rng.randrange(1, 4))]
                draft.append_delta(delta(at, prompt, values))
                at += len(values)
                made += values
    output = draft.to_output(StopReason.LENGTH, logprobs=False)
    assert list(output.token_ids) == made
    if not made:
        return
    assert output.routed_experts is not None
    assert output.sampling_mask is not None
    found = output.routed_experts.to_bytes()
    assert (output.routed_experts.start, len(found)) == (0, PROMPT - 1 + len(made))
    assert list(found[PROMPT - 1 :]) == made
    assert output.sampling_mask.counts == tuple(1 + value % 9 for value in made)
    part = draft.delta_between(len(made) // 2, len(made))
    if part.token_ids:
        assert part.routed_experts is not None
        assert (
            list(part.routed_experts.to_bytes())[-len(part.token_ids) :] == made[len(made) // 2 :]
        )


@pytest.mark.parametrize(
    "part",
    [
        delta(0, PROMPT, [1, 2]).model_copy(update={"routed_experts": None}),
        delta(0, PROMPT, [1, 2]).model_copy(update={"sampling_mask": None}),
        delta(0, PROMPT, [1, 2]).model_copy(update={"routed_experts": routes(PROMPT, [1, 2])}),
        delta(0, PROMPT, [1, 2]).model_copy(update={"routed_experts": routes(PROMPT - 1, [1])}),
        delta(0, PROMPT, [1, 2]).model_copy(update={"sampling_mask": masks([3])}),
    ],
    ids=["no routes", "no masks", "a gap", "too few routes", "too few masks"],
)
def test_records_that_do_not_fit_the_tokens_are_refused(part: StreamDelta) -> None:
    draft = OutputDraft(REQUEST)
    draft.begin_attempt()
    assert draft.routes is not None
    draft.routes.append_rows(routes(0, [9] * (PROMPT - 1)))
    with pytest.raises(BadDelta):
        draft.append_delta(part)
