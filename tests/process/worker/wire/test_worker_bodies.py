"""No body holds the event loop or ends the worker, whatever it is: huge, nested, of wrong types."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fastapi import FastAPI, Request
from pydantic import BaseModel

from rollout_common.wire.problems import ProblemError
from rollout_worker.openai.openai_models import ChatRequest, CompletionRequest
from rollout_worker.ports.callers.auth import AllowAnyone
from rollout_worker.ports.control_routes import make_control_app
from rollout_worker.ports.data_routes import make_data_app
from rollout_worker.requests.http_requests import (
    CONTROL_LIMITS,
    MAX_DEPTH,
    MIB,
    BodyReader,
    data_body_limits,
    parse_body,
)
from rollout_worker.schemas import AbortRequest, GenerateRequest, StageRequest
from rollout_worker.service import WorkerService
from tests.support.unit.asgi import GOOD_BODIES, Answer, call
from tests.support.unit.loopwatch import watched
from tests.support.unit.tiny_worker import settings, tiny_worker

# Bodies that no client should send, in every field of every route: those of a port's own OpenAPI document.


def _list(element: str) -> Callable[[int], str]:
    return lambda size: "[" + ",".join([element] * max(1, size // (len(element) + 1))) + "]"


def _mapping(value: str) -> Callable[[int], str]:
    def make(size: int) -> str:
        return "{" + ",".join(f'"{n}":{value}' for n in range(max(1, size // 12))) + "}"

    return make


def _deep(before: str, after: str) -> Callable[[int], str]:
    return lambda size: before * (size // len(before)) + after * (size // len(before))


FILLS: dict[str, Callable[[int], str]] = {
    "integers": _list("7"),
    "floats": _list("0.5"),
    "texts": _list('"a"'),
    "nothings": _list("null"),
    "objects": _list("{}"),
    "lists": _list("[]"),
    "lists of lists": _list("[[[[]]]]"),
    "messages": _list('{"role":"user","content":[{"type":"text","text":"a"}]}'),
    "numbers as keys": _mapping("0.5"),
    "texts at keys": _mapping('"a"'),
    "objects at keys": _mapping("{}"),
    "deep lists": _deep("[", "]"),
    "deep objects": lambda size: '{"a":' * (size // 5) + "1" + "}" * (size // 5),
    "tens of levels": lambda size: _list('{"a":' * 90 + "1" + "}" * 90)(size),
    "one long text": lambda size: '"' + "a" * size + '"',
    "commas": lambda size: '"' + "," * size + '"',
    "escapes": lambda size: '"' + "\\u00e9" * (size // 6) + '"',
    "half characters": _list('"\\ud800"'),
    "long integers": _list("7" * 4000),
    "one long integer": lambda size: "7" * size,
    "one long fraction": lambda size: "0." + "7" * size,
    "not a number": lambda size: "NaN",
    "a late mistake": lambda size: "[" + "7," * (size // 2) + "0.5]",
    "half of it": lambda size: "[" + "7," * (size // 2),
}


@dataclasses.dataclass(frozen=True)
class BadBody:
    """One body for one route."""

    path: str
    field: tuple[str, ...]
    fill: str
    size: int

    @property
    def content(self) -> bytes:
        """The body: a good one, but for its last field."""
        good = GOOD_BODIES.get(self.path, {})
        start = _open_object(good)
        inner = FILLS[self.fill](self.size)
        for name in reversed(self.field[1:]):
            # What else is in a good field stays, such as the few tokens of a request that is not bad after all.
            beside = good.get(self.field[0], {}) if name == self.field[1] else {}
            inner = f'{_open_object(beside)}"{name}":{inner}}}'
        return f'{start}"{self.field[0]}":{inner}}}'.encode()


def unknown_fields(path: str, size: int) -> bytes:
    """A good body with very many unknown fields."""
    return (_open_object(GOOD_BODIES.get(path, {})) + _mapping("1")(size)[1:]).encode()


def _open_object(fields: object) -> str:
    """Return the beginning of a JSON object with these fields, to which others can be added."""
    begun = json.dumps(fields)[:-1]
    return begun if begun == "{" else begun + ","


def paths(document: dict[str, Any]) -> list[str]:
    """The routes that take a body."""
    return [path for path, methods in document["paths"].items() if "post" in methods]


def fields(document: dict[str, Any], path: str) -> list[tuple[str, ...]]:
    """The fields of a route's body, nested ones too."""
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return list(_fields(document, content["schema"], ()))


