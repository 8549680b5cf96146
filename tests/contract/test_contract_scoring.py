"""Scores of prompts and the most likely tokens, against plain transformers; the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from rollout_worker.schemas import SamplingParams
from tests.support.engine.contracts import Served, made_by, outputs_of, pieces, sound
from tests.support.engine.judging_scores import CLOSE, check_rows, check_scores
from tests.support.engine.reference import Reference, distribution
from tests.support.engine.workers import PROMPT, slug

MOST = 256
UPDATED = 1000
"""Tokens of an output during which new weights come, also where they come late: on a busy machine."""
LONGEST = 2048
"""The tiny model's maximum length."""
TEXT = [3 + (index * 37 + index * index) % 4000 for index in range(LONGEST)]


def score(worker: Served, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """The answer of a request that only scores."""
    answer = worker.generate(token_ids=[*prompt], sampling={"max_tokens": 0}, **fields)
    [output] = outputs_of(answer)
    body: dict[str, Any] = answer.json()
    assert (output["token_ids"], output["stop_reason"]) == ([], "length")
    assert body["usage"]["completion_tokens"] == 0
    return body


@pytest.mark.parametrize(
    ("asked", "k"),
    [(True, 0), (True, 5), ([0, 1], 3), ([1, 2], 2), ([3, 9], 1), ([7, 8], MOST), ([0, 8], 0)],
    ids=str,
)
def test_a_prompt_is_only_scored(
    worker: Served, reference: dict[int, Reference], asked: Any, k: int
) -> None:
    prompt = [*PROMPT, 11, 12, 13, 14, 15][:9]
    start, end = (0, 9) if asked is True else asked
    for kind in ("sampling", "raw"):
        body = score(worker, prompt, prompt_logprobs=asked, top_logprobs=k, logprobs=kind)
        assert body["logprobs_of"] == kind
        check_scores(body["prompt_logprobs"], reference[1], prompt, start, end, k)


def test_a_prompt_of_one_token_has_no_logprob(worker: Served) -> None:
    scored = score(worker, [5], prompt_logprobs=True, top_logprobs=2)["prompt_logprobs"]
    assert scored["logprobs"] == [None]
    assert scored["top_logprobs"] == {"token_ids": [[]], "logprobs": [[]]}


def test_the_longest_prompt_with_the_most_tokens(
    worker: Served, reference: dict[int, Reference]
) -> None:
    """Whole, and its last part, while others generate."""
    others = worker.busy(4, 100)
    for asked, start in ((True, 0), ([2000, LONGEST], 2000)):
        scored = score(worker, TEXT, prompt_logprobs=asked, top_logprobs=MOST)["prompt_logprobs"]
        check_scores(scored, reference[1], TEXT, start, LONGEST, MOST)
    for answer in others():
        outputs_of(answer)


def test_outputs_come_with_their_most_likely_tokens(
    worker: Served, reference: dict[int, Reference]
) -> None:
    """And with the scores of their prompt; streamed or not, read as they grow or not."""
    sampling = {"max_tokens": 60, "ignore_eos": True, "temperature": 0, "n": 2}
    fields = {"sampling": sampling, "prompt_logprobs": [2, 6], "top_logprobs": 7}
    answer = worker.generate(token_ids=PROMPT, **fields).json()
    events = worker.stream(token_ids=PROMPT, **fields)
    frames = [data for name, data in events if name == "prompt_logprobs"]
    assert events.index(("prompt_logprobs", frames[0])) < min(
        index for index, (name, data) in enumerate(events) if name == "delta" and data["index"] == 0
    )
    [streamed] = frames
    for scored in (answer["prompt_logprobs"], streamed):
        check_scores(scored, reference[1], PROMPT, 2, 6, 7)
    rest = [each for each in events if each[0] != "prompt_logprobs"]
    for output in (*answer["outputs"], pieces(rest, 0), pieces(rest, 1)):
        logits = reference[1].logits(PROMPT, output["token_ids"])
        check_rows(output["top_logprobs"], logits.log_softmax(-1), 7)
        chosen = [values[0] for values in output["top_logprobs"]["logprobs"]]
        assert output["logprobs"] == pytest.approx(chosen, abs=CLOSE), "greedy takes the first"


SHAPES: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 12},
    {"temperature": 2.0, "repetition_penalty": 1.3, "allowed_token_ids": [5, 60, 700, 800]},
    {"logit_bias": {7: 3.0, 3918: -2.0}, "presence_penalty": 0.6},
]


