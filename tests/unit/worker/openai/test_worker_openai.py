"""Text that grows, tool calls, messages for templates, requests in OpenAI's words."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_common.wire.problems import ProblemError
from rollout_worker.engines.answer_parsers import parse_hermes_call
from rollout_worker.engines.request_checks import MAX_INCOMPLETE_TOKENS, StopChecker
from rollout_worker.openai.answer_reading import AnswerReader
from rollout_worker.openai.model_text import ModelText, plain_messages
from rollout_worker.openai.openai_models import ChatRequest, CompletionRequest
from rollout_worker.openai.openai_structured import forced_functions
from rollout_worker.openai.streamed_text import StreamedText
from rollout_worker.ports.data_routes import make_data_app
from rollout_worker.requests import running_output
from rollout_worker.schemas import SamplingParams
from tests.support.unit.asgi import Answer, call
from tests.support.unit.tiny_worker import TinyWorker, tiny_worker
from tests.support.waiting import until


def utf8(ids: Sequence[int], special: bool) -> str:
    """A tokenizer of single bytes: characters of several bytes come in pieces."""
    return bytes(ids).decode(errors="replace")


def grow(pieces: list[bytes], stops: Sequence[str] = (), min_tokens: int = 0) -> list[str]:
    growing = StreamedText(utf8, stops, min_tokens=min_tokens)
    return [*(growing.push_ids(list(piece)) for piece in pieces), growing.take_rest()]


async def complete(tiny: TinyWorker, **asked: Any) -> Answer:
    """The answer to a request for completions of one token id."""
    body = json.dumps({"prompt": [5], **asked}).encode()
    return await call(make_data_app(tiny.worker), "/v1/completions", body)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/responses", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/chat/completions", 404),  # a base URL without /v1
        ("POST", "/v1/v1/completions", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
    ],
)
async def test_every_refusal_is_one_that_openais_clients_show(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    async with tiny_worker(tmp_path) as tiny:
        answer = await call(make_data_app(tiny.worker), path, b'{"prompt": [5]}', method)
    assert answer.status == status
    assert set(answer.body) == {"error"}
    assert answer.body["error"]["message"]
    assert answer.headers.get("allow") == {"GET": "POST", "POST": "GET"}[method] or status != 405


@pytest.fixture
def plain_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is an x."""

    async def decoder(self: ModelText) -> Any:
        return lambda ids, special: "x" * len(ids)

    monkeypatch.setattr(ModelText, "make_decoder", decoder)


