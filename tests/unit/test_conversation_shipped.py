"""Every chat template that the `trl` wheel ships: a turn's ids are those of its own full render."""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any

import pytest

from conversations import ADD, Counting
from rollout_worker.conversation.processing import Codec
from rollout_worker.conversation.seams import common
from rollout_worker.schemas import RolloutRequest, TemplateError
from shipped import Oracle, templates, tokenizer

ROUNDS = 4
"""In the first two of them a template is tried; the others cost only what they add."""


class Talk:
    """A conversation that is built turn by turn, and compared with the template's own render."""

    def __init__(self, name: str, *system: str) -> None:
        self.tok, self.oracle = Counting(tokenizer(name)), Oracle(name, [ADD])
        self.codec = Codec(tokenizer(name))
        self.words = (f"word{number:04}" for number in count())
        self.messages: list[Any] = [{"role": "system", "content": text} for text in system]
        self.messages += self.user()
        self.request = RolloutRequest.from_messages(
            self.messages, self.tok, tools=[ADD], max_prompt_len=10**5, max_model_len=10**6
        )
        self.whole = 0
        """Turns whose ids are all those of the full render."""
        self.costs: list[int] = []
        """Characters that each turn had rendered and tokenized."""
        self.check()

    def user(self) -> list[Any]:
        return [{"role": "user", "content": next(self.words)}]

    def results(self, number: int) -> list[Any]:
        return [{"role": "tool", "content": next(self.words)} for _ in range(number)]

    def call(self, index: int) -> Any:
        function = {"name": "add", "arguments": {"a": next(self.words)}}
        return {"id": f"call0000{index}", "type": "function", "function": function}

    def check(self, behind: str = "") -> None:
        """Fail unless the ids, or at least those behind a word, are the render's."""
        ids = self.request.get_generation_prompt_ids(self.tok).tolist()
        render = self.oracle.text(self.messages, opened=True, words=1)
        assert render is not None
        if ids == self.codec.encode(render):
            self.whole += 1
            return
        assert behind, "a prompt is always the template's own"
        added = render.rpartition(behind)[2]
        assert self.codec.decode(ids).rpartition(behind)[2] == added
        after = self.codec.encode(added)
        assert ids[-len(after) :] == after

    def turn(self, group: list[Any], calls: int = 0, *, ends: bool) -> None:
        """Let the policy answer as the template prints answers, then add what follows."""
        silent = calls and self.oracle.prints_calls
        said: dict[str, Any] = {"role": "assistant", "content": "" if silent else next(self.words)}
        called = [self.call(index) for index in range(calls)]
        said |= {"tool_calls": called} if calls else {}
        for message, call in zip(group, called, strict=False):
            message |= {"tool_call_id": call["id"], "name": "add"}
        text, behind = self.sampled(said, group, ends=ends)
        prompt = self.request.get_generation_prompt_ids(self.tok).tolist()
        ids, _ = self.codec.encode_after(self.codec.decode(prompt), text)
        before = self.tok.characters
        self.request.add_assistant_message(self.tok, said["content"], ids, called or None)
        self.request.add_messages(self.tok, group)
        self.request.get_generation_prompt_ids(self.tok)
        self.costs.append(self.tok.characters - before)
        self.messages += [said, *group]
        self.check(behind)

    def sampled(self, said: Any, group: list[Any], *, ends: bool) -> tuple[str, str]:
        """Return what a policy samples, up to where the template closes it, and its last word."""
        after = self.oracle.text([*self.messages, said, *group], words=len(group))
        alone = self.oracle.text([*self.messages, said], words=1)
        assert after is not None
        assert alone is not None
        words = [call["function"]["arguments"]["a"] for call in said.get("tool_calls", ())]
        behind = max(filter(None, [said["content"], *words]), key=after.rfind)
        rest, tail = after.rpartition(behind)[2], alone.rpartition(behind)[2]
        own = rest[: common(rest, tail)].removesuffix(self.oracle.close) if words else ""
        first = self.codec.encode(rest[len(own) :])[:1]
        end = self.codec.decode(first) if ends and first[0] in self.codec.special_ids else ""
        opened = self.codec.decode(self.request.get_generation_prompt_ids(self.tok).tolist())
        upto = after[: after.rindex(behind)] + behind
        head = upto[len(opened) :] if upto.startswith(opened) else behind
        return head + own + end, behind


@cache
def speaks(name: str, *roles: str) -> bool:
    """Whether the template itself prints such a conversation."""
    messages: list[Any] = []
    for index, role in enumerate(roles):
        message: Any = {"role": role, "content": f"said{index}"}
        if role == "tool":
            call: dict[str, Any] = {"id": f"call0000{index}", "type": "function"}
            call |= {"function": {"name": "add", "arguments": {"a": "x"}}}
            messages[1].setdefault("tool_calls", []).append(call)
            message |= {"tool_call_id": call["id"], "name": "add"}
        messages.append(message)
    return Oracle(name, [ADD]).text(messages) is not None


@pytest.mark.parametrize("name", templates())
def test_answers_and_questions(name: str) -> None:
    talk = Talk(name, *(["be brief"] if speaks(name, "system", "user") else []))
    for number in range(ROUNDS):
        talk.turn(talk.user(), ends=number % 2 == 0)
    assert "full_renders" not in talk.request.counters
    assert talk.costs[3] == talk.costs[2]


CALLING = [name for name in templates() if speaks(name, "user", "assistant", "tool")]


@pytest.mark.parametrize("name", CALLING)
def test_calls_and_results(name: str) -> None:
    talk, costs = Talk(name), []
    most = 2 if speaks(name, "user", "assistant", "tool", "tool") else 1
    for number in range(ROUNDS):
        talk.turn(talk.results(1), 1, ends=number % 2 == 0)
        talk.turn(talk.results(most), most, ends=number % 2 == 1)
        talk.turn(talk.results(1), 1, ends=True)
        talk.turn(talk.user(), ends=True)
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
    text, behind = talk.sampled(said, group, ends=False)
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
