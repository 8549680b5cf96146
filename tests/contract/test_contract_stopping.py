"""How outputs end: EOS lists, stop ids, stop strings, lengths; n outputs; streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.engine.contracts import EOS, VOCAB, Output, Served, pieces, sound
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, slug

GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="session")
def greedy(reference: dict[int, Reference]) -> list[int]:
    return reference[1].greedy(PROMPT, 12)


def prompts_to(judge: Reference, tokens: tuple[int, ...]) -> dict[int, list[int]]:
    """For each of these tokens a prompt whose greedy continuation begins with it."""
    found: dict[int, list[int]] = {}
    with torch.no_grad():
        for first in range(3, 99):
            prompts = torch.tensor([[first, second] for second in range(VOCAB)])
            chosen = judge.model(prompts, logits_to_keep=1).logits[:, -1].argmax(-1)
            for token in set(tokens) - set(found):
                hits = (chosen == token).nonzero()
                if len(hits):
                    found[token] = prompts[int(hits[0])].tolist()
            if len(found) == len(tokens):
                return found
    raise AssertionError(f"no prompt leads to {set(tokens) - set(found)}")


@pytest.fixture(scope="session")
def to_eos(reference: dict[int, Reference]) -> dict[int, list[int]]:
    return prompts_to(reference[1], EOS)


@pytest.mark.parametrize("eos", EOS)
def test_every_eos_of_the_list_ends_an_output(
    worker: Served, to_eos: dict[int, list[int]], eos: int
) -> None:
    [output] = worker.outputs(GREEDY, token_ids=to_eos[eos])
    assert output["token_ids"] == [eos], "the completing token is included"
    assert output["stop_reason"] == "stop"
    assert output["stop_match"] == {"token_id": eos}


@pytest.mark.parametrize("eos", EOS)
def test_ignore_eos_goes_on(worker: Served, to_eos: dict[int, list[int]], eos: int) -> None:
    [output] = worker.outputs({**GREEDY, "ignore_eos": True}, token_ids=to_eos[eos])
    assert (output["stop_reason"], len(output["token_ids"])) == ("length", 12)
    assert output["token_ids"][0] == eos


def test_min_tokens_masks_every_eos(worker: Served, to_eos: dict[int, list[int]]) -> None:
    """And every stop id."""
    if "min_tokens" not in worker.able["sampling"]:
        pytest.skip(f"{worker.kind} declares no min_tokens")
    sampling = {**GREEDY, "min_tokens": 3, "max_tokens": 6}
    stop = worker.sample(1)["token_ids"]
    for prompt, stops in (*((each, []) for each in to_eos.values()), (PROMPT, stop)):
        [output] = worker.outputs(
            {**sampling, "stop_token_ids": stops}, token_ids=prompt, logprobs="none"
        )
        assert len(output["token_ids"]) >= 3
        assert not set(output["token_ids"][:3]) & {*EOS, *stops}


@pytest.mark.parametrize("eos", EOS)
def test_min_tokens_masks_no_eos_that_is_ignored(worker: Served, eos: int) -> None:
    if not {"min_tokens", "allowed_token_ids"} <= set(worker.able["sampling"]):
        pytest.skip(f"{worker.kind} declares no min_tokens, or no allowed_token_ids")
    sampling = {**GREEDY, "allowed_token_ids": [eos], "ignore_eos": True, "min_tokens": 2}
    [output] = worker.outputs({**sampling, "max_tokens": 3}, logprobs="none")
    assert (output["token_ids"], output["stop_reason"]) == ([eos] * 3, "length")


def test_a_stop_id_ends_an_output_and_is_kept(worker: Served, greedy: list[int]) -> None:
    for at in (0, 4):
        if greedy.index(greedy[at]) != at:
            continue
        [output] = worker.outputs({**GREEDY, "stop_token_ids": [greedy[at], VOCAB - 1]})
        assert output["token_ids"] == greedy[: at + 1]
        assert output["stop_reason"] == "stop"
        assert output["stop_match"] == {"token_id": greedy[at]}


def test_stop_ids_work_while_eos_is_ignored(worker: Served, greedy: list[int]) -> None:
    [output] = worker.outputs({**GREEDY, "ignore_eos": True, "stop_token_ids": [greedy[2]]})
    assert output["stop_match"] == {"token_id": greedy[2]}


@pytest.mark.parametrize("inside", ["one token", "two tokens"])
def test_a_stop_string_ends_an_output_untrimmed(
    worker: Served, tiny_models: TinyModels, greedy: list[int], inside: str
) -> None:
    stop, expected = stop_string(tiny_models.model(1), greedy, inside)
    fields = {**GREEDY, "stop": [stop, "never said"]}
    if not worker.able["stop_strings"]:
        answer = worker.generate(sampling=fields)
        assert (answer.status_code, slug(answer)) == (422, "unsupported")
        return
    for output in (worker.outputs(fields)[0], pieces(worker.stream(sampling=fields), 0)):
        assert output["token_ids"] == greedy[:expected], "up to the token that completes it"
        assert output["stop_reason"] == "stop"
        assert output["stop_match"] == {"text": stop}
        assert len(output["logprobs"]) == expected


def stop_string(model: Path, tokens: list[int], inside: str) -> tuple[str, int]:
    """A string of the greedy text and how many tokens it takes to say it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    texts = [tokenizer.decode(tokens[:n]) for n in range(len(tokens) + 1)]
    at = len(texts[3])
    stop = texts[5][at + 1 : at + 3] if inside == "one token" else texts[-1][at - 2 : at + 2]
    said = next(n for n, text in enumerate(texts) if stop in text)
    return stop, said


