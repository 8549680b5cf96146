"""Logprobs of an engine against plain transformers, or the refusal that it declares."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import httpx
import torch

from rollout_worker.schemas import LogprobsOf, SamplingParams
from tests.support.engine.contracts import sound
from tests.support.engine.reference import Reference, distribution
from tests.support.engine.workers import PROMPT, Client, slug

TOKENS = 24
CLOSE = 1e-4
"""Error of a float32 sum over the vocabulary of the tiny model, amply."""
EDGE = 2e-5
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 12},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {7: 3.0, 3918: -2.0}},
    "allowed": {"allowed_token_ids": [5, 60, 700, 800, 1000, 1262, 3918]},
    "all": {
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
}
TEMPERATURES = (0.0, 0.5, 1.0, 2.0)


def undeclared(able: Mapping[str, Any], kind: LogprobsOf, fields: dict[str, Any]) -> str | None:
    """What the engine says it can't do of this, as the path that a 422 must name."""
    default = SamplingParams()
    changed = {field for field, value in fields.items() if value != getattr(default, field)}
    for field in sorted(changed):
        if field not in able["sampling"]:
            return f"sampling.{field}"
    if fields["temperature"] == 0:  # counts as T = 1, untruncated
        changed -= {"temperature", "top_p", "top_k", "min_p"}
    if changed and kind not in able["logprobs"]:
        return "logprobs"
    if kind == "sampling" and not changed <= set(able["sampling_logprobs"]):
        return "logprobs"
    return None


def _compare(
    answer: httpx.Response,
    kind: LogprobsOf,
    fields: dict[str, Any],
    judge: Reference,
    close: float,
) -> None:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    [output] = body["outputs"]
    sound(output)
    assert body["logprobs_of"] == kind
    tokens = output["token_ids"]
    assert len(tokens) == TOKENS
    logits = judge.logits(PROMPT, tokens)
    for index, token in enumerate(tokens):
        rows = [
            distribution(logits[index], PROMPT, tokens[:index], sampling)
            for sampling in _readings(fields)
        ]
        # Whatever is recorded, it was drawn from the distribution that was asked for.
        assert max(float(row[token]) for row in rows) > -30, f"token {index} may not be sampled"
        if fields["temperature"] == 0:
            assert float(rows[0][token]) >= float(rows[0].max()) - close
        if kind == "raw":
            rows = [logits[index].log_softmax(-1)]
        got = output["logprobs"][index]
        expected = [float(row[token]) for row in rows]
        assert min(abs(got - e) for e in expected) <= close, (index, got, expected)


def _readings(fields: dict[str, Any]) -> list[SamplingParams]:
    """Rounding decides whether the last token that `top_p` or `min_p` keeps is kept; both answers are right."""
    sampling = SamplingParams.model_validate(fields)
    top_p, min_p = sampling.top_p, sampling.min_p
    if sampling.temperature == 0:
        return [sampling]
    nuclei = [top_p, top_p - EDGE, top_p + EDGE] if top_p < 1 else [top_p]
    floors = [min_p, min_p * (1 - 10 * EDGE), min_p * (1 + 10 * EDGE)] if min_p else [min_p]
    return [
        sampling.model_copy(update={"top_p": nucleus, "min_p": floor})
        for nucleus, floor in itertools.product(nuclei, floors)
    ]


def check(
    worker: Client,
    kind: LogprobsOf,
    temperature: float,
    judge: Reference,
    shapes: Collection[str] = tuple(SHAPES),
    close: float = CLOSE,
) -> None:
    """Ask for every shape at once; each is right, or it is refused as declared."""
    able = worker.data.get("/v1/info").json()["capabilities"]
    fields = {name: {"temperature": temperature, **SHAPES[name]} for name in shapes}
    calls = {
        name: worker.in_background(
            partial(
                worker.generate,
                sampling={**fields[name], "max_tokens": TOKENS, "ignore_eos": True},
                logprobs=kind,
            )
        )
        for name in shapes
    }
    for name, call in calls.items():
        answer, lack = call.result(60), undeclared(able, kind, fields[name])
        if lack is None:
            _compare(answer, kind, fields[name], judge, close)
        else:
            assert (answer.status_code, slug(answer)) == (422, "unsupported"), (name, answer.text)
            assert answer.json()["errors"][0]["field"] == lack, name


def greedy(judge: Reference, prompt: Sequence[int], output: Sequence[int]) -> bool:
    """Whether every token of an output is the likeliest one, up to rounding."""
    logits = judge.logits(prompt, output)
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    return bool((chosen >= logits.max(-1).values - CLOSE).all())
