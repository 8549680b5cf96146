"""A turn's ids are those of the whole render, in every family's style, though it is rendered alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.schemas import RolloutRequest, TemplateError
from tests.support.unit.chatstyles import STYLES, tokenizer
from tests.support.unit.conversations import (
    ADD,
    QUESTION,
    Counting,
    answer,
    begun,
    codec,
    sampled,
    text_of,
)

FAMILIES = sorted(STYLES)
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def whole(request: RolloutRequest, style: str) -> list[int]:
    """Ids of all messages rendered at once, with a generation prompt."""
    text = codec(style).render(request.messages, request.tool_schemas, {}, generation_prompt=True)
    return codec(style).encode(text)


WORDS = st.text(
    st.sampled_from("abc 1.é世"), min_size=1, max_size=12
).map(str.strip).filter(bool)  # fmt: skip


@pytest.mark.parametrize("style", FAMILIES)
@given(turns=st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=4))
@settings(max_examples=12)
def test_a_conversation_by_turns_is_the_whole_render(
    style: str, turns: list[tuple[str, str, bool]]
) -> None:
    request, tok = begun(style), tokenizer(style)
    for said, asked, is_text in turns:
        if is_text:
            request.add_assistant_message(tok, said)
        else:
            answer(request, style, said)
        request.add_user_message(tok, asked)
    request.get_generation_prompt_ids(tok)
    assert request.input_ids == whole(request, style)
    assert set(request.counters) <= {"boundary_tokens_added"}
    request.finalize(tok)
    assert request.difference is None


@pytest.mark.parametrize("style", ["qwen", "glm"])
def test_tool_results_that_come_one_by_one_are_the_whole_render(style: str) -> None:
    request, tok = begun(style, tools=[ADD]), tokenizer(style)
    said = codec(style).render(
        [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}], None, {}
    ).partition("assistant")[2].partition("\n")[2].partition("<|im_end|>")[0]  # fmt: skip
    answer(request, style, said, end=STYLES[style].calls_end, tool_calls=[CALL, CALL])
    request.messages[-1]["content"] = ""
    for result in ("19", "22"):
        request.add_tool_response_messages(tok, [result])
    request.add_user_message(tok, "thanks")
    request.get_generation_prompt_ids(tok)
    assert request.input_ids == whole(request, style)
    assert "full_renders" not in request.counters
    assert request.counters["regroups"] == 1


BRIEF = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize("tools", [None, [ADD]], ids=["plain", "with tools"])
def test_a_system_message_that_moves_is_the_real_one(tools: list[Any] | None) -> None:
    """Mistral prints it before the last question: no stand-in's word takes its place."""
    request, tok = begun("mistral", [BRIEF, QUESTION], tools=tools), tokenizer("mistral")
    for asked in ("and then?", "and now?"):
        before = [*request.get_generation_prompt_ids(tok), *answer(request, "mistral", "19")]
        request.add_user_message(tok, asked)
        prompt = request.get_generation_prompt_ids(tok).tolist()
        assert prompt[: len(before)] == before
        assert tok.decode(prompt).endswith(f"[INST] be brief\n\n{asked}[/INST]")
        added = prompt[len(before) :]
        assert whole(request, "mistral")[-len(added) :] == added
    assert request.counters.get("full_renders") == 2
    assert "zqx" not in text_of(request, "mistral")


def test_a_system_message_moves_behind_a_question_that_nobody_answered() -> None:
    tok = copy.deepcopy(tokenizer("qwen"))
    tok.chat_template = (
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
        "{% if not loop %}{{ '<|im_end|>' + messages[0].content }}{% endif %}"
    )
    request = RolloutRequest.from_messages([BRIEF, QUESTION], tok, max_prompt_len=512)
    with pytest.raises(TemplateError, match="prints the earlier conversation differently"):
        request.add_user_message(tok, "and then?")
    assert "zqx" not in tok.decode(request.input_ids.tolist())


def test_a_word_of_a_stand_in_is_never_tokenized() -> None:
    """The last check, whatever a template does with what it is tried with."""
    qwen, message = codec("qwen"), "in place of a content"
    for text in ("zqxsystemzqx", "so zqxnext0zqx", 'call "zqxtoolzqx"', "zqxcall01"):
        with pytest.raises(TemplateError, match=message):
            qwen.encode_after("zqxaskzqx<|im_end|>", text)
        with pytest.raises(TemplateError, match=message):
            qwen.encode_media(text, {"image": []}, {})
    assert qwen.encode_after("zqxaskzqx<|im_end|>", "seven")[0] == codec("qwen").encode("seven")


def test_a_word_of_a_stand_in_is_refused_in_a_message() -> None:
    request, tok = begun("qwen"), tokenizer("qwen")
    before = request.model_dump_json()
    for content in ("say zqxaskzqx", [{"type": "text", "text": "zqxreplyzqx"}]):
        with pytest.raises(ValueError, match=r"role 'user' holds 'zqx.*change that word"):
            request.add_user_message(tok, content)
    with pytest.raises(ValueError, match="role 'assistant' holds 'zqxreplyzqx'"):
        request.add_assistant_message(tok, "zqxreplyzqx")
    assert request.model_dump_json() == before
    request.add_user_message(tok, "zqx and zqxa are words")
    request.get_generation_prompt_ids(tok)
    ids = tok.encode("zqxreplyzqx<|im_end|>")
    request.add_assistant_message(tok, None, ids)
    assert request.input_ids[-len(ids) :] == ids, "what was sampled is kept"
    request.finalize(tok)
    assert "no full render to compare with" in str(request.difference)


