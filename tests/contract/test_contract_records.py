"""Replay records on every engine: masks where its sampler is ours, refused by name where it can't record."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout_common.wire import SamplingMask
from rollout_worker.schemas import SamplingParams
from tests.support.engine.contracts import VOCAB, Served
from tests.support.engine.reference import Reference, distribution
from tests.support.engine.workers import PROMPT, slug


@pytest.mark.parametrize("field", ["return_routed_experts", "return_sampling_mask"])
def test_what_an_engine_cant_record_is_refused(worker: Served, field: str) -> None:
    """A dense model has no experts to record."""
    answer = worker.generate(token_ids=PROMPT, sampling={"max_tokens": 2}, **{field: True})
    if worker.able[field]:
        assert answer.status_code == 200, answer.text
        return
    assert (answer.status_code, slug(answer)) == (422, "unsupported")
    assert answer.json()["errors"][0]["field"] == field
    assert worker.kind.engine in answer.json()["detail"]


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": {"top_p": 0.7}},
        {"sampling": {"top_k": 3, "temperature": 0.5}},
        {"sampling": {"min_p": 0.02, "presence_penalty": 1.0}},
        {"sampling": {"allowed_token_ids": [*range(100, 140)], "top_k": 9}},
        {"sampling": {"temperature": 0, "repetition_penalty": 1.3}},
        {"sampling": {}, "structured": {"regex": "[01]{40}"}},
    ],
    ids=str,
)
def test_masks_say_what_could_be_drawn(
    worker: Served, reference: dict[int, Reference], fields: dict[str, Any]
) -> None:
    """Several outputs at once, next to others without."""
    if not worker.able["return_sampling_mask"]:
        pytest.skip(f"{worker.kind} records no masks")
    others = worker.busy(3, 50)
    fixed = {} if "structured" in fields else {"ignore_eos": True}
    sampling = {"max_tokens": 24, "seed": 2, "n": 3, **fixed, **fields["sampling"]}
    outputs = worker.outputs(
        sampling,
        return_sampling_mask=True,
        **{name: value for name, value in fields.items() if name != "sampling"},
    )
    params = SamplingParams.model_validate(sampling)
    for output in outputs:
        masks = SamplingMask.model_validate(output["sampling_mask"])
        assert masks.vocab_size == VOCAB
        assert len(masks.counts) == len(output["token_ids"])
        logits = reference[1].logits(PROMPT, output["token_ids"])
        plain = params.model_copy(update={"top_p": 1.0, "top_k": 0, "min_p": 0.0})
        for index, allowed in enumerate(masks.allowed_ids()):
            upto = output["token_ids"][:index]
            row = distribution(logits[index], PROMPT, upto, plain)
            kept = torch.full_like(row, -torch.inf)
            kept[allowed.astype(int)] = row[allowed.astype(int)]
            token = output["token_ids"][index]
            expected = output["logprobs"][index]
            assert float(kept.log_softmax(-1)[token]) == pytest.approx(expected, abs=2e-3)
            if params.temperature > 0 and "structured" not in fields:
                possible = distribution(logits[index], PROMPT, upto, params) > -1e20
                odd = abs(int(possible.sum()) - len(allowed))
                assert odd <= max(1, 0.01 * len(allowed)), "but for rounding at the edge"
    for answer in others():
        assert "sampling_mask" not in answer.json()["outputs"][0]


def test_a_large_negative_bias_excludes_a_token(
    worker: Served, reference: dict[int, Reference]
) -> None:
    """A trainer that knows the mask alone renormalises rightly: the model's own logits over it give the logprobs."""
    if not worker.able["return_sampling_mask"]:
        pytest.skip(f"{worker.kind} records no masks")
    banned = reference[1].logits(PROMPT, [5])[0].topk(300).indices.tolist()
    sampling = {"max_tokens": 9, "ignore_eos": True, "logit_bias": dict.fromkeys(banned, -1e9)}
    [output] = worker.outputs(sampling, return_sampling_mask=True)
    masks = SamplingMask.model_validate(output["sampling_mask"])
    logits = reference[1].logits(PROMPT, output["token_ids"])
    for index, allowed in enumerate(masks.allowed_ids()):
        assert not {*banned} & {*allowed.tolist()}
        ids = torch.tensor(allowed.astype(int))
        own = logits[index][ids].log_softmax(-1)[ids == output["token_ids"][index]]
        assert float(own) == pytest.approx(output["logprobs"][index], abs=2e-3)


def test_every_token_has_its_mask_whatever_ends_the_output(worker: Served) -> None:
    """Of a commit in the middle and an abort, and of requests that come and go beside it."""
    if not worker.able["return_sampling_mask"]:
        pytest.skip(f"{worker.kind} records no masks")
    sampling = {"max_tokens": 1500, "ignore_eos": True, "top_k": 7}
    asked = {"sampling": sampling, "return_sampling_mask": True}
    started = [
        worker.in_background(lambda: worker.generate(token_ids=PROMPT, **asked)) for _ in range(2)
    ]
    others = worker.busy(4, 30)
    worker.makes(100)
    worker.load(2, in_flight="Keep")
    worker.makes(100)
    worker.post("abort", all=True)
    others()
    for future in started:
        [output] = future.result(120).json()["outputs"]
        masks = SamplingMask.model_validate(output["sampling_mask"])
        assert output["token_ids"]
        assert len(masks.counts) == len(output["token_ids"])
        for token, allowed in zip(output["token_ids"], masks.allowed_ids(), strict=True):
            assert token in allowed
            assert len(allowed) == 7
