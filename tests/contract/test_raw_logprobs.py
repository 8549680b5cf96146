"""The same against a worker that was started to record raw logprobs.

`make soak` only, a start of each engine: every day tests/engine/test_vllm_live.py has it of vLLM, which
records one kind at a time; the others take the kind from the request, and are asked for both.
"""

from __future__ import annotations

import pytest

from tests.support.engine.contracts import Fleet, Served
from tests.support.engine.judging import TEMPERATURES, check
from tests.support.engine.reference import Reference

pytestmark = pytest.mark.soak


@pytest.fixture
def raw_worker(fleet: Fleet) -> Served:
    worker = fleet.worker("--logprobs", "raw")
    worker.heal()
    return worker


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_raw_logprobs(
    raw_worker: Served, reference: dict[int, Reference], temperature: float
) -> None:
    check(raw_worker, "raw", temperature, reference[1])


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_sampling_logprobs_where_raw_ones_are_the_default(
    raw_worker: Served, reference: dict[int, Reference], temperature: float
) -> None:
    check(raw_worker, "sampling", temperature, reference[1])
