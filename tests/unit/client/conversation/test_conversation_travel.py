"""Nothing is lost on the way: JSON, msgpack, batches, and back."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.conversation.media import decode_value, encode_value
from rollout_worker.schemas import RolloutRequest, ToolResponse, from_batch, to_batch
from tests.support.unit.chatstyles import tokenizer
from tests.support.unit.conversations import ADD, answer, begun, sampled, spans
from tests.support.unit.tinyvision import TinyProcessor, picture

TOK = tokenizer("qwen")


def talked(style: str = "qwen", turns: int = 2, **fields: Any) -> RolloutRequest:
    """Return a request with everything in it but media."""
    request, tok = begun(style, tools=[ADD], tools_kwargs={"add": {"n": (1, 2)}}, **fields), TOK
    for turn in range(turns):
        ids = sampled(style, "add" * (turn + 1))
        call = {"id": "c", "function": {"name": "add", "arguments": {"a": turn}}}
        answer(
            request, style, "add" * (turn + 1), tool_calls=[call],
            logprobs=[-0.1 * i for i in range(len(ids))], weights=spans((turn + 1, len(ids))),
        )  # fmt: skip
        request.add_tool_response_messages(tok, ["19"])
        request.update_metrics({"seconds": math.nan if turn else 0.25}, "add")
    return request


def seen() -> RolloutRequest:
    """Return a request with media."""
    processor = TinyProcessor()
    request = RolloutRequest.from_messages(
        [{"role": "user", "content": [{"type": "image", "image": picture(4, 4)}]}],
        processor, max_prompt_len=100, request_id="seen",
    )  # fmt: skip
    request.get_generation_prompt_ids(processor)
    request.add_assistant_message(processor, "19", sampled("qwen", "19"))
    request.add_tool_response_messages(processor, [ToolResponse(image=[picture(2, 4)])])
    return request


def same(a: Any, b: Any) -> bool:
    """Compare anything, tensors by their bits and NaN as itself."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and type(a) is type(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))  # NaN is what differs from itself


@pytest.mark.parametrize("way", ["json", "msgpack", "pickle"])
@pytest.mark.parametrize("make", [talked, seen])
def test_a_request_comes_back_and_goes_on(way: str, make: Any) -> None:
    request = make()
    if way == "json":
        again = RolloutRequest.model_validate_json(request.model_dump_json())
    elif way == "pickle":  # as Ray does, after its template was used
        again = pickle.loads(pickle.dumps(request))
    else:
        pytest.importorskip("msgpack")
        again = RolloutRequest.from_msgpack(request.to_msgpack())
    assert same(again.model_dump(), request.model_dump())
    for one in (request, again):
        one.add_user_message(TOK, "thanks")
        if make is talked:
            one.finalize(TOK, {"add": [0.5]}, "length")
    assert same(again.model_dump(), request.model_dump())


def test_requests_with_media_compare_their_tensors() -> None:
    request = seen()
    other = RolloutRequest.from_msgpack(request.to_msgpack())
    assert other == request
    other.media[0].inputs["pixel_values"][0, 0] += 1
    assert other != request


TEXT = st.text(st.sampled_from("a$é世\0"), max_size=4)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False)
    | TEXT | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(TEXT | st.integers() | st.just("$rollout"), inner, max_size=3)
    | st.tuples(inner, inner),
    max_leaves=8,
)  # fmt: skip


@given(PLAIN, st.booleans())
def test_any_plain_value_comes_back(value: Any, binary: bool) -> None:
    assert decode_value(encode_value(value, binary)) == value


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[1.5, math.inf]], dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor(7),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([True, False]),
    ],
    ids=["bfloat16", "empty", "scalar", "transposed", "bool"],
)
def test_tensors_keep_every_bit(tensor: torch.Tensor, binary: bool) -> None:
    found = decode_value(encode_value(tensor, binary))
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor)
    array = tensor.float().numpy()
    assert decode_value(encode_value(array, binary)).tobytes() == array.tobytes()


def test_pictures_keep_every_pixel() -> None:
    images = pytest.importorskip("PIL.Image")
    for mode in ("RGB", "L", "P", "RGBA"):
        image = images.effect_noise((5, 3), 60).convert(mode)
        again = decode_value(encode_value(image, binary=False))
        assert (again.mode, again.size) == (mode, (5, 3))
        assert again.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


def test_what_can_not_travel_is_named() -> None:
    with pytest.raises(TypeError, match=r"builtins\.object can't be serialized"):
        encode_value(object(), binary=True)
    records = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    for array in (np.array(["a", None], dtype=object), records):
        with pytest.raises(TypeError, match="ndarray of objects or records"):
            encode_value(array, binary=True)


def test_a_number_of_numpys_stays_one() -> None:
    found = decode_value(encode_value(np.int64(3), binary=False))
    assert (type(found), found) == (np.int64, 3)


# Batches.


def finished() -> list[RolloutRequest]:
    """Return requests of different lengths."""
    short, long = talked(turns=1, request_id="short"), talked(turns=2, request_id="long")
    bare = begun("qwen", [{"role": "user", "content": "hi"}], request_id="bare")
    for request in (short, long, bare):
        request.finalize(TOK, {"score": [1.0]})
    return [short, long, bare]


