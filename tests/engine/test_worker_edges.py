"""Values at the edges of the contract: each is served or refused by name, none is a 500 or ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, InProcess, in_process, slug

CALL = [{"role": "assistant", "tool_calls": 5}]
HALF = "\ud800"


@pytest.fixture(scope="module")
def worker(tiny_models: TinyModels) -> Iterator[InProcess]:
    with in_process(tiny_models.model(1), "--served-name", "tiny") as worker:
        yield worker


def test_links_that_go_in_a_circle(worker: InProcess, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (loop, loop / "deeper"):
        answer = worker.post("weights/stage", epoch=1, version=1, source={"path": str(path)})
        assert (answer.status_code, slug(answer)) == (422, "invalid-request")
        assert answer.json()["errors"][0]["field"] == "source.path"


def test_an_id_named_twice_is_answered_once(worker: InProcess) -> None:
    running = worker.long("twice")
    answer = worker.post("abort", request_ids=["twice", "no", "twice", "no"])
    assert answer.json() == {"aborted": ["twice"], "unknown": ["no"]}
    assert running.result(10).json()["outputs"][0]["abort_reason"] == "control"


def test_an_id_that_is_no_text(worker: InProcess) -> None:
    body = json.dumps({"request_ids": ["a", HALF]})
    said = {"Content-Type": "application/json"}
    answer = worker.control.post("/v1/abort", content=body, headers=said)
    assert (answer.status_code, slug(answer)) == (422, "invalid-request")
    assert answer.json()["errors"][0]["field"] == "request_ids.1"


def test_min_tokens_above_max_tokens_names_its_field(worker: InProcess) -> None:
    answer = worker.generate(sampling={"max_tokens": 2, "min_tokens": 3})
    assert (answer.status_code, slug(answer)) == (422, "invalid-request")
    assert [each["field"] for each in answer.json()["errors"]] == ["sampling.min_tokens"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"prompt": ""}, 422, "prompt"),
        ({"prompt": [99999]}, 422, "prompt"),
        ({"prompt": [5, "6"]}, 422, "prompt"),
        ({"prompt": [True]}, 422, "prompt"),
        ({"prompt": [[5], "a"]}, 422, "prompt"),
        ({"prompt": HALF}, 422, "prompt"),
        ({"prompt": [5] * 2048}, 413, "prompt"),
        ({"max_tokens": 0}, 422, "max_tokens"),
        ({"top_k": -2}, 422, "top_k"),
        ({"logprobs": -1}, 422, "logprobs"),
        ({"max_new_tokens": 5}, 422, "max_new_tokens"),
        ({"typical_p": 0.5}, 422, "typical_p"),
        ({"structured": {"json": {}}}, 422, "structured"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_bad_completions(
    worker: InProcess, fields: dict[str, Any], status: int, param: str
) -> None:
    _refused(worker, "completions", {"prompt": PROMPT, **fields}, status, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": HALF}]}, "messages"),
        ({"messages": [{"role": HALF, "content": "a"}]}, "messages"),
        ({"messages": CALL}, "messages.0.tool_calls"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_bad_chats(worker: InProcess, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    _refused(worker, "chat/completions", body, 422, param)


def _refused(worker: InProcess, route: str, body: dict[str, Any], status: int, param: str) -> None:
    # Not httpx's own JSON: that has no escapes, so it can't write half a character.
    content = json.dumps({"max_tokens": 2, "ignore_eos": True, **body})
    answer = worker.data.post(f"/v1/{route}", content=content)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert "token_ids: " not in error["message"]
    assert "sampling." not in error["message"] or status == 413


@pytest.mark.parametrize("name", ["enable_thinking", "documents"])
def test_variables_of_a_template_are_taken(worker: InProcess, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    given: dict[str, Any] = {"chat_template_kwargs": {name: []}}
    answer = worker.data.post("/v1/chat/completions", json={**body, **given})
    assert answer.status_code == 200, answer.text
