"""The check of examples/grpo passes what is right, and refuses whatever is damaged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

import check
import tools
from calculator import END, TEMPLATE, Question
from check import Conversation, Turn
from rollout_client import GenerateResult
from rollout_worker.schemas import from_batch, to_batch
from tests.support.unit.chatstyles import tokenizer as style

QUESTION = Question(17, 25)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = copy.deepcopy(style("qwen"))  # others use it, too
    found.chat_template = TEMPLATE
    return found


class Engine:
    """Answers as it was told, from weights 3.1, 3.1 and 3.2, 3.2, …"""

    def __init__(self, tokenizer: Any, *answers: str) -> None:
        self.tokenizer, self.answers = tokenizer, list(answers)
        self.version = 1

    def generate(self, prompt: list[int], **fields: Any) -> GenerateResult:
        assert (fields["epoch"], fields["min_version"]) <= (3, self.version)
        text = self.answers.pop(0)
        ids = self.tokenizer.convert_tokens_to_ids(list(text.removesuffix(END)))
        if text.endswith(END):
            ids.append(self.tokenizer.convert_tokens_to_ids(END))
        half, before = len(ids) // 2, self.version
        self.version += len(self.answers) == 1  # an update in the middle of the last call
        spans = [(before, 0, half, False), (self.version, half, len(ids), before < self.version)]
        return GenerateResult.model_validate(
            {
                "request_id": "r",
                "session_id": fields["session_id"],
                "logprobs_of": fields["logprobs"],
                "outputs": [
                    {
                        "index": 0,
                        "token_ids": ids,
                        "logprobs": [-0.1 - 0.01 * i for i in range(len(ids))],
                        "stop_reason": "stop" if text.endswith(END) else "length",
                        "weights": [
                            {"epoch": 3, "version": v, "start": a, "end": b, "stale_kv": s}
                            for v, a, b, s in spans
                        ],
                    }
                ],
                "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
                "timing": {"queued_seconds": 0, "total_seconds": 0},
            }
        )


def held(tokenizer: Any, *answers: str) -> Conversation:
    """A conversation as the trainer holds it, through a batch and back."""
    engine = Engine(tokenizer, *answers)
    publisher: Any = SimpleNamespace(pool=engine, committed=(3, 1), identity=(3, 2))
    made = tools.Task(tokenizer, publisher).converse(QUESTION, "c1")
    return replace(made, request=from_batch(to_batch([made.request], pad_token_id=0))[0])


def found(tokenizer: Any, *conversations: Conversation) -> list[str]:
    """The faults of answers to one question."""
    return check.check([QUESTION], conversations, tokenizer).faults


@pytest.mark.parametrize(
    "answers",
    [
        ("42" + END,),
        ("9", ),
        (f"<calc>17+25</calc>{END}", "42" + END),
        ("<calc>17+25</calc>", "42" + END),
        (f"<calc>+</calc>{END}", f"<calc>17+25</calc>{END}", "42" + END),
        tuple(f"<calc>17+2{n}</calc>{END}" for n in range(3)),
    ],
)  # fmt: skip
def test_what_is_right_passes(tokenizer: Any, answers: tuple[str, ...]) -> None:
    report = check.check([QUESTION], [held(tokenizer, *answers)], tokenizer)
    assert report.faults == []
    assert report.turns == len(answers)
    assert report.tool_calls == len(answers) - 1


def dropped_token(each: Conversation) -> None:
    each.request.streams.cut_to(len(each.request.streams) - 1)


def unnamed_version(each: Conversation) -> None:
    each.request.streams.weights.pop()


def unanswered_call(each: Conversation) -> None:
    each.request.messages.pop(2)


def other_field(name: str, value: object) -> Callable[[Conversation], None]:
    """Damage a field of the request, or of its streams."""

    def damage(each: Conversation) -> None:
        of, _, field = f"request.{name}".rpartition(".")
        setattr(attrgetter(of)(each), field, value)

    return damage


TOOL_TOKEN = -1000
"""Stands for the place of the calculator's result."""


