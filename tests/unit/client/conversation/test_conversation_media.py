"""Pictures: only new ones are processed, three-axis positions equal the model's own, also of videos."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen

from rollout_client.conversation.codec import RopeLayout
from rollout_worker.schemas import PromptTooLong, RolloutRequest, ToolResponse
from tests.support.unit.chatstyles import tokenizer
from tests.support.unit.conversations import ADD, QUESTION, sampled
from tests.support.unit.tinyvision import TinyProcessor, picture


def looking(processor: TinyProcessor, **fields: Any) -> RolloutRequest:
    """Return a request that begins with a picture."""
    content = [{"type": "image", "image": picture(4, 6)}, {"type": "text", "text": "what is it?"}]
    return RolloutRequest.from_messages(
        [{"role": "user", "content": content}], processor, max_prompt_len=200, tools=[ADD], **fields
    )


def conversation(processor: TinyProcessor) -> RolloutRequest:
    """Return a request with pictures in the prompt, from a tool, and from the user."""
    request = looking(processor)
    for turn in range(2):
        request.get_generation_prompt_ids(processor)
        request.add_assistant_message(processor, "look", sampled("qwen", "look"))
        tool = ToolResponse(text="19", image=[picture(2, 2 + 2 * turn), picture(4, 2)])
        request.add_tool_response_messages(processor, [tool, ToolResponse(text="22")])
    request.add_user_message(
        processor, [{"type": "text", "text": "and"}, {"type": "image", "image": picture(2, 4)}]
    )
    request.get_generation_prompt_ids(processor)
    return request


def whole(request: RolloutRequest, processor: TinyProcessor) -> dict[str, torch.Tensor]:
    """Return what the processor makes of the whole conversation at once."""
    text = processor.apply_chat_template(
        request.messages, tools=[ADD], tokenize=False, add_generation_prompt=True
    )
    pictures = request.multi_modal_data["image"]
    return processor([text], images=pictures, return_tensors="pt", add_special_tokens=False)


def test_only_new_media_are_processed_and_the_tensors_are_the_whole_ones() -> None:
    processor = TinyProcessor()
    request = conversation(processor)
    assert processor.seen == [1, 2, 2, 1]
    wanted = whole(request, processor)
    assert request.input_ids == wanted["input_ids"][0].tolist()
    assert set(request.multi_modal_inputs) == {"pixel_values", "image_grid_thw"}
    for key, tensor in request.multi_modal_inputs.items():
        assert torch.equal(tensor, wanted[key])
    assert request.messages[0]["content"][0] == {"type": "image"}
    request.finalize(processor)
    assert request.difference is None


def test_positions_by_turns_are_the_models_own() -> None:
    processor = TinyProcessor()
    request = conversation(processor)
    ids = torch.tensor([request.input_ids.tolist()])
    image = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)),
        get_vision_position_ids=lambda *args, **more: qwen.Qwen2VLModel.get_vision_position_ids(
            None, *args, **more
        ),
    )
    wanted, _ = qwen.Qwen2VLModel.get_rope_index(
        model, ids, mm_token_type_ids=(ids == image).int(),
        image_grid_thw=request.multi_modal_inputs["image_grid_thw"],
    )  # fmt: skip
    assert [list(axis) for axis in request.position_ids] == wanted[:, 0].tolist()
    assert len(request.position_ids) == 3


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        ({}, [[0, 1, 1, 1, 1, 2, 2, 2, 2, 3], [0, 1, 1, 2, 2, 1, 1, 2, 2, 3]]),
        ({"seconds_step": 2.0}, [[0, 1, 1, 1, 1, 4, 4, 4, 4, 5], [0, 1, 1, 2, 2, 1, 1, 2, 2, 5]]),
    ],
    ids=["Qwen2-VL", "Qwen2.5-VL"],
)
def test_videos_take_their_time(layout: dict[str, float], rows: list[list[int]]) -> None:
    made = RopeLayout(image_id=1, video_id=2, merge=2, **layout)  # type: ignore[arg-type]
    inputs = {"video_grid_thw": [(2, 4, 4)], "second_per_grid_ts": [1.5]}
    found = made.rope_positions([9, *[2] * 8, 9], inputs)
    assert [list(axis) for axis in found[:2]] == rows


def test_frames_of_a_video_may_be_blocks_of_their_own() -> None:
    made = RopeLayout(image_id=1, video_id=2, merge=2, by_frame=True)
    found = made.rope_positions([9, 2, 2, 9, 2, 2], {"video_grid_thw": [(2, 2, 4)]})
    assert [list(axis) for axis in found] == [
        [0, 1, 1, 3, 4, 4], [0, 1, 1, 3, 4, 4], [0, 1, 2, 3, 4, 5],
    ]  # fmt: skip


def test_placeholders_and_grids_must_fit() -> None:
    made = RopeLayout(image_id=1, video_id=2, merge=2)
    for ids, grids in (([1], []), ([1, 9], [(1, 2, 4)]), ([9], [(1, 2, 2)]), ([1], [(1, 2, 4)])):
        with pytest.raises(ValueError, match="grid"):
            made.rope_positions(ids, {"image_grid_thw": grids})


def test_results_one_by_one_process_their_media_again_but_count_once() -> None:
    processor = TinyProcessor()
    request = looking(processor)
    request.get_generation_prompt_ids(processor)
    request.add_assistant_message(processor, "look", sampled("qwen", "look"))
    for turn in range(3):
        tool = ToolResponse(text="19", image=[picture(2, 2 + 2 * turn)])
        request.add_tool_response_messages(processor, [tool])
    request.get_generation_prompt_ids(processor)
    assert request.counters["regroups"] == 2
    wanted = whole(request, processor)
    assert request.input_ids == wanted["input_ids"][0].tolist()
    assert torch.equal(request.multi_modal_inputs["pixel_values"], wanted["pixel_values"])
    assert len(request.multi_modal_data["image"]) == 4


def test_a_cut_takes_a_turn_with_media_whole() -> None:
    processor = TinyProcessor()
    longest = conversation(processor)
    longest.finalize(processor)
    ends = [turn.end for turn in longest.media]
    request = conversation(processor)
    request.max_model_len = ends[2] - 1
    request.finalize(processor)
    assert request.input_ids == longest.input_ids[: longest.media[2].start]
    assert len(request.multi_modal_data["image"]) == 3
    assert len(request.multi_modal_inputs["image_grid_thw"]) == 3
    assert request.truncated_tokens == len(longest.input_ids) - len(request.input_ids)
    image = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    rows = request.multi_modal_inputs["image_grid_thw"].prod(-1).sum()
    assert request.input_ids.tolist().count(image) * 4 == rows


def test_media_need_a_processor_and_are_never_cut_from_a_prompt() -> None:
    image = {"role": "user", "content": [{"type": "image", "image": picture(2, 2)}]}
    with pytest.raises(ValueError, match="1 image with a bare tokenizer"):
        RolloutRequest.from_messages([image], tokenizer("qwen"), max_prompt_len=100)
    with pytest.raises(PromptTooLong, match="holds media"):
        RolloutRequest.from_messages(
            [image, QUESTION], TinyProcessor(), max_prompt_len=9, overlong_prompt="truncate_left"
        )


def test_text_with_a_vision_processor_has_three_equal_axes() -> None:
    processor = TinyProcessor()
    request = RolloutRequest.from_messages([QUESTION], processor, max_prompt_len=100)
    request.add_assistant_message(processor, "19")
    count = len(request.input_ids)
    assert [list(axis) for axis in request.position_ids] == [list(range(count))] * 3
    assert processor.seen == []