def test_glm_keeps_the_sampled_role_token_or_takes_a_wrong_one_back() -> None:
    tok = tokenizer("glm")
    kept, wrong = begun("glm"), begun("glm")
    ids = answer(kept, "glm", "19", logprobs=[-1.0] * len(sampled("glm", "19")))
    kept.add_user_message(tok, "thanks")
    assert kept.input_ids[: len(kept.prompt_ids) + len(ids)][-1] == ids[-1]
    assert sum(kept.response_mask) == len(ids)
    answer(wrong, "glm", "19", end="<|observation|>")
    wrong.add_user_message(tok, "thanks")
    assert wrong.input_ids == kept.input_ids
    assert wrong.counters == {"boundary_tokens_removed": 1}
    assert sum(wrong.response_mask) == len(ids) - 1
    assert wrong.input_ids == whole(wrong, "glm")[:-2]


@pytest.mark.parametrize("style", FAMILIES)
def test_an_answer_behind_an_answer_is_closed_first(style: str) -> None:
    request, tok = begun(style), tokenizer(style)
    answer(request, style, "nineteen")
    prompt = request.get_generation_prompt_ids(tok).tolist()
    assert request.get_generation_prompt_ids(tok) == prompt
    if style != "glm":  # whose own end is the next role's token
        assert prompt == whole(request, style)
    answer(request, style, "twenty")
    request.add_user_message(tok, "thanks")
    text = text_of(request, style)
    assert text.count(STYLES[style].end) >= 2
    assert "full_renders" not in request.counters


def test_a_template_that_moves_the_tools_is_counted() -> None:
    request, tok = begun("mistral", tools=[ADD]), tokenizer("mistral")
    for asked in ("and then?", "and now?"):
        answer(request, "mistral", "19")
        request.add_user_message(tok, asked)
    assert request.counters == {"history_rewrites": 2}
    text = text_of(request, "mistral")
    assert text.count("[AVAILABLE_TOOLS]") == 3
    assert text.endswith("[INST] and now?[/INST]")
    assert "19</s>[AVAILABLE_TOOLS]" in text
    request.finalize(tok)
    assert request.difference is not None
    assert "once turns follow" in request.difference


def test_earlier_reasoning_that_a_template_forgets_stays_with_its_ids() -> None:
    request, tok = begun("qwen"), tokenizer("qwen")
    ids = answer(request, "qwen", "<think>\nhmm\n</think>\n\n19")
    request.add_user_message(tok, "thanks")
    assert "full_renders" not in request.counters
    assert ids == request.input_ids[len(request.prompt_ids) : len(request.prompt_ids) + len(ids)]
    request.finalize(tok)
    assert request.difference is not None
    assert "earlier reasoning" in request.difference


def test_a_seam_that_merges_is_counted_and_right_as_text() -> None:
    tok = copy.deepcopy(tokenizer("qwen"))
    tok.chat_template = "{%- for m in messages %}{{ m.content }}{% endfor -%}"
    request = RolloutRequest.from_messages(
        [{"role": "user", "content": "seven."}], tok, max_prompt_len=9
    )
    request.add_user_message(tok, " twelve")
    request.add_user_message(tok, " fourth}}")
    assert request.counters == {}
    request.add_user_message(tok, "\nfour")
    assert request.counters == {"regroups": 1}
    assert request.input_ids == tok.encode("seven. twelve fourth}}\nfour", add_special_tokens=False)
    request.add_assistant_message(tok, "five}}")
    request.add_user_message(tok, "\nsix")
    assert request.counters == {"regroups": 1, "seam_merges": 1}
    assert tok.decode(request.input_ids.tolist()) == "seven. twelve fourth}}\nfourfive}}\nsix"
    request.finalize(tok)
    assert request.difference is None


def test_a_refusing_template_changes_nothing() -> None:
    request, tok = begun("mistral"), tokenizer("mistral")
    before, result = request.model_dump_json(), {"role": "tool", "content": "19"}
    with pytest.raises(TemplateError, match="tool without a call id"):
        request.add_messages(tok, [result])
    assert request.model_dump_json() == before
    with pytest.raises(TemplateError, match="tool without a call id"):
        begun("mistral", [QUESTION, result])


def test_messages_reach_the_template_as_plain_dicts() -> None:
    tok = Counting(tokenizer("qwen"))
    request = RolloutRequest.from_messages([QUESTION], tok, max_prompt_len=512, tools=[ADD])
    begun_with = tok.rendered
    call = {"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}
    request.add_assistant_message(tok, "", tool_calls=[call])
    request.add_tool_response_messages(tok, ["19"])
    request.finalize(tok)
    assert {type(message) for message in (*begun_with, *tok.rendered)} == {dict}
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert request.messages[2]["tool_call_id"] == "c"


def test_a_turn_costs_what_it_adds() -> None:
    tok, costs = Counting(tokenizer("qwen")), []
    request = RolloutRequest.from_messages([QUESTION], tok, max_prompt_len=512)
    ids = sampled("qwen", "nineteen")
    for _ in range(6):
        before = tok.characters
        request.get_generation_prompt_ids(tok)
        request.add_assistant_message(tok, "nineteen", ids)
        request.add_user_message(tok, "what is the sum of seven and twelve?")
        request.add_assistant_message(tok, "twenty")
        request.add_user_message(tok, "and now?")
        costs.append(tok.characters - before)
    assert len(set(costs[2:])) == 1
    assert costs[-1] < 1700
