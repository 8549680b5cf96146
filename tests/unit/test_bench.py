"""What benchmarks make of what they saw: pauses from arrivals, sections of the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.__main__ import merged
from bench.observed import Streams
from bench.results import Figure, Result


def test_a_pause_is_the_longest_time_in_which_no_stream_got_anything() -> None:
    streams = Streams()
    for arrivals in ([1.0, 2.0, 3.0, 7.5], [1.5, 2.5, 3.5, 7.0]):
        streams.open().extend(arrivals)
    assert streams.longest(3.2, 8.0) == pytest.approx(3.5)
    assert streams.longest(3.2, 4.5) == pytest.approx(1.0), "it may last until the end"
    assert streams.usual(5.0) == pytest.approx([1.0] * 4)
    assert len(streams.seen(7.2)) == 1, "the second has got nothing since"


def test_parts_have_sections_of_their_own() -> None:
    def result(part: str, value: float) -> Result:
        return Result("engines", f"of {part}", [Figure("start", "s", value)], part=part)

    page = merged("# Page\n", result("hf", 1))
    page = merged(page, result("vllm", 2))
    page = merged(page, result("hf", 3))
    assert page.count("## of hf") == page.count("## of vllm") == 1
    assert "| start | 3 |" in page
    assert "| start | 1 |" not in page
    assert "`ROLLOUT_ENGINES=hf python -m bench engines`" in page
