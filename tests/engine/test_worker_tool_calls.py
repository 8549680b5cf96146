"""Tool calls over HTTP, from a model whose weights are set so that it always makes one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from rollout_worker.sources.checkpoint_files import write_manifest
from tests.support.engine.tinymodels import script
from tests.support.engine.workers import InProcess, in_process

SAID = [
    "Well.",
    "<tool_call>",
    '{"name": "add", "arguments": ',
    '{"a": 1, "b": 2}}',
    "</tool_call>",
]
EOS = 2
VOCAB = 2048
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def scripted(folder: Path) -> Path:
    """A model that answers `SAID` to whatever ends in a line feed: each token picks the next one."""
    module = script()
    module.make_model(folder, 1, module.Shape(vocab=VOCAB))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(SAID)
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
    path = [*tokenizer.encode("\n").ids, *(tokenizer.token_to_id(token) for token in SAID), EOS]
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


@pytest.fixture
def ask(worker: InProcess) -> Iterator[Any]:
    http = openai.DefaultHttpxClient(trust_env=False, timeout=60)
    url = f"{worker.data.base_url}/v1"
    messages: Any = [{"role": "user", "content": "add 1 and 2"}]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:

        def create(**fields: Any) -> Any:
            return client.chat.completions.create(
                model="caller", messages=messages, temperature=0, **fields
            )

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


def test_a_call_cut_off_stays_text(ask: Any) -> None:
    [choice] = ask(tools=[TOOL], max_tokens=3).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content == "".join(SAID[:3])


def test_without_tools_nothing_is_parsed(ask: Any) -> None:
    [choice] = ask().choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "".join(SAID))


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
