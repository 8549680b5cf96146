"""The parts of the SGLang adapter that need no SGLang."""

from __future__ import annotations

import pytest

from rollout_worker.engine import EngineRequest, InvalidRequest
from rollout_worker.engines.sglang.checks import check
from rollout_worker.engines.sglang.model import Model
from rollout_worker.schemas import SamplingParams
from rollout_worker.weights import Layout

MODEL = Model(None, Layout({}, {}, {}), frozenset({2}), 64, 100, "float32", 0)


def asked(temperature: float) -> EngineRequest:
    sampling = SamplingParams(temperature=temperature, max_tokens=4)
    return EngineRequest("r", (5,), sampling, "sampling")


@pytest.mark.parametrize("temperature", [9e-7, 1e-300])
def test_what_sglang_would_draw_at_another_temperature_is_refused(temperature: float) -> None:
    """It sets such a temperature to 1 and `top_k`, which our sampler does not read, to 1."""
    with pytest.raises(InvalidRequest) as refused:
        check(asked(temperature), MODEL)
    assert refused.value.field == "sampling.temperature"


@pytest.mark.parametrize("temperature", [0, 1e-6, 100])
def test_what_sglang_draws_as_asked_passes(temperature: float) -> None:
    check(asked(temperature), MODEL)