def test_lengths(worker: Served) -> None:
    [one] = worker.outputs({"max_tokens": 1, "ignore_eos": True})
    assert (len(one["token_ids"]), one["stop_reason"]) == (1, "length")
    [rest] = worker.outputs({"ignore_eos": True}, token_ids=[9] * 2040)
    assert (len(rest["token_ids"]), rest["stop_reason"]) == (8, "length"), "up to the length"


def test_n_outputs_are_drawn_apart(worker: Served) -> None:
    sampling = {"n": 4, "max_tokens": 10, "ignore_eos": True}
    answer = worker.generate(sampling=sampling).json()
    assert [output["index"] for output in answer["outputs"]] == [0, 1, 2, 3]
    assert len({tuple(output["token_ids"]) for output in answer["outputs"]}) == 4
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


def test_seeds_reproduce_whatever_else_runs(worker: Served) -> None:
    sampling: dict[str, Any] = {"n": 3, "seed": 11, "max_tokens": 10, "ignore_eos": True}
    if not worker.able["seed"]:
        answer = worker.generate(sampling=sampling)
        assert (answer.status_code, slug(answer)) == (422, "unsupported")
        assert answer.json()["errors"][0]["field"] == "sampling.seed"
        return
    alone = [output["token_ids"] for output in worker.outputs(sampling)]
    rest = worker.busy(8, 100)
    assert [output["token_ids"] for output in worker.outputs(sampling)] == alone
    rest()
    singles = [
        worker.outputs({**sampling, "n": 1, "seed": 11 + i})[0]["token_ids"] for i in range(3)
    ]
    assert singles == alone, "output i uses seed + i"


# Streams.


def test_deltas_add_up_to_the_answer(worker: Served) -> None:
    sampling = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "n": 2}
    events = worker.stream(sampling=sampling, request_id="s")
    whole = worker.generate(sampling=sampling, request_id="s").json()
    assert len(events) > 2, "more than one piece"
    for output in whole["outputs"]:
        streamed = pieces(events, output["index"])
        sound(streamed)
        assert streamed["token_ids"] == output["token_ids"]
        assert streamed["weights"] == output["weights"]
        assert streamed["logprobs"] == pytest.approx(output["logprobs"], abs=1e-4)
        assert streamed["stop_reason"] == output["stop_reason"]
    done = events[-1][1]
    assert done["request_id"] == "s"
    assert done["logprobs_of"] == whole["logprobs_of"]
    assert done["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 80
    assert not {"token_ids", "logprobs", "weights"} & set(done["outputs"][0])


def test_a_stream_without_logprobs(worker: Served) -> None:
    output: Output = pieces(worker.stream(sampling=GREEDY, logprobs="none"), 0)
    assert "logprobs" not in output
    assert len(output["token_ids"]) == 12