def _fields(
    document: dict[str, Any], schema: dict[str, Any], above: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    for option in (schema, *schema.get("anyOf", ()), *schema.get("allOf", ())):
        if "$ref" in option:
            name = option["$ref"].rpartition("/")[2]
            yield from _fields(document, document["components"]["schemas"][name], above)
        for name, below in option.get("properties", {}).items():
            yield (*above, name)
            yield from _fields(document, below, (*above, name))


def drawn(document: dict[str, Any], seed: int, size: int) -> BadBody:
    """One of all these bodies."""
    chance = random.Random(seed)
    path = chance.choice(paths(document))
    field = chance.choice([*fields(document, path), ("unknown",)])
    return BadBody(path, field, chance.choice(list(FILLS)), size)


# What becomes of them.

HELD_SECONDS = 0.1
MAX_LENGTH = 2**17
LIMITS = {"data": data_body_limits(MAX_LENGTH), "control": CONTROL_LIMITS}
ATTEMPTS = 4
"""Who holds the loop does so each time; a loop that others did not let run is free at another time."""
SEEDS = [*range(16), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(16, 400))]
"""Four bodies of each size every day."""
DOCUMENTS = {
    name: app.openapi()
    for name, app in (
        ("data", make_data_app(WorkerService(settings()))),
        ("control", make_control_app(WorkerService(settings()), AllowAnyone())),
    )
}
ROUTES = [(port, path) for port, document in DOCUMENTS.items() for path in paths(document)]


@pytest_asyncio.fixture
async def ports(tmp_path: Path) -> AsyncIterator[dict[str, FastAPI]]:
    """Both ports of a worker that takes long prompts and answers at once."""
    async with tiny_worker(tmp_path) as tiny:
        tiny.engine.free = True
        assert tiny.runtime.info is not None
        tiny.runtime.info = dataclasses.replace(tiny.runtime.info, max_length=MAX_LENGTH)
        yield {
            "data": make_data_app(tiny.worker),
            "control": make_control_app(tiny.worker, AllowAnyone()),
        }


async def held_by(app: FastAPI, path: str, body: bytes) -> tuple[Answer, float]:
    """The answer to a body, and how long the loop was held."""
    held = []
    for _ in range(ATTEMPTS):
        async with watched() as watch:
            answer = await asyncio.wait_for(
                call(app, path, body, headers={"content-type": "application/json"}), 60
            )
        held.append(watch.seconds)
        if watch.seconds < HELD_SECONDS:
            break
    return answer, min(held)


def test_every_route_is_known() -> None:
    assert set(GOOD_BODIES) == {path for _, path in ROUTES}
    found = fields(DOCUMENTS["data"], "/v1/generate")
    assert {("token_ids",), ("sampling", "logit_bias")} <= set(found)
    assert ("source", "checkpoint") in fields(DOCUMENTS["control"], "/v1/weights/stage")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("port", ["data", "control"])
async def test_a_bad_body_is_refused_and_holds_nothing(
    ports: dict[str, FastAPI], port: str, seed: int
) -> None:
    bad = drawn(DOCUMENTS[port], seed, size=2 ** (6 + seed % 4 * 4))
    answer, held = await held_by(ports[port], bad.path, bad.content)
    assert answer.status < 500 or answer.slug in ("asleep", "paused", "fenced"), answer.content
    assert held < HELD_SECONDS, bad


async def test_a_compressed_body_is_told_apart_from_a_broken_one(ports: dict[str, FastAPI]) -> None:
    body, headers = gzip.compress(b'{"prompt": [5]}'), {"content-encoding": "gzip"}
    answer = await call(ports["data"], "/v1/completions", body, headers=headers)
    assert answer.status == 415
    assert "'gzip' is not understood: send the body uncompressed" in answer.body["error"]["message"]


@pytest.mark.parametrize(("port", "path"), ROUTES)
async def test_a_body_at_the_limit_holds_nothing(
    ports: dict[str, FastAPI], port: str, path: str
) -> None:
    size = LIMITS[port].size - 1024
    parts = LIMITS[port].parts - 64
    bodies = (
        unknown_fields(path, 12 * parts),
        BadBody(path, ("x",), "objects", 3 * parts).content,
        BadBody(path, ("x",), "objects", size).content,
    )
    for body in bodies:
        answer, held = await held_by(ports[port], path, body)
        assert answer.status in (413, 422), answer.content[:200]
        assert len(answer.content) < 100_000, "it is told in few words"
        assert held < HELD_SECONDS


@pytest.mark.parametrize("fill", FILLS)
async def test_a_prompt_at_the_limit_holds_nothing(ports: dict[str, FastAPI], fill: str) -> None:
    values = 2 * MAX_LENGTH  # as many as a body may hold, and a few more
    sizes = {"floats": 4 * values, "texts": 4 * values, "integers": 4 * values}
    size = sizes.get(fill, LIMITS["data"].size - 1024)
    for path, field in (("/v1/generate", "token_ids"), ("/v1/completions", "prompt")):
        answer, held = await held_by(
            ports["data"], path, BadBody(path, (field,), fill, size).content
        )
        assert answer.status in (413, 422), answer.content[:200]
        assert held < HELD_SECONDS, path


