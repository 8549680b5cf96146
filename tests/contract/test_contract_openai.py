"""OpenAI's routes through OpenAI's own client, on every engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import requests
import transformers

from tests.support.engine.contracts import Served
from tests.support.engine.judging import greedy
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT
from tests.support.waiting import until_sync

CHAT: Any = [
    {"role": "system", "content": "be brief"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "light on "}, {"type": "text", "text": "water"}],
    },
]
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
EXACT: Any = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


@pytest.fixture
def client(worker: Served) -> Iterator[Any]:
    http = openai.DefaultHttpxClient(trust_env=False, timeout=60)
    url = f"{worker.data.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer(tiny_models: TinyModels) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny_models.model(1))


def test_models(client: Any) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_completion_of_ids(client: Any, reference: dict[int, Reference], tokenizer: Any) -> None:
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt=PROMPT, max_tokens=12, logprobs=1, **EXACT
    )
    answer: Any = raw.parse()
    [choice] = answer.choices
    ids = reference[1].greedy(PROMPT, 12)
    assert choice.token_ids == ids
    assert choice.prompt_token_ids == PROMPT
    assert choice.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert choice.finish_reason == "length"
    expected = reference[1].raw_logprobs(PROMPT, ids)
    assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert choice.logprobs.tokens == [tokenizer.decode([i]) for i in ids]
    said = zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
    assert choice.logprobs.top_logprobs == [{token: logprob} for token, logprob in said]
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 12,
    }
    [span] = choice.weights
    assert raw.headers["X-Weights-Version"] == str(span["version"])
    assert (span["start"], span["end"]) == (0, 12)


def test_trls_own_client_generates(worker: Served, reference: dict[int, Reference]) -> None:
    """As its GRPOTrainer calls it: ids in, ids and the logprobs of what was sampled out."""
    from trl.generation.vllm_client import VLLMClient

    class Client(VLLMClient):
        """Its constructor asks for vLLM to be installed beside it, which nothing here calls."""

        def __init__(self, url: str) -> None:
            self.session, self.base_url, self.model = requests.Session(), url, "tiny"
            self.session.trust_env = False

    found: Any = Client(str(worker.data.base_url).rstrip("/")).generate(
        prompts=[PROMPT, PROMPT[:3]], n=2, repetition_penalty=1.0, temperature=1.0, top_p=1.0,
        top_k=0, min_p=0.0, max_tokens=5, logprobs=0, structured_outputs_regex=None,
        generation_kwargs={"ignore_eos": True},
    )  # fmt: skip
    assert found["prompt_ids"] == [PROMPT, PROMPT[:3]]
    assert [len(ids) for ids in found["completion_ids"]] == [5] * 4
    assert found["logprob_token_ids"] == [[[i] for i in ids] for ids in found["completion_ids"]]
    for prompt, ids, logprobs in zip(
        [PROMPT, PROMPT, PROMPT[:3], PROMPT[:3]], found["completion_ids"], found["logprobs"],
        strict=True,
    ):  # fmt: skip
        expected = reference[1].raw_logprobs(prompt, ids)
        assert [each for [each] in logprobs] == pytest.approx(expected, abs=1e-3)


def test_text_prompts_several_and_n(client: Any, tokenizer: Any) -> None:
    texts = ["light water", "stone"]
    answer: Any = client.completions.create(
        model="tiny", prompt=texts, n=2, max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    prompts = [choice.prompt_token_ids for choice in answer.choices]
    assert prompts == [tokenizer(text)["input_ids"] for text in texts for _ in range(2)]
    assert len(client.completions.create(model="tiny", prompt="light").choices[0].text) > 0


def test_a_streamed_completion_adds_up(client: Any) -> None:
    asked: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "logprobs": 0, **EXACT}
    whole: Any = client.completions.create(**asked).choices[0]
    usage = {"include_usage": True, "continuous_usage_stats": True}
    chunks: list[Any] = list(client.completions.create(stream=True, stream_options=usage, **asked))
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    assert len(pieces) > 1  # a reader that is late gets several tokens at once
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [i for piece in pieces for i in getattr(piece, "token_ids", [])] == whole.token_ids
    logprobs = [p for piece in pieces if piece.logprobs for p in piece.logprobs.token_logprobs]
    assert logprobs == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)
    assert [p.finish_reason for p in pieces if p.finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 30
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts), "each chunk counts what its output has so far"
    assert 0 < counts[0] <= 30 == counts[-2]


def test_a_chat(client: Any, reference: dict[int, Reference], tokenizer: Any) -> None:
    answer: Any = client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=10, logprobs=True, **EXACT
    )
    flat = [CHAT[0], {"role": "user", "content": "light on water"}]
    text = tokenizer.apply_chat_template(flat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert answer.prompt_token_ids == prompt
    [choice] = answer.choices
    assert greedy(reference[1], prompt, choice.token_ids)
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    got = [each.logprob for each in choice.logprobs.content]
    assert got == pytest.approx(reference[1].raw_logprobs(prompt, choice.token_ids), abs=1e-4)
    assert answer.usage.total_tokens == len(prompt) + 10


def test_a_streamed_chat_adds_up(client: Any) -> None:
    asked: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 24, "n": 2, **EXACT}
    whole: Any = client.chat.completions.create(**asked)
    chunks: list[Any] = list(client.chat.completions.create(stream=True, **asked))
    assert chunks[0].choices[0].delta.role == "assistant"
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [i for c in mine for i in getattr(c, "token_ids", [])] == choice.token_ids
        assert mine[-1].finish_reason == choice.finish_reason == "length"


def test_tools_reach_the_template(client: Any, worker: Served, tokenizer: Any) -> None:
    assert (worker.able["chat"], worker.able["tool_parser"]) == (True, worker.kind.parser)
    asked: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 2, "tools": [TOOL], **EXACT}
    answer: Any = client.chat.completions.create(**asked)
    assert '"name": "add"' in tokenizer.decode(answer.prompt_token_ids)
    answer = client.chat.completions.create(**asked, tool_choice="none")
    assert '"name": "add"' in tokenizer.decode(answer.prompt_token_ids), "TRL parses calls itself"


def test_a_response_format_is_met(client: Any) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    closed = {**schema, "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": closed}}
    answer: Any = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=40, response_format=form, n=3
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert type(json.loads(choice.message.content)["ok"]) is bool
    completion: Any = client.completions.create(
        model="tiny", prompt="a", max_tokens=40, extra_body={"response_format": form}
    )
    assert "ok" in json.loads(completion.choices[0].text)
    bad: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "odd"}}}
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.chat.completions.create(model="tiny", messages=CHAT, response_format=bad)
    assert refused.value.param == "response_format"


def test_a_tool_call_can_be_forced(client: Any) -> None:
    """Any, a named one, and only one; streamed, too."""
    flag = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    closed = {**flag, "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": closed}}
        for name in ("light", "heat")
    ]
    asked: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 400, "tools": tools}
    named: Any = {"type": "function", "function": {"name": "heat"}}
    for choice in ("required", named):
        answer: Any = client.chat.completions.create(
            **asked, tool_choice=choice, parallel_tool_calls=False, n=3
        )
        for each in answer.choices:
            assert each.finish_reason == "tool_calls"
            [call] = each.message.tool_calls
            assert call.function.name in ("light", "heat") if choice == "required" else "heat"
            assert type(json.loads(call.function.arguments)["on"]) is bool
            assert not each.message.content
    chunks: list[Any] = list(
        client.chat.completions.create(**asked, tool_choice=named, stream=True)
    )
    calls = [c for chunk in chunks for each in chunk.choices for c in each.delta.tool_calls or ()]
    assert [call.function.name for call in calls] == ["heat"]
    missing: Any = {"type": "function", "function": {"name": "cool"}}
    for wrong in (missing, "always"):
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            client.chat.completions.create(**asked, tool_choice=wrong)
        assert refused.value.param == "tool_choice"


def test_special_tokens_are_added_and_shown_as_asked(client: Any, tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    sampling = {"allowed_token_ids": [eos], "ignore_eos": True, "return_token_ids": True}
    asked: Any = {"model": "tiny", "prompt": "light water", "max_tokens": 2}
    for shown, added in ((True, True), (False, False)):
        text = {"skip_special_tokens": not shown, "add_special_tokens": added}
        answer: Any = client.completions.create(**asked, extra_body={**sampling, **text})
        [choice] = answer.choices
        assert choice.text == (tokenizer.eos_token * 2 if shown else "")
        ids = tokenizer("light water", add_special_tokens=added)["input_ids"]
        assert choice.prompt_token_ids == ids


def test_stop_strings_are_cut_off_the_text(
    client: Any, worker: Served, tokenizer: Any, reference: dict[int, Reference]
) -> None:
    if not worker.able["stop_strings"]:
        pytest.skip(f"{worker.kind} declares no stop strings")
    text = tokenizer.decode(reference[1].greedy(PROMPT, 12), skip_special_tokens=True)
    stop = text[9:12]
    asked: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "stop": stop, **EXACT}
    [choice] = client.completions.create(**asked).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == choice.text


def test_versions_are_asked_for_and_named(client: Any, worker: Served) -> None:
    worker.load(2)
    version = worker.state()["weights"]["active"]["version"]
    asked: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
    met = {"X-Rollout-Min-Version": str(version)}
    for stream in (False, True):
        raw = client.completions.with_raw_response.create(**asked, stream=stream, extra_headers=met)
        assert raw.headers["X-Weights-Version"] == str(version)
    later = {"X-Rollout-Min-Version": str(version + 1)}
    with pytest.raises(openai.ConflictError) as refused:
        client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=2, extra_headers=later
        )
    assert refused.value.code == "version-not-met"
    headers = refused.value.response.headers
    assert int(headers["retry-after"]) >= 1
    assert headers["X-Weights-Version"] == str(version), "how far it is"


def test_an_abort_keeps_its_text(client: Any, worker: Served) -> None:
    asked: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1800, **EXACT}
    running = worker.in_background(lambda: client.completions.create(**asked))
    until_sync(lambda: worker.state()["in_flight"] == 1, what="it to run")
    worker.post("abort", all=True)
    choice: Any = running.result(20).choices[0]
    assert choice.finish_reason == "abort"
    assert len(choice.token_ids) < 1800