def test_a_batch_has_verls_names_shapes_and_padding() -> None:
    requests = finished()
    made = to_batch(requests, pad_token_id=0, pad_to_multiple_of=8)
    prompt, response = made.batch["prompts"].shape[1], made.batch["responses"].shape[1]
    assert prompt % 8 == response % 8 == 0
    integers = {
        "input_ids", "attention_mask", "position_ids", "prompts", "responses", "response_mask",
        "loss_mask", "weights_epoch", "weights_version",
    }  # fmt: skip
    kinds = {key: tensor.dtype for key, tensor in made.batch.items()}
    assert kinds == dict.fromkeys(integers, torch.int64) | {
        "rollout_log_probs": torch.float32, "stale_kv": torch.bool,
    }  # fmt: skip
    for row, request in enumerate(requests):
        p, n = len(request.prompt_ids), len(request.response_ids)
        one = {key: tensor[row] for key, tensor in made.batch.items()}
        assert one["prompts"].tolist() == [0] * (prompt - p) + request.prompt_ids.tolist()
        pad = [0] * (response - n)
        assert one["responses"].tolist() == request.response_ids.tolist() + pad
        assert one["input_ids"].tolist() == one["prompts"].tolist() + one["responses"].tolist()
        mask = [0] * (prompt - p) + [1] * (p + n) + pad
        assert one["attention_mask"].tolist() == mask
        assert one["position_ids"].tolist() == [0] * (prompt - p) + [*range(p + response)]
        assert one["response_mask"].tolist() == request.response_mask.tolist() + pad
        assert one["rollout_log_probs"].tolist() == request.rollout_log_probs.tolist() + pad
        versions = [-1] * response
        for span in request.weights:
            versions[span.start - p : span.end - p] = [span.version] * (span.end - span.start)
        assert one["weights_version"].tolist() == versions
    assert made.non_tensor_batch["request_id"] == ["short", "long", "bare"]
    assert made.non_tensor_batch["max_weights"] == [(1, 1), (1, 2), None]
    assert made.meta_info == {"pad_token_id": 0, "logprobs_of": "sampling"}


def test_requests_come_back_from_their_batch() -> None:
    requests = [*finished(), seen()]
    made = to_batch(requests, pad_token_id=3, prompt_length=400, response_length=500)
    assert made.batch["position_ids"].shape == (4, 4, 900)
    found = from_batch(made)
    assert same([r.model_dump() for r in found], [r.model_dump() for r in requests])
    made.batch["attention_mask"][0, 395] = 0
    with pytest.raises(ValueError, match="must be contiguous"):
        from_batch(made)


def test_a_batch_that_can_not_be_is_refused() -> None:
    requests = finished()
    with pytest.raises(ValueError, match=r"prompt 0 has \d+ tokens, above prompt_length=4"):
        to_batch(requests, pad_token_id=0, prompt_length=4)
    with pytest.raises(ValueError, match="response 1 has"):
        to_batch(requests, pad_token_id=0, response_length=30)
    with pytest.raises(ValueError, match=r"pad_token_id=None.*eos_token_id"):
        to_batch(requests, pad_token_id=None)
    with pytest.raises(ValueError, match="0 requests"):
        to_batch([], pad_token_id=0)
    requests[0].logprobs_of = "raw"
    with pytest.raises(ValueError, match="'raw', 'sampling'"):
        to_batch(requests, pad_token_id=0)


def test_a_batch_is_a_tensordict_and_a_dataproto() -> None:
    made = to_batch(finished(), pad_token_id=0)
    proto = made.to_dataproto()
    assert proto["batch"].batch_size == torch.Size([3])
    assert torch.equal(proto["batch"]["responses"], made.batch["responses"])
    assert proto["non_tensor_batch"]["messages"][2][0] == {"role": "user", "content": "hi"}


def test_the_old_names_are_the_same_objects() -> None:
    import rollout_client
    from rollout_client import conversation
    from rollout_worker import schemas

    assert schemas.RolloutRequest is rollout_client.RolloutRequest is conversation.Conversation
    assert rollout_client.Conversation is conversation.Conversation
    for name in set(conversation.__all__) - {"Conversation"}:
        assert getattr(schemas, name) is getattr(conversation, name)
        assert name in schemas.__all__


def test_the_wire_models_need_no_client_and_a_conversation_no_torch() -> None:
    code = (
        "import sys; sys.modules['httpx'] = None\n"
        "from rollout_worker.schemas import GenerateRequest\n"
        "assert 'rollout_client' not in sys.modules\n"
        "try: from rollout_worker.schemas import RolloutRequest\n"
        "except ImportError as error: assert '.[client]' in str(error), error\n"
        "else: raise AssertionError('imported without httpx')\n"
        "del sys.modules['httpx']\n"
        "from rollout_worker.schemas import RolloutRequest, to_batch\n"
        "assert not {'torch', 'numpy', 'transformers', 'msgpack'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