async def test_the_longest_prompt_is_taken_and_holds_nothing(ports: dict[str, FastAPI]) -> None:
    ids = [123456] * (MAX_LENGTH - 1)
    body = {"token_ids": ids, "sampling": {"max_tokens": 1}}
    answer, held = await held_by(ports["data"], "/v1/generate", json.dumps(body, indent=1).encode())
    assert answer.status == 200, answer.content[:200]
    assert held < HELD_SECONDS


MODELS: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    (GenerateRequest, {"token_ids": [5] * 40_000 + [0.5, "a", None]}, "token_ids.40000"),
    (GenerateRequest, {"token_ids": [True, "a"]}, "token_ids.0"),
    (GenerateRequest, {"token_ids": ["a"] * 40_000}, "token_ids.0"),
    (
        GenerateRequest,
        {"token_ids": [5], "sampling": {"logit_bias": {"1": 1, "2": "a", "x": 1}}},
        "sampling.logit_bias.2",
    ),
    (
        GenerateRequest,
        {"token_ids": [5], "sampling": {"logit_bias": dict.fromkeys(map(str, range(20_000)), 1)}},
        "sampling.logit_bias",
    ),
    (AbortRequest, {"request_ids": ["a", 5, 6]}, "request_ids.1"),
    (AbortRequest, {"request_ids": ["a"] * 70_000}, "request_ids"),
    (
        StageRequest,
        {"epoch": 1, "version": 1, "source": {"path": "a"}, "labels": {"a": 1, "b": 2}},
        "labels.a",
    ),
    (ChatRequest, {"messages": [5, 6]}, "messages.0"),
    (ChatRequest, {"messages": [{}], "tools": [5, 6]}, "tools.0"),
    (ChatRequest, {"messages": [{}] * 20_000}, "messages"),
    (CompletionRequest, {"prompt": [5, "a"]}, "prompt"),
]


@pytest.mark.parametrize(("model", "body", "field"), MODELS, ids=lambda each: str(each)[:40])
def test_the_first_mistake_ends_the_validation(
    model: type[BaseModel], body: dict[str, Any], field: str
) -> None:
    with pytest.raises(ProblemError) as refused:
        parse_body(model, json.dumps(body).encode(), data_body_limits(MAX_LENGTH))
    assert refused.value.slug == "invalid-request"
    [error] = (refused.value.problem.model_extra or {})["errors"]
    assert error["field"] == field


def test_a_mistake_is_told_though_its_name_is_long() -> None:
    with pytest.raises(ProblemError) as refused:
        parse_body(AbortRequest, b'{"' + b"a" * 500_000 + b'": 1, "all": true}', CONTROL_LIMITS)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"all": tru}', "invalid JSON at character 8"),
        (b'{"all": \xff}', "not valid UTF-8"),
        (b'{"all": %s}' % (b"7" * 5000), "too many digits"),
        (b'{"all": %s}' % (b"[" * 60_000), "levels deep"),
        (b'{"all": %s%s}' % (b"[" * MAX_DEPTH, b"]" * MAX_DEPTH), "levels deep"),
        (b"[" * 60_000 + b" " * MIB, "levels deep"),
    ],
    ids=["half", "bytes", "digits", "deeper than Python", "too deep", "long and deep"],
)
def test_what_is_no_json_is_told(body: bytes, said: str) -> None:
    with pytest.raises(ProblemError, match=said) as refused:
        parse_body(AbortRequest, body, data_body_limits(MAX_LENGTH))
    assert refused.value.problem.status == 422


def test_what_is_long_is_parsed_as_what_is_short() -> None:
    ids = list(range(200_000))
    text = json.dumps({"token_ids": ids, "cache_salt": "é\n", "min_version": 3})
    found = parse_body(GenerateRequest, text.encode(), data_body_limits(len(ids)))
    assert found == GenerateRequest(token_ids=tuple(ids), cache_salt="é\n", min_version=3)


def test_the_limit_follows_from_the_maximum_length() -> None:
    for tokens in (2048, 2**17, 2**20):
        limits = data_body_limits(tokens)
        prompt = json.dumps({"token_ids": [2**31 - 1] * tokens}).encode()
        assert len(prompt) < limits.size
        assert tokens < limits.values
    assert data_body_limits(2**20).size < 32 * MIB


async def test_a_body_that_does_not_arrive_is_given_up() -> None:
    app = FastAPI()
    bodies = BodyReader(lambda: CONTROL_LIMITS, seconds=0.05)

    @app.post("/")
    async def slow(request: Request) -> None:
        with pytest.raises(ProblemError) as refused:
            await bodies.read_body(request, AbortRequest)
        assert refused.value.slug == "body-timeout"

    assert (await call(app, "/", b'{"all":', stays=True)).status == 200


async def test_before_a_model_is_loaded_no_body_is_too_large() -> None:
    app = make_data_app(WorkerService(settings()))
    answer = await call(app, "/v1/generate", b"[" * 10 * MIB)
    assert (answer.status, answer.slug) == (503, "starting")