def other_mark(column: str, place: int, value: float) -> Callable[[Conversation], None]:
    def damage(each: Conversation) -> None:
        at = len(each.turns[1].prompt) - 10 if place == TOOL_TOKEN else place
        getattr(each.request.streams, column)[at] = value

    return damage


def other_span(number: int, **fields: object) -> Callable[[Conversation], None]:
    def damage(each: Conversation) -> None:
        spans = each.request.streams.weights
        spans[number] = spans[number].model_copy(update=fields)

    return damage


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (other_mark("loss", TOOL_TOKEN, 1), "loss mask 1, not 0"),
        (other_mark("sampled", TOOL_TOKEN, 1), "response mask 1, not 0"),
        (other_mark("sampled", -1, 0), "response mask 0, not 1"),
        (other_mark("logprobs", -2, -0.5), ": logprob -0.5"),
        (other_mark("ids", -2, 0), ": id 0"),
        (dropped_token, "of id, not"),
        (other_field("streams.prompt", 1), "the prompt is not what was sent first"),
        (other_span(0, version=2), "weights (3, 2, False), not (3, 1, False)"),
        (other_span(1, stale_kv=False), "weights (3, 2, False), not (3, 2, True)"),
        (unnamed_version, "weights None, not (3, 2, "),
        (other_field("reward_scores", {"sum": [0.0]}), "reward: "),
        (other_field("logprobs_of", "raw"), "logprobs of: 'raw'"),
        (unanswered_call, "calls answered: 0, not 1"),
    ],
)
def test_a_damaged_sample_is_refused(
    tokenizer: Any, damage: Callable[[Conversation], None], told: str
) -> None:
    conversation = held(tokenizer, f"<calc>17+25</calc>{END}", "42" + END)
    damage(conversation)
    assert told in "\n".join(found(tokenizer, conversation))


def damaged_answers(each: Conversation) -> Iterator[tuple[str, Conversation]]:
    """What engines and pools must not do, with what is told of it."""

    def turn(number: int, **changes: Any) -> Conversation:
        turns = list(each.turns)
        output = turns[number].result.output.model_copy(update=changes)
        result = turns[number].result.model_copy(update={"outputs": (output,)})
        turns[number] = Turn(turns[number].prompt, result)
        return replace(each, turns=turns)

    first, last = each.turns[0].result.output, each.turns[1].result.output
    older = [span.model_copy(update={"version": 1}) for span in last.weights]
    yield "weights (3, 1) behind (3, 2)", turn(1, weights=tuple(older))
    yield "weights (3, 2), not (3, 1) to (3, 1)", replace(each, newest=(3, 1))
    yield "weights (3, 1), not (3, 2) to (3, 2)", replace(each, oldest=(3, 2))
    yield "it ended by aborted", turn(0, stop_reason="aborted")
    yield "its spans of weights do not cover", turn(0, weights=first.weights[:1])
    yield "tokens with logprobs", turn(0, logprobs=first.logprobs[:-1] if first.logprobs else ())
    yield "it ended by stop with", turn(0, token_ids=first.token_ids[:-1])
    raw = each.turns[0].result.model_copy(update={"logprobs_of": "raw"})
    yield "logprobs of raw", replace(each, turns=[Turn(each.turns[0].prompt, raw), each.turns[1]])
    forgot = Turn(each.turns[1].prompt[1:], each.turns[1].result)
    yield "its prompt is not what was said", replace(each, turns=[each.turns[0], forgot])
    yield "was added, not", replace(each, question=Question(17, 26))


def test_wrong_answers_are_refused(tokenizer: Any) -> None:
    conversation = held(tokenizer, f"<calc>17+25</calc>{END}", "42" + END)
    for told, damaged in damaged_answers(conversation):
        assert told in "\n".join(found(tokenizer, damaged))


def test_lost_and_doubled_conversations_are_refused(tokenizer: Any) -> None:
    conversation = held(tokenizer, "42" + END)
    assert found(tokenizer) == ["1 questions, not these 0 answers"]
    assert found(tokenizer, conversation, conversation) == [
        "1 questions, not these 2 answers",
        "c1: 2 times",
    ]
