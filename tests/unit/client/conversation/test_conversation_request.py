"""A conversation's masks, logprobs, weights, limits and states, turn by turn and at its end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.schemas import (
    FinishReason,
    GenerateOutput,
    OverlongPrompt,
    PromptTooLong,
    RequestState,
    RolloutRequest,
    StopMatch,
    StopReason,
    ToolResponse,
    WeightsId,
)
from tests.support.unit.chatstyles import STYLES, tokenizer
from tests.support.unit.conversations import ADD, QUESTION, answer, begun, codec, sampled, spans

TOK = tokenizer("qwen")
CALL = {"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}


def test_a_prompt_ends_with_the_generation_prompt_and_asking_again_adds_nothing() -> None:
    request = begun("qwen")
    text = TOK.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    prompt = TOK.encode(text, add_special_tokens=False)
    assert request.prompt_ids == prompt == request.input_ids
    for _ in range(2):
        assert request.get_generation_prompt_ids(TOK) == prompt
    assert list(request.position_ids[0]) == list(range(len(prompt)))
    assert request.attention_mask == [1] * len(prompt)
    assert sum(request.loss_mask) == 0
    assert not request.response_ids


def test_an_engine_may_get_what_the_template_prints_now() -> None:
    """Qwen's leaves earlier reasoning out; what is kept for training still has it."""
    request = begun("qwen", use_inference_chat_template=True)
    assert request.get_generation_prompt_ids(TOK) == request.prompt_ids
    ids = answer(request, "qwen", "<think>\nhmm\n</think>\n\n19")
    request.add_user_message(TOK, "thanks")
    prompt = request.get_generation_prompt_ids(TOK).tolist()
    text = codec("qwen").render(request.messages, None, {}, generation_prompt=True)
    assert prompt == codec("qwen").encode(text)
    assert "hmm" not in TOK.decode(prompt)
    assert ids == request.response_ids[: len(ids)]
    assert "hmm" in TOK.decode(request.input_ids.tolist())
    assert request.counters["full_renders"] == 3, "each time that the ids were asked for"
    again = RolloutRequest.model_validate_json(request.model_dump_json())
    assert again.get_generation_prompt_ids(TOK) == prompt


def test_a_cut_prompt_can_not_be_rendered_again() -> None:
    with pytest.raises(ValueError, match=r"overlong_prompt is 'truncate_left'.*use 'error'"):
        begun("qwen", use_inference_chat_template=True, overlong_prompt="truncate_left")


def test_masks_logprobs_and_weights_follow_the_sampled_ids() -> None:
    request = begun("qwen", tools=[ADD])
    first = sampled("qwen", "let me add")
    cut = len(first) - 1
    request.get_generation_prompt_ids(TOK)
    request.add_assistant_message(
        TOK, "let me add", first, [CALL], logprobs=[-0.25] * len(first),
        weights=[*spans((3, 2)), spans((3, 2), (4, cut - 1))[1].model_copy(
            update={"stale_kv": True})],
    )  # fmt: skip
    assert request.state == "tool_calling"
    request.add_tool_response_messages(TOK, [ToolResponse(text="19"), ToolResponse(text="")])
    assert request.state is RequestState.RUNNING
    second = answer(request, "qwen", "19", logprobs=[-0.5] * 3, weights=spans((5, 3)))
    request.finalize(TOK, {"add": [1.0]})
    start, n = len(request.prompt_ids), len(request.response_ids)
    mask = [1] * len(first) + [0] * (n - len(first) - 3) + [1] * 3
    assert request.response_mask == request.response_loss_mask == mask
    assert request.rollout_log_probs == [-0.25 * m for m in mask[:-3]] + [-0.5] * 3
    assert request.response_ids[: len(first)] == first
    assert request.response_ids[-3:] == second
    found = [(s.version, s.start - start, s.end - start, s.stale_kv) for s in request.weights]
    assert found == [(3, 0, 2, False), (4, 2, len(first), True), (5, n - 3, n, False)]
    assert request.weights_range == (WeightsId(epoch=1, version=3), WeightsId(epoch=1, version=5))
    assert request.messages[-2]["content"] == ""
    assert (request.logprobs_of, request.reward_scores) == ("sampling", {"add": [1.0]})


