"""What a declared lack refuses, and that nothing else is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_worker.engine import EngineRequest, InvalidRequest
from rollout_worker.requests.admission_checks import check_capabilities
from rollout_worker.schemas import SAMPLING_FIELDS, Capabilities, LogprobsOf, SamplingParams

ABLE: dict[str, Any] = {
    "logprobs": ("sampling", "raw"),
    "seed": True,
    "priority": True,
    "stop_strings": True,
    "in_flight": ("Drain",),
    "sleep_levels": (1,),
    "memory_release": True,
    "prefix_cache": True,
    "cache_salt": True,
}
EVERYTHING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "min_tokens": 1,
    "logit_bias": {3: 1.0},
    "stop_token_ids": (4,),
    "stop": ("x",),
    "seed": 1,
}


def request(logprobs: LogprobsOf | None = "sampling", **fields: Any) -> EngineRequest:
    outer = {name: fields.pop(name) for name in ("priority", "cache_salt") if name in fields}
    return EngineRequest("r", (1,), SamplingParams(**fields), logprobs, **outer)


def refused(asked: EngineRequest, **lacks: Any) -> str | None:
    try:
        check_capabilities(asked, Capabilities(**{**ABLE, **lacks}))
    except InvalidRequest as error:
        return error.field
    return None


@pytest.mark.parametrize("kind", ["sampling", "raw", None])
def test_an_able_engine_gets_everything(kind: LogprobsOf | None) -> None:
    assert refused(request(kind, **EVERYTHING, priority=1, cache_salt="s")) is None


@pytest.mark.parametrize(
    ("fields", "lacks", "field"),
    [
        ({"top_p": 0.9}, {"sampling": ("top_k",)}, "sampling.top_p"),
        ({"stop": ("x",)}, {"stop_strings": False}, "sampling.stop"),
        ({"seed": 0}, {"seed": False}, "sampling.seed"),
        ({"priority": -1}, {"priority": False}, "priority"),
        ({"cache_salt": ""}, {"cache_salt": False}, "cache_salt"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_lack_is_refused_by_name(fields: Any, lacks: Any, field: str) -> None:
    assert refused(request(**fields), **lacks) == field
    assert refused(request(), **lacks) is None


@pytest.mark.parametrize("other", ["raw", "sampling"])
@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3}, True),
        ({"ignore_eos": True, "stop_token_ids": (3,), "max_tokens": 3}, True),
        ({"temperature": 0.5}, False),
        ({"top_k": 3}, False),
        ({"temperature": 0.0, "presence_penalty": 0.5}, False),
        ({"min_tokens": 2}, False),
    ],
    ids=str,
)
def test_the_other_kind_goes_where_both_are_the_same(
    fields: dict[str, Any], same: bool, other: LogprobsOf
) -> None:
    mine: LogprobsOf = "sampling" if other == "raw" else "raw"
    assert (refused(request(other, **fields), logprobs=(mine,)) is None) is same
    assert refused(request(mine, **fields), logprobs=(mine,)) is None
    assert refused(request(None, **fields), logprobs=(mine,)) is None


def test_sampling_logprobs_of_some_fields_only() -> None:
    lacks = {"sampling_logprobs": ("temperature",)}
    assert refused(request(temperature=0.5), **lacks) is None
    assert refused(request(top_p=0.5), **lacks) == "logprobs"
    assert refused(request("raw", top_p=0.5), **lacks) is None
    assert refused(request(stop_token_ids=(3,)), **lacks) is None


def test_every_field_of_sampling_is_declared_somewhere() -> None:
    elsewhere = {"max_tokens", "n", "seed", "stop"}
    assert set(SAMPLING_FIELDS) | elsewhere == set(SamplingParams.model_fields)


@pytest.mark.parametrize("kind", ["sampling", "raw"])
def test_an_engine_that_records_none_has_no_logprobs_of_any_kind(kind: LogprobsOf) -> None:
    """Not even where both kinds are the same numbers."""
    assert refused(request(kind), logprobs=()) == "logprobs"
    assert refused(request(None), logprobs=()) is None


@pytest.mark.parametrize(
    ("kinds", "fix"), [(("sampling", "raw"), "'raw'"), (("sampling",), "'none'")]
)
def test_the_way_out_is_one_that_there_is(kinds: tuple[LogprobsOf, ...], fix: str) -> None:
    able = Capabilities(**{**ABLE, "logprobs": kinds, "sampling_logprobs": ()})
    with pytest.raises(InvalidRequest) as caught:
        check_capabilities(request(temperature=0.5), able)
    assert fix in str(caught.value)
