"""`POST /v1/generate` and the other routes of the data port, over real sockets."""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_worker.engine import EngineDelta, EngineRequest, InvalidRequest
from rollout_worker.schemas import Lifecycle
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import InProcess, in_process, slug
from tests.support.waiting import until_sync


@pytest.fixture(scope="module")
def worker(tiny_models: TinyModels) -> Iterator[InProcess]:
    with in_process(tiny_models.model(1), "--max-queue", "4", "--served-name", "tiny") as worker:
        yield worker


@pytest.fixture(autouse=True)
def idle(worker: InProcess) -> Iterator[None]:
    yield
    until_sync(lambda: worker.state()["in_flight"] == 0, what="requests to end")


def test_only_token_ids_are_required(worker: InProcess) -> None:
    prompt = [5] * 2040  # what is left for the answer, which random weights seldom end
    answer = worker.data.post("/v1/generate", json={"token_ids": prompt})
    body = answer.json()
    assert answer.status_code == 200
    assert set(body) == {"request_id", "logprobs_of", "outputs", "usage", "timing"}
    [output] = body["outputs"]
    assert body["logprobs_of"] == "sampling"
    assert len(output["logprobs"]) == len(output["token_ids"]) > 0
    assert all(math.isfinite(p) and p <= 0 for p in output["logprobs"])
    assert body["usage"] == {
        "prompt_tokens": 2040,
        "completion_tokens": len(output["token_ids"]),
        "cached_tokens": 0,
    }
    timing = body["timing"]
    assert 0 <= timing["queued_seconds"] <= timing["first_token_seconds"] <= timing["total_seconds"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'"\xff"', b"[" * 10**4, b'{"token_ids": [' + b"9" * 5000 + b"]}"],
    ids=["empty", "half", "null", "list", "no utf-8", "too deep", "too many digits"],
)
def test_a_body_that_is_no_request(worker: InProcess, body: bytes) -> None:
    answer = worker.data.post("/v1/generate", content=body)
    assert (answer.status_code, slug(answer)) == (422, "invalid-request")
    assert answer.json()["detail"].startswith("body: ")


def test_an_unknown_field_is_told_where_the_known_ones_are(worker: InProcess) -> None:
    problem = worker.generate(sampling={"temprature": 1}).json()
    assert problem["detail"].startswith("sampling.temprature: unknown field: correct its name")
    assert "temperature" in worker.data.get("/openapi.json").text


