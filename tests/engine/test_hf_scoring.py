"""Scores of prompts in the hf engine: in pieces as in one, next to other requests, with weights that are unsound."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from rollout_worker.engine import EngineDelta, EngineRequest
from rollout_worker.engines.hf import core
from rollout_worker.engines.sampling.scoring import PromptScoring, score_tokens
from rollout_worker.schemas import StopReason, WeightsId
from tests.support.engine.engines import PROMPT, request, run, serving
from tests.support.engine.judging_scores import check_scores
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels

WEIGHTS = WeightsId(epoch=0, version=0)
VOCAB = 97


@pytest.mark.parametrize("seed", range(30))
def test_pieces_of_any_size_give_what_one_gives(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.randrange(1, 20)
    start = rng.randrange(length)
    end = rng.randrange(start + 1, length + 1)
    tokens = [rng.randrange(VOCAB) for _ in range(length)]
    logits = torch.randn(length, VOCAB) * 9
    scoring, at = PromptScoring(start, end, 3), 0
    while at < length:
        count = min(rng.randrange(1, 6), length - at)
        wanted = scoring.wanted_in(at, at + count)
        if len(wanted):
            scoring.add_scores(
                logits[wanted.start : wanted.stop], tokens[wanted.start + 1 :][: len(wanted)]
            )
        at += count
    found = scoring.finish_scores(WEIGHTS)
    first = max(1, start)
    values, top = score_tokens(logits[first - 1 : end - 1], tokens[first:end], 3)
    assert list(found.logprobs) == pytest.approx(([None] if start == 0 else []) + values)
    assert found.top is not None
    assert len(found.top) == end - start
    if top is not None and len(top):
        assert found.top.slice_rows(first - start, end - start).token_ids == top.token_ids


def test_logits_may_be_large() -> None:
    logits = torch.tensor([[3e38, -3e38, 3e38], [-1e30, -1e30, -3e38]])
    values, _ = score_tokens(logits, [0, 1], 0)
    assert values == pytest.approx([-0.6931, -0.6931], abs=1e-4)


async def test_a_prompt_is_scored_piece_by_piece_next_to_others(
    tiny_models: TinyModels, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more logits at a time than may exist; nobody's output changes."""
    monkeypatch.setattr(core, "SCORED_LOGITS", 4096 * 40)
    texts = [[(index * seed) % 4096 for index in range(300)] for seed in (7, 11, 13)]
    wanted = [
        replace(request(f"s{n}", text, max_tokens=n), scored=(5 * n, 300), top_logprobs=4)
        for n, text in enumerate(texts)
    ]
    async with serving(tiny_models.model(1), "--prefill-tokens", "128") as (engine, _):
        plain = asyncio.create_task(run(engine, request("plain", max_tokens=60, temperature=0)))

        async def last(each: EngineRequest) -> list[EngineDelta]:
            return [delta async for delta in engine.generate(each)]

        found = await asyncio.gather(*map(last, wanted))
        assert (await plain).token_ids == reference.greedy(PROMPT, 60)
    for n, (text, deltas) in enumerate(zip(texts, found, strict=True)):
        scored = [delta.prompt for delta in deltas if delta.prompt is not None]
        [scores] = scored
        assert deltas[0].prompt is scores
        assert deltas[-1].stop_reason is StopReason.LENGTH
        assert sum(len(delta.token_ids) for delta in deltas) == n
        page = scores.to_wire(0, 300 - 5 * n).model_dump(mode="json")
        check_scores(page, reference, text, 5 * n, 300, 4)