async def test_an_answer_is_written_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For many tokens with logprobs that takes seconds."""
    threads: list[int] = []

    def decode(ids: Sequence[int], special: bool) -> str:
        threads.append(threading.get_ident())
        return "é" * len(ids)

    async def decoder(self: ModelText) -> Any:
        return decode

    monkeypatch.setattr(ModelText, "make_decoder", decoder)
    async with tiny_worker(tmp_path) as tiny:
        tiny.engine.free = True
        answer = await complete(tiny, max_tokens=3, n=2, logprobs=1)
    assert answer.status == 200, answer.content
    assert answer.headers["content-type"] == "application/json"
    assert [each["text"] for each in answer.body["choices"]] == ["ééé", "ééé"]
    assert len(threads) > 6
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("sizes", [[9], [4, 4, 1]])
async def test_a_stream_has_the_same_whatever_comes_at_a_time(
    tmp_path: Path, plain_decoder: None, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr(running_output, "FRAME_TOKENS", sizes[0])
    async with tiny_worker(tmp_path) as tiny:
        asked = complete(tiny, max_tokens=9, n=2, logprobs=1, stream=True)
        answering = asyncio.create_task(asked)
        await until(lambda: len(tiny.engine.known) == 2, what="the requests")
        tiny.engine.step(9)
        answer = await asyncio.wait_for(answering, 10)
    *events, end = [line for line in answer.content.split(b"\n\n") if line]
    assert end == b"data: [DONE]"
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    for index in range(2):
        mine = [each for each in choices if each["index"] == index]
        assert "".join(each["text"] for each in mine) == "x" * 9
        tokens = [each["logprobs"]["tokens"] for each in mine if each["logprobs"]]
        assert [len(each) for each in tokens] == sizes
        assert {token for each in tokens for token in each} == {"x"}
        assert [each["finish_reason"] for each in mine if each["finish_reason"]] == ["length"]


async def test_a_request_with_min_tokens_keeps_the_stop_strings_before(
    tmp_path: Path, plain_decoder: None
) -> None:
    async with tiny_worker(tmp_path) as tiny:
        tiny.engine.free = True
        answer = await complete(tiny, max_tokens=3, min_tokens=2, stop="x")
    assert [each["text"] for each in answer.body["choices"]] == ["xx"]


def test_half_characters_are_held_back() -> None:
    assert grow([b"a\xe2", b"\x82", b"\xacb"]) == ["", "", "a€b", ""]
    assert "".join(grow([b"a\xe2"])) == "a\N{REPLACEMENT CHARACTER}", "never finished"


@given(st.lists(st.sampled_from(b"a\x80\xf0\x9f\x98\xe2\x82"), max_size=80), st.integers(1, 5))
def test_bytes_that_are_no_text_are_held_back_for_some_tokens_only(
    made: list[int], size: int
) -> None:
    decoded = []

    def decode(ids: Sequence[int], special: bool) -> str:
        decoded.append(len(ids))
        return utf8(ids, special)

    growing = StreamedText(decode)
    said = [growing.push_ids(made[at : at + size]) for at in range(0, len(made), size)]
    assert "".join([*said, growing.take_rest()]) == utf8(made, True)
    assert max(decoded, default=0) <= 2 * MAX_INCOMPLETE_TOKENS + 2 * size


def test_half_stop_strings_are_held_back_and_whole_ones_cut() -> None:
    assert grow([b"one EN", b"D two"], ["END"]) == ["one ", "", ""]
    assert grow([b"one EN", b"T"], ["END"]) == ["one ", "ENT", ""]
    assert grow([b"one E"], ["END"]) == ["one ", "E"]
    assert grow([b"a, b. c"], [".", ","]) == ["a", ""], "the first one said"


@given(
    st.text("ab.\u20ac", max_size=12),
    st.lists(st.integers(1, 5), max_size=12),
    st.lists(st.text("ab.\u20ac", min_size=1, max_size=3), max_size=2),
    st.integers(0, 12),
)
def test_text_is_cut_where_the_engine_ends_it(
    text: str, sizes: list[int], stops: list[str], least: int
) -> None:
    """Also if a stop string lies before the end of `min_tokens`, or across it."""
    asked = SamplingParams(stop=tuple(stops), min_tokens=least, max_tokens=99)
    checker = StopChecker(asked, frozenset(), lambda ids: utf8(ids, True))
    made, match = b"", None
    for count, byte in enumerate(text.encode(), 1):
        made += bytes([byte])
        verdict = checker.check_token(byte, count)
        if verdict is not None:
            match = verdict[1]
            break
    expected = made.decode(errors="replace")
    if match is not None:
        assert match.text is not None
        expected = expected[: expected.rindex(match.text)]
    pieces, rest = [], made
    for size in [*sizes, len(made)]:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert "".join(grow(pieces, stops, least)) == expected


def test_messages_become_plain() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    user, assistant, tool = plain_messages(messages)
    assert user == {"role": "user", "content": "ab"}
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"x": [1]}
    assert tool == messages[2]
    assert call["function"] == {"name": "f", "arguments": '{"x": [1]}'}, "the caller's is untouched"
    bare = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    [plain] = plain_messages([{"role": "assistant", "content": None, "tool_calls": [bare]}])
    assert plain["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_reaches_the_template_under_both_names(name: str) -> None:
    asked = {"role": "assistant", "content": "a", name: "Hm."}
    both = {"reasoning_content": "Hm.", "reasoning": "Hm."}
    assert plain_messages([asked]) == [{"role": "assistant", "content": "a", **both}]
    assert plain_messages([{**asked, name: None}]) == [{"role": "assistant", "content": "a"}]


DEEP = {"function": {"name": "f", "arguments": "[" * 10**5}}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "a"}, "messages.0.role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content"),
        ({"role": "user", "content": 3}, "messages.0.content"),
        ({"role": "assistant", "reasoning": 3}, "messages.0.reasoning_content"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": 5}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": [DEEP]}, "messages.0.tool_calls"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_messages_that_are_refused(message: dict[str, Any], field: str) -> None:
    with pytest.raises(ProblemError) as refused:
        plain_messages([message])
    assert refused.value.problem.status == 422
    assert field in refused.value.problem.detail


def test_a_request_means_what_generate_means() -> None:
    request = CompletionRequest.model_validate(
        {"prompt": [1], "temperature": 0.5, "stop": "x", "logit_bias": {"7": 2}, "top_k": -1}
    )
    found = request.to_generate_request("r", [1], logprobs=True, max_tokens=16)
    assert found.logprobs is None, "the pool's kind"
    sampling = found.sampling
    assert (sampling.temperature, sampling.stop, sampling.top_k) == (0.5, ("x",), 0)
    assert (sampling.logit_bias, sampling.max_tokens) == ({7: 2.0}, 16)
    assert found.deadline_seconds < 600, "OpenAI's client gives up then"
    assert request.to_generate_request("r", [1], logprobs=False, max_tokens=None).logprobs == "none"
    patient = CompletionRequest.model_validate({"prompt": [1], "deadline_seconds": 3600})
    found = patient.to_generate_request("r", [1], logprobs=True, max_tokens=16)
    assert found.deadline_seconds == 3600


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
    ids=str,
)
def test_prompts_of_all_shapes(prompt: Any, prompts: list[Any]) -> None:
    assert CompletionRequest(prompt=prompt).all_prompts == prompts


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"functions": [{}]}, "functions"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"model": "other"}, "model"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"whatever": 0}, "whatever"),
        ({"echo": 0}, "echo"),
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(fields: dict[str, Any], field: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(ProblemError) as refused:
        ChatRequest.model_validate(body).check_fields("tiny")
    errors = (refused.value.problem.model_extra or {})["errors"]
    assert errors[0]["field"] == field


def test_what_never_changes_an_answer_is_ignored() -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "whatever": None}
    same = {"echo": False, "best_of": 1, "length_penalty": 1.0, "parallel_tool_calls": True}
    CompletionRequest.model_validate({"prompt": "a", **fields, **same}).check_fields("tiny")


def test_null_is_the_same_as_no_field() -> None:
    """As clients send it that write every field they know."""
    asked = {"messages": [{"role": "user", "content": "hi"}], "stream_options": {}}
    nulls = dict.fromkeys(ChatRequest.model_fields.keys() - asked.keys())
    nulls |= {"stream_options": {"include_usage": None}, "tools": [{"type": None, "function": {}}]}
    want = ChatRequest.model_validate({**asked, "tools": [{"function": {}}]})
    assert ChatRequest.model_validate({**asked, **nulls}) == want


@pytest.mark.parametrize("function", [{}, {"name": None}, {"name": "get weather"}, {"name": ""}])
def test_a_tool_whose_calls_would_stay_text_is_refused(function: dict[str, Any]) -> None:
    tools = [{"function": {"name": "mcp/get.it-2"}}, {"type": "function", "function": function}]
    asked = ChatRequest.model_validate({"messages": [{"role": "user"}], "tools": tools})
    with pytest.raises(ProblemError, match=r"tools\.1\.function\.name is not .*: name it"):
        asked.check_fields(["tiny"])


@pytest.mark.parametrize("choice", [{"type": "allowed_tools"}, "any", {"function": {"name": None}}])
def test_a_choice_of_tools_that_is_none_of_ours_is_told(choice: Any) -> None:
    body = {"messages": [{"role": "user"}], "tools": [{"function": {"name": "f"}}]}
    with pytest.raises(ProblemError, match="use 'auto', 'none', 'required', or a function by name"):
        forced_functions(ChatRequest.model_validate({**body, "tool_choice": choice}))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("parallel", "names"), [(None, ["a", "b"]), (False, ["a"])])
async def test_of_several_calls_only_the_first_where_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, parallel: Any, names: list[str]
) -> None:
    said = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in "ab"
    )

    async def given(value: Any) -> Any:
        return value

    monkeypatch.setattr(
        ModelText, "make_decoder", lambda _: given(lambda ids, _special: said if ids else "")
    )
    monkeypatch.setattr(ModelText, "render_conversation", lambda *_, **__: given([5, 6]))
    reader = AnswerReader("hermes", None, lambda *_: parse_hermes_call, ())
    monkeypatch.setattr(ModelText, "answer_reader", lambda _: given(reader))
    tool = {"type": "function", "function": {"name": "a"}}
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "max_tokens": 3}
    asked |= {"parallel_tool_calls": parallel, "stream": stream}
    async with tiny_worker(tmp_path) as tiny:
        tiny.engine.free = True
        answer = await call(
            make_data_app(tiny.worker), "/v1/chat/completions", json.dumps(asked).encode()
        )
    assert answer.status == 200, answer.content
    if stream:
        lines = [line for line in answer.content.decode().splitlines() if '"tool_calls": [' in line]
        message = json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]
    else:
        message = answer.body["choices"][0]["message"]
    assert [each["function"]["name"] for each in message["tool_calls"]] == names


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": "5"},
        {"temperature": "1"},
        {"n": True},
        {"stream": "yes"},
        {"seed": 5.0},
        {"stop_token_ids": ["5"]},
        {"logit_bias": {"5": "1"}},
        {"stream_options": {"include_usage": 1}},
        {"stream_options": {"continuous_usage_stats": 1}},
        {"skip_special_tokens": "no"},
    ],
    ids=str,
)
def test_no_text_is_taken_for_a_number(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({"prompt": "a", **fields})
    assert refused.value.errors()[0]["loc"][0] == next(iter(fields))