def test_a_text_that_never_fits_is_refused_before_it_is_tokenized(worker: InProcess) -> None:
    """Megabytes take the tokenizer half a minute, and all other texts wait."""
    for path, field, body in (
        ("completions", "prompt", {"prompt": ["a", "ab " * 2**20]}),
        ("chat/completions", "messages", {"messages": [{"role": "user", "content": "a" * 2**21}]}),
    ):
        answer = worker.data.post(f"/v1/{path}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (413, "too-long", field)
        assert "characters are never 2048 tokens" in error["message"]


def test_a_body_too_large(worker: InProcess) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"token_ids": ['
        for _ in range(70):
            yield b"5," * 2**19

    with httpx.Client(base_url=worker.data.base_url, trust_env=False, timeout=60) as client:
        answer = client.post("/v1/generate", content=endless())
    assert (answer.status_code, slug(answer)) == (413, "body-too-large")


def test_unknown_routes_and_methods(worker: InProcess) -> None:
    assert slug(worker.data.get("/v1/nothing")) == "not-found"
    answer = worker.data.get("/v1/generate")
    assert slug(answer) == "method-not-allowed"
    assert "POST" in answer.json()["detail"]
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidRequest("sampling.min_p", "use 0"), 422), (ValueError("a defect"), 200)],
    ids=["refused", "defect"],
)
def test_what_an_engine_raises_ends_that_request_only(
    worker: InProcess, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    running = worker.long()
    engine: Any = worker.worker.runtime.engine
    generate = engine.generate

    async def late(request: EngineRequest) -> AsyncIterator[EngineDelta]:
        raise error
        yield

    monkeypatch.setattr(engine, "generate", late)
    answer = worker.generate()
    events = worker.stream()
    asked = {"model": "tiny", "prompt": [5, 6]}
    openai = [
        worker.data.post("/v1/completions", json={**asked, "stream": streamed})
        for streamed in (False, True)
    ]
    monkeypatch.setattr(engine, "generate", generate)
    assert [each.status_code for each in (answer, *openai)] == [status] * 3
    if status == 422:
        assert answer.json()["errors"][0]["field"] == "sampling.min_p"
        [(name, body)] = events
        assert (name, body["status"]) == ("error", 422)
        assert all("use 0" in each.text for each in openai)
    else:
        assert answer.json()["outputs"][0]["abort_reason"] == "engine"
        assert [name for name, _ in events] == ["done"]
    worker.post("abort", request_ids=["long"])
    assert running.result(10).json()["outputs"][0]["abort_reason"] == "control"
    assert worker.state()["restarts"] == 0
    assert len(worker.sample()["token_ids"]) == 8


def test_more_than_the_queue_is_no_matter_of_waiting(worker: InProcess) -> None:
    sampling = {"max_tokens": 1, "n": 5}
    answer = worker.generate(sampling=sampling)
    assert (answer.status_code, slug(answer)) == (422, "unsupported")
    assert answer.json()["errors"][0]["field"] == "sampling.n"
    assert "retry-after" not in answer.headers
    several = {"model": "tiny", "prompt": [[5]] * 3, "n": 2}
    assert worker.data.post("/v1/completions", json=several).status_code == 422
    assert worker.generate(sampling={**sampling, "n": 4}).status_code == 200


METRICS = [
    "info",
    "lifecycle_state",
    "weights_version",
    "weights_epoch",
    "requests_total",
    "refused_total",
    "requests_in_flight",
    "requests_queued",
    "generated_tokens_total",
    "prompt_tokens_total",
    "request_duration_seconds",
    "time_to_first_token_seconds",
    "inter_token_seconds",
    "weights_update_seconds",
    "engine_pause_seconds",
    "engine_restarts_total",
    "transition_seconds",
    "turn_residue_bytes",
    "turn_wait_seconds",
    "memory_resident_bytes",
]


def test_metrics_have_the_names_of_the_contract(worker: InProcess) -> None:
    before = _metric(worker, 'rollout_worker_requests_total{stop_reason="length"}')
    worker.sample(4)
    page = worker.data.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = set(re.findall(r"^# TYPE (\S+)", page.text, re.MULTILINE))
    assert {f"rollout_worker_{name}" for name in METRICS} <= names
    assert {name for name in names if name.startswith("rollout_")} == {
        f"rollout_worker_{name}" for name in METRICS
    }
    assert any(name.startswith("hf_") for name in names), "the engine's own"
    assert _metric(worker, 'rollout_worker_requests_total{stop_reason="length"}') == before + 1
    assert _metric(worker, 'rollout_worker_lifecycle_state{state="Active"}') == 1
    assert _metric(worker, "rollout_worker_memory_resident_bytes") > 50e6


@pytest.mark.parametrize(
    ("metric", "label", "values"),
    [
        ("requests_total", "stop_reason", {"stop", "length", "aborted"}),
        ("lifecycle_state", "state", {state.value for state in Lifecycle}),
        ("weights_update_seconds_count", "phase", {"stage", "commit"}),
        (
            "transition_seconds_count",
            "transition",
            {"load", "quiesce", "resume", "sleep", "wake"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_series_is_there_before_its_first_event(
    worker: InProcess, metric: str, label: str, values: set[str]
) -> None:
    page = worker.data.get("/metrics").text
    found = re.findall(rf'^rollout_worker_{metric}{{{label}="(\w+)"}} ', page, re.MULTILINE)
    assert set(found) == values


def _metric(worker: InProcess, name: str) -> float:
    for line in worker.data.get("/metrics").text.splitlines():
        if line.startswith(name + " "):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no metric {name}")


# Values at the edges of the contract: each is served or refused by name, none is a 500 or ignored.
HALF = "\ud800"


def test_links_that_go_in_a_circle(worker: InProcess, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (loop, loop / "deeper"):
        answer = worker.post("weights/stage", epoch=1, version=1, source={"path": str(path)})
        assert (answer.status_code, slug(answer)) == (422, "invalid-request")
        assert answer.json()["errors"][0]["field"] == "source.path"


def test_an_id_that_is_no_text(worker: InProcess) -> None:
    body = json.dumps({"request_ids": ["a", HALF]})
    said = {"Content-Type": "application/json"}
    answer = worker.control.post("/v1/abort", content=body, headers=said)
    assert (answer.status_code, slug(answer)) == (422, "invalid-request")
    assert answer.json()["errors"][0]["field"] == "request_ids.1"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"prompt": ""}, 422, "prompt"),
        ({"prompt": [99999]}, 422, "prompt"),
        ({"prompt": [5, "6"]}, 422, "prompt"),
        ({"prompt": HALF}, 422, "prompt"),
        ({"prompt": [5] * 2048}, 413, "prompt"),
        ({"prompt": [5, 6], "max_tokens": 0}, 422, "max_tokens"),
        ({"prompt": [5, 6], "top_k": -2}, 422, "top_k"),
        ({"messages": [{"role": "user", "content": HALF}]}, 422, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, 422, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tokenize": True}}, 422, "chat_template_kwargs.tokenize"),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_bad_requests_in_openais_words(
    worker: InProcess, fields: dict[str, Any], status: int, param: str
) -> None:
    """Named by OpenAI's fields, not by those of the request that they become."""
    route = "completions" if "prompt" in fields else "chat/completions"
    chat = {} if "prompt" in fields else {"messages": [{"role": "user", "content": "hi"}]}
    # Not httpx's own JSON: that has no escapes, so it can't write half a character.
    content = json.dumps({"max_tokens": 2, "ignore_eos": True, **chat, **fields})
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
