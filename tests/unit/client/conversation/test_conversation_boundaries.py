"""A turn behind sampled ids: nothing is written twice, and only a contradicted end is taken back."""

from __future__ import annotations

import pytest

from rollout_client.conversation.boundaries import (
    BoundaryTokenizer,
    TurnTokens,
    common_length,
    fit_turn,
)
from rollout_client.conversation.examples import (
    example_ending_with,
    example_of,
    longer_example,
    message_kind,
    message_kinds,
)
from rollout_client.conversation.template_messages import Message
from tests.support.unit.chatstyles import tokenizer
from tests.support.unit.conversations import codec

END, NEXT, OTHER, NEWLINE = 90, 91, 92, 10
SPECIAL = {END, NEXT, OTHER}


@pytest.mark.parametrize(
    ("tail", "close", "body", "stopped", "left", "removed"),
    [
        ([1, 2], [END, NEWLINE], [NEXT, 5], None, ([END, NEWLINE], [NEXT, 5]), 0),
        ([1, END], [END, NEWLINE], [NEXT, 5], END, ([NEWLINE], [NEXT, 5]), 0),
        ([END, NEWLINE], [END, NEWLINE], [NEXT, 5], None, ([], [NEXT, 5]), 0),
        ([1, OTHER], [END, NEWLINE], [NEXT, 5], OTHER, ([NEWLINE], [NEXT, 5]), 0),
        ([1, NEXT], [], [NEXT, 5], None, ([], [5]), 0),
        ([1, OTHER], [], [NEXT, 5], OTHER, ([], [NEXT, 5]), 1),
        ([1, OTHER], [], [NEXT, 5], None, ([], [NEXT, 5]), 0),
        ([1, 7], [], [7, 5], None, ([], [7, 5]), 0),
        ([1, 7], [], [7, 5], 7, ([], [5]), 0),
        ([1, 7], [], [6, 5], 7, ([], [6, 5]), 0),
        ([1, END], [NEWLINE], [NEXT], END, ([NEWLINE], [NEXT]), 0),
        ([], [END], [NEXT], None, ([END], [NEXT]), 0),
        ([1, OTHER], [], [], OTHER, ([], []), 0),
    ],
)
def test_what_the_policy_wrote_of_a_turn_is_not_written_twice(
    tail: list[int],
    close: list[int],
    body: list[int],
    stopped: int | None,
    left: tuple[list[int], list[int]],
    removed: int,
) -> None:
    turn = TurnTokens(close=list(close), body=list(body))
    assert fit_turn(tail, turn, SPECIAL, {END}, stopped) == removed
    assert (turn.close, turn.body) == left


@pytest.mark.parametrize(
    ("a", "b", "length"), [([], [1], 0), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([2], [1], 0)]
)
def test_common_beginnings(a: list[int], b: list[int], length: int) -> None:
    assert common_length(a, b) == length


def test_a_seam_at_a_special_token_is_clean_and_one_within_a_word_may_merge() -> None:
    seams, encode = BoundaryTokenizer(codec("qwen")), codec("qwen").encode
    assert seams.encode_following("seven", "<|im_end|>") == (encode("<|im_end|>"), True)
    assert seams.encode_following("seven", "<|im_end|>") == (encode("<|im_end|>"), True), (
        "remembered"
    )
    ids, clean = seams.encode_following("seven.", " twelve")
    assert clean
    assert tokenizer("qwen").decode(ids) == " twelve"
    assert not seams.encode_following("five}}", "\nsix")[1]


def test_a_window_ends_as_its_conversation_does() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {}}}
    question: Message = {"role": "user", "content": "what is 17 + 25?"}
    asks: Message = {"role": "assistant", "content": "let me add", "tool_calls": [call]}
    result: Message = {"role": "tool", "content": "42", "tool_call_id": "c1"}
    plain: Message = {"role": "assistant", "content": "42"}
    for history in ([question], [question, plain], [question, asks], [question, asks, result]):
        example = example_of(history)
        assert message_kind(example[-1]) == message_kind(history[-1])
        assert [m["role"] for m in example] == [
            m["role"] for m in example_ending_with(message_kind(history[-1]))
        ]
        assert "42" not in str([message["content"] for message in example])
    # The calls' names are real: templates print results beside the names that they answer.
    example = example_of([question, asks, result, result])
    [named] = example[1]["tool_calls"]
    assert (named["id"], named["function"]["name"]) == ("c1", "add")
    assert [m["tool_call_id"] for m in example[2:]] == ["c1", "c1"]
    # An answer given as text has no calls; results that follow it get some to answer.
    example = example_of([question, plain], [result])
    assert example[-1]["tool_calls"][0]["id"] == "c1"


def test_a_window_keeps_what_templates_look_at() -> None:
    """A system message, one earlier round with calls, one step since the last question."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {}}}
    brief: Message = {"role": "system", "content": "be brief"}
    ask: Message = {"role": "user", "content": "what is 17 + 25?"}
    calls: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Message = {"role": "tool", "content": "42", "tool_call_id": "c1"}
    said: Message = {"role": "assistant", "content": "42"}
    chat, step = [ask, said], [calls, result]

    def shape(*history: Message) -> str:
        return " ".join(kind[0] for kind in message_kinds(example_of(history)))

    assert shape(brief) == "s"
    assert shape(brief, ask) == "s u"
    assert shape(*chat * 9, ask) == "u a u"
    assert shape(brief, *chat * 9, *chat) == "s u a u a"
    assert shape(*chat, ask, *step, *step, said, *chat * 5, ask) == "u c t a u"
    assert shape(ask, *step, ask, said, ask) == "u c t u"
    assert shape(ask, *step * 7, calls) == "u c t c"
    assert shape(ask, *step * 7, calls, result, result) == "u c t c t t"
    assert shape(*chat, ask, *step * 2, said, *chat, ask) == "u c t a u", "one step"
    assert shape(said, ask) == "u", "an answer without a question is no round"


def test_a_longer_window_has_more_of_what_there_is() -> None:
    calls, tool = example_ending_with("tool")[1:]
    [ask, said] = example_ending_with("assistant")
    brief: Message = {"role": "system", "content": "zqxsystemzqx"}

    def more(*example: Message) -> str:
        return " ".join(kind[0] for kind in message_kinds(longer_example(example)))

    assert more(brief, ask, said) == "s u a", "it is the whole conversation"
    assert more(ask, said, ask) == "u a u a u a u"
    assert more(brief, ask, calls, tool, said, ask, said) == "s u c t a u a u c t a u a"
    assert more(ask, calls, tool, calls, tool) == "u c t c t c t"
