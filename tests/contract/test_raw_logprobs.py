"""The same against a worker that was started to record raw logprobs."""

from __future__ import annotations

import pytest

from contracts import Served
from judging import TEMPERATURES, check
from reference import Reference


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_raw_logprobs(
    raw_worker: Served, reference: dict[int, Reference], temperature: float
) -> None:
    check(raw_worker, "raw", temperature, reference[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_sampling_logprobs_where_raw_ones_are_the_default(
    raw_worker: Served, reference: dict[int, Reference], temperature: float
) -> None:
    check(raw_worker, "sampling", temperature, reference[1], ["plain", "top_p", "all"])
