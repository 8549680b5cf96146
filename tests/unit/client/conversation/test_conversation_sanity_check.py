"""The check at the end tells the first difference that counts, in one line, and nothing else."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_client.conversation.sanity_check import SanityCheckMode, find_difference
from rollout_worker.schemas import RolloutRequest
from tests.support.unit.chatstyles import tokenizer
from tests.support.unit.conversations import ADD, answer, begun, sampled

TOK = tokenizer("qwen")


def check(ours: str, theirs: str, mode: str = "strict", **more: Any) -> Any:
    """Compare two texts, a character an id."""
    ids, expected = (array("i", map(ord, text)) for text in (ours, theirs))
    whole = {"close": "]\n", "prompt": 0, "sampled": array("b", [1] * len(ours)), **more}

    def decode(found: Sequence[int]) -> str:
        return "".join(map(chr, found))

    return find_difference(ids, expected, decode=decode, mode=SanityCheckMode(mode), **whole)


TEXT = st.text(st.sampled_from("ab \n]é"), max_size=40)


@given(TEXT, TEXT)
@settings(max_examples=200)
def test_it_finds_the_first_difference_of_the_mode(ours: str, theirs: str) -> None:
    found = check(ours, theirs, close="")
    first = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    assert (found is None) == (ours == theirs)
    if found:
        assert found.token == found.character == first
        assert found.ids == tuple(map(ord, ours[first : first + 4]))
        assert found.expected_ids == tuple(map(ord, theirs[first : first + 4]))
    assert check(ours, theirs, "disable") is None
    ignored = check(ours, theirs, "ignore_strippable", close="")
    assert (ignored is None) == ("".join(ours.split()) == "".join(theirs.split()))


def test_only_white_space_is_ignored() -> None:
    assert check("a \n\nb", "a b", "ignore_strippable") is None
    assert "white space" in check("a \n\nb", "a b").reason
    found = check("a  b c", "a b d", "ignore_strippable")
    assert (found.token, found.text[-1:], found.expected[-1:]) == (5, "c", "d")


def test_an_open_end_is_no_difference() -> None:
    assert check("hello", "hello]\n") is None
    assert check("hello]", "hello]\n") is None
    assert "end before" in check("hell", "hello]\n").reason
    assert "go on after" in check("hello]\nx", "hello]\n").reason


def test_the_place_is_told_in_the_ids_of_a_real_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    request = begun("qwen")
    ids = answer(request, "qwen", "the sum of seven")
    request.messages[-1]["content"] = "the sum of twelve"
    request.add_user_message(TOK, "thanks")
    request.finalize(TOK)
    at = len(request.prompt_ids) + len(ids) - 2
    assert request.difference is not None
    assert request.difference.startswith(f"token {at} (character ")
    assert "seven" in TOK.decode(ids[-2:])
    assert "not what the policy wrote" in request.difference
    assert "\n" not in request.difference
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        request.difference
    ]


def test_another_way_to_split_words_is_no_difference() -> None:
    request = begun("qwen")
    request.get_generation_prompt_ids(TOK)
    letters = [token for letter in "seven" for token in TOK.encode(letter)]
    assert letters != TOK.encode("seven")
    request.add_assistant_message(TOK, "seven", [*letters, TOK.eos_token_id])
    request.add_user_message(TOK, "thanks")
    request.finalize(TOK)
    assert request.difference is None
    assert request.response_ids[: len(letters)] == letters


@pytest.mark.parametrize("mode", ["disable", "strict", "ignore_strippable"])
def test_the_mode_decides(mode: str) -> None:
    request = begun("qwen", tokenization_sanity_check_mode=mode)
    answer(request, "qwen", "seven")
    request.messages[-1]["content"] = "seven\n\n"
    request.add_user_message(TOK, "thanks")
    request.finalize(TOK)
    assert bool(request.difference) == (mode == "strict")


def test_calls_that_the_policy_wrote_as_the_template_does_are_no_difference() -> None:
    """Their text is in the ids; the message has them apart."""
    request = begun("qwen", tools=[ADD])
    call = {"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}
    text = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    for said in ("let me add", "<think>\nhmm\n</think>\n\nlet me add"):
        request.get_generation_prompt_ids(TOK)
        request.add_assistant_message(TOK, None, sampled("qwen", said + text), [call])
        assert request.messages[-1]["content"] == said
        request.add_tool_response_messages(TOK, ["19"])
    request.finalize(TOK)
    assert request.difference is None


def test_what_stands_before_a_call_of_other_words_is_the_content() -> None:
    request = begun("qwen", tools=[ADD])
    call = {"id": "c", "function": {"name": "add", "arguments": {"a": 1}}}
    said = 'let me add\n<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'
    request.get_generation_prompt_ids(TOK)
    request.add_assistant_message(TOK, None, sampled("qwen", said), [call])
    assert request.messages[-1]["content"] == "let me add"
    request.finalize(TOK)
    assert "not what the policy wrote" in str(request.difference)


def test_eight_thousand_tokens_take_a_tenth_of_a_second() -> None:
    request = begun("qwen", max_response_len=10**5, max_model_len=10**5)
    ids = sampled("qwen", " the sum of seven and twelve" * 24)
    while len(request.input_ids) < 8000:
        request.get_generation_prompt_ids(TOK)
        request.add_assistant_message(TOK, None, ids)
        request.add_user_message(TOK, "and now?")
    request.messages[-1]["content"] = "and then?"
    copies = [request.model_copy(deep=True) for _ in range(5)]
    assert min(seconds(copy) for copy in copies) < 0.1
    assert "token 79" in str(copies[0].difference)


def seconds(request: RolloutRequest) -> float:
    """CPU time of the end, with a difference as far back as can be."""
    began = time.process_time()
    request.finalize(TOK)
    return time.process_time() - began
