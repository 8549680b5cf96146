"""Every chat template that the `trl` wheel ships: a turn's ids are those of its own full render."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_worker.schemas import RolloutRequest, TemplateError
from tests.support.unit.conversations import ADD
from tests.support.unit.shipped import Oracle, templates, tokenizer
from tests.support.unit.talks import Talk, speaks

ROUNDS = 4
"""In the first two of them a template is tried; the others cost only what they add."""


@pytest.mark.parametrize("name", templates())
def test_answers_and_questions(name: str) -> None:
    talk = Talk(name, *(["be brief"] if speaks(name, "system", "user") else []))
    for number in range(ROUNDS):
        talk.turn(talk.user(), end="ended" if number % 2 == 0 else "cut")
    assert "full_renders" not in talk.request.counters
    assert talk.costs[3] == talk.costs[2]


CALLING = [name for name in templates() if speaks(name, "user", "assistant", "tool")]


@pytest.mark.parametrize("name", CALLING)
def test_calls_and_results(name: str) -> None:
    talk, costs = Talk(name), []
    most = 2 if speaks(name, "user", "assistant", "tool", "tool") else 1
    for number in range(ROUNDS):
        talk.turn(talk.results(1), 1, end="ended" if number % 2 == 0 else "cut")
        talk.turn(talk.results(most), most, end="ended" if number % 2 == 1 else "cut")
        talk.turn(talk.user(), end="ended")
        costs.append(talk.costs)
        talk.costs = []
    assert "full_renders" not in talk.request.counters
    assert costs[3] == costs[2]


def goes_on_with(name: str, word: str) -> bool:
    """Whether a template prints these words and then a call behind the prompt that it opens."""
    oracle, asked = Oracle(name, [ADD]), [{"role": "user", "content": "said0"}]
    function = {"name": "add", "arguments": {"a": "zwölf"}}
    call = {"id": "call00000", "type": "function", "function": function}
    said = {"role": "assistant", "content": word, "tool_calls": [call]}
    result = {"role": "tool", "content": "said1", "tool_call_id": "call00000", "name": "add"}
    opened = oracle.text(asked, opened=True)
    whole = oracle.text([*asked, said, result], words=1)
    if opened is None or whole is None or not whole.startswith(opened):
        return False
    answer, called, _ = whole[len(opened) :].partition("zwölf")
    return bool(called) and "add" in answer and word in answer


WORDS = {"": "", "with words": "let me add"}
BEFORE_CALLS = {
    f"{name}-{way}": (name, word)
    for name in CALLING
    for way, word in WORDS.items()
    if goes_on_with(name, word)
}
"""Elsewhere the words stand behind the calls, or are left out, or a reasoning is closed before."""


def test_most_templates_print_calls_behind_their_prompt() -> None:
    assert len(BEFORE_CALLS) > len(CALLING)


@pytest.mark.parametrize(("name", "word"), BEFORE_CALLS.values(), ids=BEFORE_CALLS)
def test_calls_are_no_part_of_the_content(name: str, word: str) -> None:
    """Else they would be printed twice, and the check at the end would tell of a difference."""
    talk = Talk(name)
    said: Any = {"role": "assistant", "content": word, "tool_calls": [talk.call(0)]}
    group = talk.results(1)
    group[0] |= {"tool_call_id": "call00000", "name": "add"}
    text, behind = talk.sampled(said, group, "cut")
    ids, asked = talk.codec.encode(text), said["tool_calls"][0]["function"]["arguments"]["a"]
    assert "add" in text.partition(asked)[0], "sampled as the template prints it"
    talk.request.add_assistant_message(talk.tok, None, ids, said["tool_calls"])
    content = talk.request.messages[-1]["content"]
    assert asked not in content
    assert content.endswith(word)
    talk.request.add_messages(talk.tok, group)
    talk.messages += [said, *group]
    talk.check(behind)


@pytest.mark.parametrize("name", sorted({*templates()} - {*CALLING}))
def test_results_that_are_not_printed_are_refused(name: str) -> None:
    talk = Talk(name)
    talk.request.add_assistant_message(talk.tok, "w", [5], [talk.call(0)])
    with pytest.raises(TemplateError):
        talk.request.add_messages(talk.tok, talk.results(1))


@pytest.mark.parametrize(
    "name", [name for name in templates() if not speaks(name, "system", "user")]
)
def test_a_system_message_that_is_not_printed_is_refused(name: str) -> None:
    with pytest.raises(TemplateError):
        Talk(name, "be brief")


# In which form a template takes contents and calls.


@pytest.mark.parametrize("name", ["smolvlm", "idefics3", "llava_next"])
def test_text_reaches_a_template_that_prints_lists_only(name: str) -> None:
    talk = Talk(name)
    assert "word0000" in talk.codec.decode(talk.request.prompt_ids.tolist())
    assert talk.request.messages == talk.messages, "messages stay as they were given"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "phi3", "llama3", "gemma"])
def test_lists_of_text_reach_a_template_that_prints_text_only(name: str) -> None:
    tok, parts = tokenizer(name), [{"type": "text", "text": text} for text in ("seven ", "days")]
    listed, plain = (
        RolloutRequest.from_messages([{"role": "user", "content": content}], tok, max_prompt_len=99)
        for content in (parts, "seven days")
    )
    assert listed.input_ids == plain.input_ids
    listed.add_assistant_message(tok, "yes")
    plain.add_assistant_message(tok, "yes")
    listed.add_user_message(tok, parts)
    plain.add_user_message(tok, "seven days")
    assert listed.input_ids == plain.input_ids
    assert "seven days" in tok.decode(listed.input_ids.tolist())


def test_a_picture_has_no_place_in_a_template_of_text() -> None:
    content = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    with pytest.raises(TemplateError, match="no place for media"):
        RolloutRequest.from_messages(
            [{"role": "user", "content": content}], tokenizer("qwen3"), max_prompt_len=99
        )


@pytest.mark.parametrize("name", ["deepseekv3", "deepseekv3_training", "qwen3"])
def test_arguments_are_printed_as_json_once(name: str) -> None:
    """One template prints the arguments as they are, another one as JSON."""
    tok = tokenizer(name)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    request = RolloutRequest.from_messages(
        [{"role": "user", "content": "add"}], tok, tools=[ADD], max_prompt_len=2000
    )
    request.add_assistant_message(tok, "", tool_calls=[call])
    assert '{"a": 1}' in tok.decode(request.response_ids.tolist())
    request.add_tool_response_messages(tok, ["1"])
    request.finalize(tok)
    assert request.state == "completed"


def test_a_role_that_nothing_prints_is_named() -> None:
    tok = tokenizer("smolvlm").__class__(tokenizer_object=tokenizer("smolvlm").backend_tokenizer)
    tok.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    request = RolloutRequest.from_messages(
        [{"role": "user", "content": "hi"}], tok, max_prompt_len=99
    )
    with pytest.raises(TemplateError, match="prints nothing of a message of role 'assistant'"):
        request.add_assistant_message(tok, "hello")