def test_an_answer_of_a_worker_is_taken_as_it_is() -> None:
    request = begun("qwen")
    ids = sampled("qwen", "19")
    request.add_output(
        TOK,
        GenerateOutput(
            index=0, token_ids=tuple(ids), logprobs=(-1.0, -2.0, -3.0), stop_reason=StopReason.STOP,
            stop_match=StopMatch(token_id=ids[-1]), weights=tuple(spans((7, 3))),
        ),
        logprobs_of="raw",
    )  # fmt: skip
    assert request.messages[-1] == {"role": "assistant", "content": "19"}
    assert request.logprobs_of == "raw"
    with pytest.raises(ValueError, match="'sampling' logprobs after 'raw' ones"):
        answer(request, "qwen", "20", logprobs=[-1.0] * 3)
    with pytest.raises(ValueError, match="for all turns or none"):
        answer(request, "qwen", "20")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"logprobs": [-1.0]}, "1 logprobs for 3 ids"),
        ({"logprobs": [-1.0, float("-inf"), -1.0]}, "logprob 1 is -inf"),
        ({"logprobs": [float("nan"), -1.0, -1.0]}, "logprob 0 is nan"),
        ({"logprobs": [-1.0] * 3, "logprobs_of": "cooked"}, "use one of sampling, raw"),
        ({"weights": spans((1, 1))}, "spans end at 1, the ids at 3"),
        ({"weights": spans((1, 1), (2, 1))[1:]}, r"\[1, 2\), expected one that starts at 0"),
    ],
)
def test_what_does_not_fit_the_ids_is_refused_and_changes_nothing(more: Any, message: str) -> None:
    request = begun("qwen")
    before = request.model_dump_json()
    with pytest.raises(ValueError, match=message):
        request.add_assistant_message(TOK, "19", sampled("qwen", "19"), **more)
    assert request.model_dump_json() == before


def test_text_answers_are_trained_on_but_not_sampled() -> None:
    request = begun("qwen")
    request.add_assistant_message(TOK, "nineteen")
    request.finalize(TOK)
    assert request.difference is None
    assert request.response_loss_mask == [1] * len(request.response_ids)
    assert sum(request.response_mask) == 0
    assert TOK.decode(request.response_ids.tolist()) == "nineteen<|im_end|>\n"


def test_a_tool_turn_right_after_the_prompt_leaves_the_slices_right() -> None:
    request = begun("qwen", tools=[ADD])
    whole = len(request.prompt_ids)
    request.add_tool_response_messages(TOK, [ToolResponse(text="19", name="add")])
    assert len(request.prompt_ids) < whole
    assert TOK.decode(request.prompt_ids.tolist()).endswith("twelve?<|im_end|>\n")
    assert TOK.decode(request.response_ids.tolist()).startswith("<|im_start|>user\n<tool_response>")
    answer(request, "qwen", "19")
    request.finalize(TOK)
    assert request.difference is None
    assert request.prompt_ids.tolist() + request.response_ids.tolist() == request.input_ids


def test_empty_tool_results_add_nothing() -> None:
    request = begun("qwen")
    before = request.model_dump_json()
    request.add_tool_response_messages(TOK, [])
    request.add_tool_response_messages(TOK, [ToolResponse(text=""), ToolResponse()])
    request.add_messages(TOK, [])
    assert request.model_dump_json() == before
    with pytest.raises(ValueError, match="must be a list"):
        ToolResponse.model_validate({"image": "one"})


# Limits.


@pytest.mark.parametrize("policy", ["truncate_left", "truncate_middle"])
def test_a_long_prompt_is_cut_as_asked(policy: str) -> None:
    whole = begun("qwen").prompt_ids.tolist()
    limit = len(whole) - 4
    request = begun("qwen", max_prompt_len=limit, overlong_prompt=policy)
    left = 0 if policy == "truncate_left" else (limit - 5 + 1) // 2
    assert request.prompt_ids == whole[:left] + whole[left + 4 :]
    assert request.prompt_cut == (left, 4)
    answer(request, "qwen", "19")
    request.finalize(TOK)
    assert request.difference is None


def test_a_long_prompt_is_an_error_unless_something_else_was_asked() -> None:
    with pytest.raises(PromptTooLong, match=r"tokens, 9 are allowed \(overlong_prompt may be"):
        begun("qwen", max_prompt_len=9)
    with pytest.raises(PromptTooLong, match="leaves no room"):
        begun("qwen", max_prompt_len=3, overlong_prompt=OverlongPrompt.TRUNCATE_LEFT)
    with pytest.raises(PromptTooLong, match="6 are allowed"):
        begun("qwen", max_model_len=6)


def test_given_prompt_ids_are_taken_without_their_padding() -> None:
    whole = begun("qwen")
    ids = whole.prompt_ids.tolist()
    request = begun("qwen", input_ids=[0, 0, *ids], attention_mask=[0, 0] + [1] * len(ids))
    assert request == whole
    bare = begun("qwen", input_ids=ids[: -whole.cursor.opened])
    assert bare.get_generation_prompt_ids(TOK) == ids
    for wrong in ({}, {"input_ids": ids}):
        with pytest.raises(ValueError, match="attention_mask needs input_ids"):
            begun("qwen", attention_mask=[1, 1], **wrong)


def test_media_under_an_unknown_key_are_not_dropped() -> None:
    with pytest.raises(ValueError, match=r"unknown keys \['images'\]: use image, video, audio"):
        begun("qwen", multi_modal_data={"images": [object()]})