@pytest.mark.parametrize("logprobs", ["sampling", "raw"])
def test_top_tokens_are_of_the_kind_that_was_asked_for(
    worker: Served, reference: dict[int, Reference], logprobs: str
) -> None:
    """What can't be drawn is in no row of the sampling distribution."""
    for fields in SHAPES:
        sampling = {**fields, "max_tokens": 12, "ignore_eos": True}
        answer = worker.generate(
            token_ids=PROMPT, sampling=sampling, logprobs=logprobs, top_logprobs=20
        )
        if logprobs not in worker.able["logprobs"]:
            assert (answer.status_code, slug(answer)) == (422, "unsupported")
            assert answer.json()["errors"][0]["field"] == "logprobs"
            continue
        [output] = answer.json()["outputs"]
        tokens, params = output["token_ids"], SamplingParams.model_validate(fields)
        logits = reference[1].logits(PROMPT, tokens)
        rows = [
            distribution(row, PROMPT, tokens[:index], params) for index, row in enumerate(logits)
        ]
        expected = torch.stack(rows) if logprobs == "sampling" else logits.log_softmax(-1)
        check_rows(output["top_logprobs"], expected, 20)


def test_a_prompt_is_refused_a_kind_that_it_was_not_drawn_with(worker: Served) -> None:
    hot = {"max_tokens": 0, "temperature": 0.7}
    answer = worker.generate(sampling=hot, prompt_logprobs=True, logprobs="sampling")
    assert (answer.status_code, slug(answer)) == (422, "unsupported")
    assert answer.json()["errors"][0]["field"] == "prompt_logprobs"
    assert worker.kind.engine in answer.json()["detail"]
    assert worker.generate(sampling=hot, prompt_logprobs=True, logprobs="raw").status_code == 200
    cold = {"max_tokens": 0, "temperature": 0, "top_p": 0.5}
    assert worker.generate(sampling=cold, prompt_logprobs=True).status_code == 200


@pytest.mark.parametrize("policy", ["Keep", "Recompute"])
def test_rows_and_scores_survive_an_update(
    worker: Served, reference: dict[int, Reference], policy: str
) -> None:
    """Each token's row is of the weights that made it; the prompt's scores name theirs."""
    if policy not in worker.able["in_flight"]:
        pytest.skip(f"the engine has no {policy}")
    sampling = {"max_tokens": UPDATED, "ignore_eos": True, "temperature": 0}
    before = worker.state()["weights"]["active"]["version"]
    running = worker.long(
        "u", token_ids=PROMPT, sampling=sampling, prompt_logprobs=True, top_logprobs=3
    )
    worker.makes(30)
    worker.load(2, in_flight=policy)
    body = running.result(60).json()
    [output] = body["outputs"]
    sound(output)
    assert len(made_by(output)) == 2
    assert body["prompt_logprobs"]["weights"]["version"] == before
    check_scores(body["prompt_logprobs"], reference[1], PROMPT, 0, len(PROMPT), 3)
    first = output["weights"][0]["end"]
    rows = {name: values[:first] for name, values in output["top_logprobs"].items()}
    check_rows(rows, reference[1].logits(PROMPT, output["token_ids"][:first]).log_softmax(-1), 3)
    assert len(output["top_logprobs"]["logprobs"]) == UPDATED
    best = [values[0] for values in output["top_logprobs"]["logprobs"]]
    assert output["logprobs"] == pytest.approx(best, abs=CLOSE)


def test_scores_are_labelled_by_the_weights_that_made_them(
    worker: Served, reference: dict[int, Reference]
) -> None:
    """While new weights come, every score is of the version that it names, whole."""
    epoch, version = worker.next_version()
    text, calls = TEXT[:600], []
    for _ in range(6):
        ask = partial(score, worker, text, prompt_logprobs=True, top_logprobs=2)
        calls.append(worker.in_background(ask))
    worker.load(2, in_flight="Drain")
    calls += [worker.in_background(ask) for _ in range(2)]
    seen = set()
    for call in calls:
        scored = call.result(60)["prompt_logprobs"]
        new = (scored["weights"]["epoch"], scored["weights"]["version"]) == (epoch, version)
        seen.add(new)
        check_scores(scored, reference[2 if new else 1], text, 0, len(text), 2)
    assert True in seen


def test_capabilities_name_scores(worker: Served) -> None:
    assert (worker.able["prompt_logprobs"], worker.able["top_logprobs"]) == (True, MOST)
