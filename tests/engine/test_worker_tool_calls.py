"""Tool calls over HTTP, from a model whose weights are set so that it always makes one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from rollout_worker.sources.checkpoint_files import write_manifest
from tests.support.doc_manifests import run_code
from tests.support.engine.tinymodels import script
from tests.support.engine.workers import InProcess, in_process
from tests.support.waiting import until_sync

SAID = [
    "Well.",
    "<tool_call>",
    '{"name": "add", "arguments": ',
    '{"a": 1, "b": 2}}',
    "</tool_call>",
]
THINKING = ["<think>", "Hm.", "</think>", *SAID]
DESCRIPTION = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
        },
    },
}
"""What a tokenizer of newer models says of its answers, for transformers."""
EOS = 2
VOCAB = 2048
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def scripted(folder: Path, said: Sequence[str] = SAID) -> Path:
    """A model that answers `said` to whatever ends in a line feed: each token picks the next one."""
    module = script()
    module.make_model(folder, 1, module.Shape(vocab=VOCAB))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(list(said))
    tokenizer.save(str(folder / "tokenizer.json"))
    module.make_weights(folder, 1, module.Shape(vocab=VOCAB + 16, tied=False))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) or name == "lm_head.weight":
            tensor.zero_()
    tensors["model.norm.weight"].fill_(1)
    embedding = torch.randn_like(tensors["model.embed_tokens.weight"])
    tensors["model.embed_tokens.weight"] = embedding
    path = [*tokenizer.encode("\n").ids, *(tokenizer.token_to_id(token) for token in said), EOS]
    for token, following in pairwise(path):
        tensors["lm_head.weight"][following] = embedding[token]
    save_file(tensors, file, metadata={"format": "pt"})
    write_manifest(folder)
    return folder


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    model = scripted(tmp_path_factory.mktemp("scripted"))
    with in_process(model, "--served-name", "caller") as worker:
        yield worker


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """A worker whose model thinks, and whose tokenizer says how."""
    model = scripted(tmp_path_factory.mktemp("thinking"), THINKING)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": DESCRIPTION}))
    flag = "--engine-arg=--tool-call-parser=response_template"
    with in_process(model, "--served-name", "caller", flag) as worker:
        yield worker


@contextmanager
def asking(worker: InProcess) -> Iterator[Any]:
    http = openai.DefaultHttpxClient(trust_env=False, timeout=60)
    url = f"{worker.data.base_url}/v1"
    messages: Any = [{"role": "user", "content": "add 1 and 2"}]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:

        def create(**fields: Any) -> Any:
            fields = {"messages": messages, "temperature": 0, **fields}
            return client.chat.completions.create(model="caller", **fields)

        yield create


@pytest.fixture
def ask(worker: InProcess) -> Iterator[Any]:
    with asking(worker) as create:
        yield create


@pytest.fixture
def ask_thinker(thinker: InProcess) -> Iterator[Any]:
    with asking(thinker) as create:
        yield create


def test_a_call_is_parsed(ask: Any) -> None:
    [choice] = ask(tools=[TOOL]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}


def test_a_streamed_call_is_parsed(ask: Any) -> None:
    pieces = [choice for chunk in ask(tools=[TOOL], stream=True) for choice in chunk.choices]
    assert "".join(piece.delta.content or "" for piece in pieces) == "Well."
    [call] = [call for piece in pieces for call in piece.delta.tool_calls or ()]
    assert (call.index, call.function.name) == (0, "add")
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    assert pieces[-1].finish_reason == "tool_calls"


def test_without_tools_nothing_is_parsed(ask: Any) -> None:
    [choice] = ask().choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "".join(SAID))


@pytest.mark.parametrize("stream", [False, True], ids=["answer", "stream"])
def test_reasoning_and_calls_are_read_as_the_tokenizer_describes_them(
    ask_thinker: Any, stream: bool
) -> None:
    answer = ask_thinker(tools=[TOOL], stream=stream, extra_body={"return_token_ids": True})
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    said = [choice.delta if stream else choice.message for choice in choices]
    assert "".join(each.content or "" for each in said) == "Well."
    for name in ("reasoning_content", "reasoning"):
        assert [getattr(each, name) for each in said if hasattr(each, name)] == ["Hm."]
    [call] = [call for each in said for call in each.tool_calls or ()]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    assert choices[-1].finish_reason == "tool_calls"
    ids = [token for choice in choices for token in getattr(choice, "token_ids", ())]
    assert len(ids) == len(THINKING) + 1


def test_a_parser_of_descriptions_forces_no_calls(ask_thinker: Any) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        ask_thinker(tools=[TOOL], tool_choice="required")
    assert refused.value.param == "tool_choice"
    assert "'response_template' reads can't be forced: use 'auto'" in str(refused.value)


def test_the_pages_code_runs(thinker: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    names: dict[str, Any] = {"URL": thinker.url, "MODEL": "caller"}
    run_code("tool-calls.md", names)
    assert names["choice"].message.reasoning_content == "Hm."
    assert [message["role"] for message in names["messages"]] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--tool-call-parser=odd", "the hf engine has no such parser: use one of hermes,"),
        ("--reasoning-parser=response_template", "it has no response_template"),
    ],
)
def test_a_parser_that_the_engine_does_not_have_is_refused_at_the_start(
    tmp_path: Path, flag: str, said: str
) -> None:
    module = script()
    module.make_model(tmp_path, 1, module.Shape(vocab=VOCAB))
    with in_process(tmp_path, flag, wait=False) as worker:
        runtime = worker.worker.runtime
        until_sync(lambda: runtime.last_error is not None, 60, what="the refusal")
        assert said in str(runtime.last_error)
        assert flag.partition("=")[0] in str(runtime.last_error)


def test_a_model_without_a_template_or_tokenizer_says_so(tmp_path: Path) -> None:
    module = script()
    module.make_model(tmp_path, 1, module.Shape(vocab=VOCAB))
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").unlink()
    with in_process(tmp_path, "--served-name", "m") as worker:
        assert worker.data.get("/v1/info").json()["capabilities"]["chat"] is False
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
        answer = worker.data.post("/v1/chat/completions", json=body)
        assert answer.status_code == 422
        assert "chat template" in answer.json()["error"]["message"]
        answer = worker.data.post("/v1/completions", json={"prompt": [5, 6]})
        assert answer.status_code == 422
        assert "/v1/generate" in answer.json()["error"]["message"]
