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
    for answer in others():
        assert "sampling_mask" not in answer.json()["outputs"][0]
