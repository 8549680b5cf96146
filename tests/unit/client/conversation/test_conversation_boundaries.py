"""A turn behind sampled ids: nothing is written twice, and only a contradicted end is taken back."""

from __future__ import annotations

import pytest

from rollout_client.conversation.boundaries import TurnTokens, fit_turn
from rollout_client.conversation.examples import (
    example_ending_with,
    example_of,
    longer_example,
    message_kind,
    message_kinds,
)
from rollout_client.conversation.template_messages import Message

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


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {}}}
BRIEF: Message = {"role": "system", "content": "be brief"}
ASK: Message = {"role": "user", "content": "what is 17 + 25?"}
CALLS: Message = {"role": "assistant", "content": "let me add", "tool_calls": [CALL]}
RESULT: Message = {"role": "tool", "content": "42", "tool_call_id": "c1"}
SAID: Message = {"role": "assistant", "content": "42"}


def shape(messages: list[Message]) -> str:
    return " ".join(kind[0] for kind in message_kinds(messages))


def test_a_window_ends_as_its_conversation_does() -> None:
    for history in ([ASK], [ASK, SAID], [ASK, CALLS], [ASK, CALLS, RESULT]):
        example = example_of(history)
        assert message_kind(example[-1]) == message_kind(history[-1])
        assert [m["role"] for m in example] == [
            m["role"] for m in example_ending_with(message_kind(history[-1]))
        ]
        assert "42" not in str([message["content"] for message in example])
    # The calls' names are real: templates print results beside the names that they answer.
    example = example_of([ASK, CALLS, RESULT, RESULT])
    [named] = example[1]["tool_calls"]
    assert (named["id"], named["function"]["name"]) == ("c1", "add")
    assert [m["tool_call_id"] for m in example[2:]] == ["c1", "c1"]
    # An answer given as text has no calls; results that follow it get some to answer.
    example = example_of([ASK, SAID], [RESULT])
    assert example[-1]["tool_calls"][0]["id"] == "c1"


@pytest.mark.parametrize(
    ("history", "window"),
    [
        ([BRIEF], "s"),
        ([BRIEF, ASK], "s u"),
        ([*[ASK, SAID] * 9, ASK], "u a u"),
        ([BRIEF, *[ASK, SAID] * 10], "s u a u a"),
        ([ASK, SAID, ASK, *[CALLS, RESULT] * 2, SAID, *[ASK, SAID] * 5, ASK], "u c t a u"),
        ([ASK, CALLS, RESULT, ASK, SAID, ASK], "u c t u"),
        ([ASK, *[CALLS, RESULT] * 7, CALLS], "u c t c"),
        ([ASK, *[CALLS, RESULT] * 7, CALLS, RESULT, RESULT], "u c t c t t"),
        ([SAID, ASK], "u"),
    ],
)
def test_a_window_keeps_what_templates_look_at(history: list[Message], window: str) -> None:
    """A system message, one earlier round with calls, one step since the last question."""
    assert shape(example_of(history)) == window


@pytest.mark.parametrize(
    ("example", "longer"),
    [
        ([BRIEF, ASK, SAID], "s u a"),  # it is the whole conversation
        ([ASK, SAID, ASK], "u a u a u a u"),
        (
            [BRIEF, ASK, CALLS, RESULT, SAID, ASK, SAID],
            "s u c t a u a u c t a u a",
        ),
        ([ASK, CALLS, RESULT, CALLS, RESULT], "u c t c t c t"),
    ],
)
def test_a_longer_window_has_more_of_what_there_is(example: list[Message], longer: str) -> None:
    assert shape(longer_example(example)) == longer