def test_media_of_a_kind_that_is_not_listed_are_refused_and_change_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"multi_modal_keys: has no 'video', of which there are media"
    ):
        begun("qwen", multi_modal_keys=("image",), multi_modal_data={"video": [object()]})
    with pytest.raises(ValueError, match="multi_modal_keys"):
        begun("qwen", multi_modal_keys=("images",))
    request = begun("qwen", multi_modal_keys=())
    answer(request, "qwen", "nineteen")
    before = request.input_ids.tolist()
    with pytest.raises(ValueError, match="multi_modal_keys: has no 'image'"):
        request.add_user_message(TOK, [{"type": "image", "image": object()}])
    assert request.input_ids == before


def test_scores_that_are_no_lists_leave_the_conversation_open() -> None:
    request = begun("qwen")
    answer(request, "qwen", "nineteen")
    request.get_generation_prompt_ids(TOK)
    before = request.input_ids.tolist()
    with pytest.raises(ValueError, match=r"reward_scores\['correct'\] is 1.0: give a list"):
        request.finalize(TOK, {"correct": 1.0})  # type: ignore[dict-item]
    assert request.state is RequestState.RUNNING
    assert request.input_ids == before
    request.finalize(TOK, {"correct": [1]})
    assert request.reward_scores == {"correct": [1.0]}


@given(
    turns=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=4),
    response=st.integers(0, 60),
    model=st.integers(20, 120),
)
@settings(max_examples=30)
def test_a_finished_request_keeps_its_limits(
    turns: list[tuple[int, int]], response: int, model: int
) -> None:
    request = begun("qwen", max_prompt_len=20, max_response_len=response, max_model_len=model,
                    overlong_prompt="truncate_left")  # fmt: skip
    for said, asked in turns:
        request.get_generation_prompt_ids(TOK)
        budget = request.budget
        ids = sampled("qwen", " sum" * said)
        answer(request, "qwen", " sum" * said, logprobs=[-0.5] * len(ids),
               weights=spans((said, len(ids))))  # fmt: skip
        assert request.budget == max(0, budget - len(ids))
        request.add_user_message(TOK, " seven" * asked)
    before = request.input_ids.tolist()
    opened = 0 if turns else request.cursor.opened
    request.finalize(TOK)
    prompt, n = len(request.prompt_ids), len(request.input_ids)
    assert n == min(len(before) - opened, model, prompt + response)
    assert request.input_ids == before[:n]
    assert len(request.response_ids) == n - prompt == len(request.response_mask)
    cut = request.truncated_tokens
    assert cut == len(before) - opened - n
    assert request.finish_reason is (FinishReason.LENGTH if cut else FinishReason.STOP)
    covered = [span.end - span.start for span in request.weights]
    assert sum(covered) == sum(request.response_mask)
    assert all(a == -0.5 * b for a, b in zip(
        request.rollout_log_probs, request.response_mask, strict=True))  # fmt: skip


# Ending.


def test_a_conversation_ends_once_and_not_with_a_call() -> None:
    request = begun("qwen")
    answer(request, "qwen", "19")
    request.get_generation_prompt_ids(TOK)
    before = request.model_dump_json()
    with pytest.raises(ValueError, match="answer the calls"):
        request.finalize(TOK, finish_reason=FinishReason.TOOL_CALLS)
    with pytest.raises(ValueError, match="'eos' is not a valid"):
        request.finalize(TOK, finish_reason="eos")
    assert request.model_dump_json() == before
    request.finalize(TOK, finish_reason="aborted")
    assert (request.state, request.finish_reason) == ("completed", "aborted")
    assert TOK.decode(request.input_ids.tolist()).endswith("19<|im_end|>\n")
    for again in (request.finalize, request.get_generation_prompt_ids):
        with pytest.raises(ValueError, match="accepts no more turns"):
            again(TOK)


def test_a_failed_conversation_keeps_its_tokens_and_says_why() -> None:
    request = begun("qwen")
    ids = answer(request, "qwen", "19")
    request.fail("the tool's server is gone")
    assert request.state is RequestState.FAILED
    assert request.response_ids == ids
    assert request.error == "the tool's server is gone"
    with pytest.raises(ValueError, match="is failed"):
        request.add_user_message(TOK, "still there?")


def test_metrics_are_lists_by_tool() -> None:
    request = begun("qwen")
    request.update_metrics({"seconds": 0.1}, "add")
    request.update_metrics({"seconds": 0.2}, "add")
    assert request.metrics == {"add": [{"seconds": 0.1}, {"seconds": 0.2}]}


def test_an_assistants_message_goes_its_own_way() -> None:
    request = begun("qwen")
    with pytest.raises(ValueError, match="add_assistant_message"):
        request.add_messages(TOK, [{"role": "assistant", "content": "19"}])
    with pytest.raises(ValueError, match="give content"):
        request.add_assistant_message(TOK)
    with pytest.raises(ValueError, match="need content_ids"):
        request.add_assistant_message(TOK, "19", logprobs=[-1.0])
    with pytest.raises(ValueError, match="at least one message"):
        RolloutRequest.from_messages([], TOK, max_prompt_len=5)
    with pytest.raises(ValueError, match="without a role"):
        RolloutRequest.from_messages([{"content": "x"}], TOK, max_prompt_len=5)
    assert STYLES["qwen"].end == TOK.eos_token
