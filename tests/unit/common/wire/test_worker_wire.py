"""Wire models hold clients to JSON's types and show what was given, no more."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from rollout_worker.schemas import (
    AbortRequest,
    CommitRequest,
    GenerateOutput,
    GenerateRequest,
    PauseRequest,
    RequireRequest,
    SleepRequest,
    StageRequest,
    StopMatch,
    StopReason,
    WeightsSource,
)


def sampling(**fields: Any) -> dict[str, Any]:
    return {"token_ids": [5], "sampling": fields}


CHECKPOINT: dict[str, Any] = {"source": {"checkpoint": {}}}

MISTAKES: list[tuple[type[BaseModel], dict[str, Any]]] = [
    *((GenerateRequest, {"token_ids": ids}) for ids in ([True], ["5"], [5.0], [2**31], "5")),
    *((GenerateRequest, sampling(max_tokens=value)) for value in (True, "8", 8.0, 0)),
    *((GenerateRequest, sampling(temperature=value)) for value in (True, "1", -0.1)),
    *((GenerateRequest, sampling(top_p=value)) for value in (True, 0, float("nan"))),
    *((GenerateRequest, sampling(ignore_eos=value)) for value in (1, "true")),
    *((GenerateRequest, sampling(**{field: True})) for field in ("n", "seed", "top_k", "min_p")),
    *((GenerateRequest, sampling(stop_token_ids=[value])) for value in (True, 5.0)),
    *((GenerateRequest, sampling(logit_bias={key: 1})) for key in ("5.0", " 5", "05", "1_0")),
    *((GenerateRequest, sampling(logit_bias={"5": value})) for value in (True, "1")),
    *(
        (GenerateRequest, sampling(**{field: value}))
        for field, value in (
            *(
                ("top_p", 1.1),
                ("top_k", -1),
                ("top_k", 2**70),
                ("min_p", 2),
                ("n", 0),
                ("seed", -1),
            ),
            *(("repetition_penalty", 0), ("presence_penalty", 3), ("frequency_penalty", -3)),
            *(("stop", "x"), ("stop", [""]), ("allowed_token_ids", []), ("temprature", 1)),
        )
    ),
    (GenerateRequest, sampling(min_tokens=5, max_tokens=4)),
    *((GenerateRequest, {"token_ids": ids}) for ids in ([], [-1])),
    *(
        (GenerateRequest, {"token_ids": [5], **bad})
        for bad in ({"unknown": 1}, {"logprobs": "all"})
    ),
    *(
        (GenerateRequest, {"token_ids": [5], field: value})
        for field, value in (
            ("stream", 1),
            ("stream", "yes"),
            ("epoch", True),
            ("min_version", "0"),
            ("exact_version", 1.0),
            ("priority", True),
            ("priority", 2**31),
            ("deadline_seconds", True),
            ("deadline_seconds", "5"),
            ("deadline_seconds", 0),
        )
    ),
    *(
        (GenerateRequest, {"token_ids": [5, 6], "prompt_logprobs": value})
        for value in (1, "true", [], [0], [0, 1, 2], [1, 1], [1, 0], [-1, 1], [0, 3], [0, 2.0])
    ),
    *((GenerateRequest, {"token_ids": [5], "prompt_logprobs": [False, True]}),),
    *((GenerateRequest, {"token_ids": [5], "top_logprobs": value}) for value in (True, -1, 257)),
    *(
        (GenerateRequest, {"token_ids": [5], "logprobs": "none", **fields})
        for fields in ({"top_logprobs": 1}, {"prompt_logprobs": True})
    ),
    (
        GenerateRequest,
        {"token_ids": [5], "prompt_logprobs": True, "sampling": {"max_tokens": 0, "n": 2}},
    ),
    (GenerateRequest, {"token_ids": [5], "prompt_logprobs": False, **sampling(max_tokens=0)}),
    *((PauseRequest, {"deadline_seconds": value}) for value in (True, "1", float("nan"))),
    (PauseRequest, {"ttl_seconds": float("nan")}),
    (PauseRequest, {"generation": True}),
    *((SleepRequest, {"level": value}) for value in (True, 1.0, "1", 3)),
    (PauseRequest, {"mode": "freeze"}),
    (SleepRequest, {"tags": ["heap"]}),
    *((AbortRequest, body) for body in ({"all": 1}, {})),
    (StageRequest, {"epoch": True, "version": 1, **CHECKPOINT}),
    (StageRequest, {"epoch": 1, "version": "1", **CHECKPOINT}),
    (StageRequest, {"epoch": 1, "version": 1, "source": {}}),
    (CommitRequest, {"epoch": 1, "version": True}),
    (CommitRequest, {"epoch": 1, "version": 1, "in_flight": "Hope"}),
    (RequireRequest, {"epoch": 1, "min_version": True}),
]


@pytest.mark.parametrize(("model", "body"), MISTAKES, ids=[str(body)[:60] for _, body in MISTAKES])
def test_a_value_of_another_type_is_refused(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(body)


def test_whole_numbers_go_where_fractions_do() -> None:
    body = sampling(temperature=1, top_p=1, logit_bias={"0": -100, "77": 1.5})
    request = GenerateRequest.model_validate({**body, "deadline_seconds": 5})
    assert request.sampling.logit_bias == {0: -100, 77: 1.5}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (StopMatch(token_id=2), {"token_id": 2}),
        (StopMatch(text="."), {"text": "."}),
        (WeightsSource(path="v1"), {"path": "v1"}),
        (WeightsSource.model_validate({"checkpoint": {}}), {"checkpoint": {}}),
    ],
    ids=["stop id", "stop string", "path", "checkpoint"],
)
def test_of_alternatives_only_the_one_is_shown(value: BaseModel, shown: dict[str, Any]) -> None:
    assert TypeAdapter(type(value)).dump_python(value, mode="json") == shown
    assert type(value).model_validate(shown) == value


@pytest.mark.parametrize("logprobs", [None, (), (-0.5,)], ids=["unwanted", "none yet", "one"])
def test_unwanted_logprobs_are_left_out(logprobs: tuple[float, ...] | None) -> None:
    output = GenerateOutput(
        index=0,
        token_ids=(5,) if logprobs else (),
        logprobs=logprobs,
        stop_reason=StopReason.LENGTH,
        weights=(),
    )
    shown = output.model_dump()
    assert ("logprobs" in shown) is (logprobs is not None)
    assert {"stop_match", "abort_reason"} <= shown.keys()
    assert GenerateOutput.model_validate(shown) == output
