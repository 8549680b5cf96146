"""Where outputs end, in addition to what the contract suite asks of every engine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.engine import InvalidRequest
from rollout_worker.engines.request_checks import StopChecker
from rollout_worker.schemas import SamplingParams, StopMatch
from tests.support.engine.engines import PROMPT, request, run, serving
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels


async def test_without_a_tokenizer_ids_are_served_and_stop_strings_refused(
    tiny_models: TinyModels, reference: Reference, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.model(1), folder, ignore=shutil.ignore_patterns("tokenizer*"))
    async with serving(folder) as (engine, _):
        assert not engine.capabilities.stop_strings
        with pytest.raises(InvalidRequest, match="no tokenizer") as refused:
            engine.validate(request(stop=["x"]))
        assert refused.value.field == "sampling.stop"
        output = await run(engine, request())
    assert output.token_ids == reference.greedy(PROMPT, 8)


def pieces(*parts: bytes) -> Any:
    """A decoder of byte pieces, as byte-level tokenizers have it; ids count from 0."""

    def decode(tokens: Sequence[int]) -> str:
        return b"".join(parts[token] for token in tokens).decode(errors="replace")

    return decode


def checked(
    decode: Any, count: int, *stop: str, min_tokens: int = 0
) -> tuple[int, StopMatch | None]:
    """Feed ids 0.. and return where it stopped and what matched."""
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=count)
    checker = StopChecker(params, frozenset(), decode)
    for token in range(count):
        verdict = checker.check_token(token, token + 1)
        if verdict is not None:
            return token, verdict[1]
    raise AssertionError("never ended")


@pytest.mark.parametrize(
    ("parts", "stop", "end", "match"),
    [
        ((b"ab", b"cd", b"ef"), ("bc",), 1, "bc"),
        ((b"ab", b"cd", b"ef"), ("abcdef",), 2, "abcdef"),
        ((b"ab", b"cd", b"ef"), ("e", "cd", "bcd"), 1, "bcd"),
        ((b"x", b"\xe2", b"\x82", b"\xac", b"y"), ("\u20ac",), 3, "\u20ac"),
        ((b"x", b"\xe2\x82", b"\xac!", b"y"), ("\u20ac!y",), 3, "\u20ac!y"),
        ((b"\xff", b"\xff", b"\xff", b"\xff", b"stop"), ("stop",), 4, "stop"),
        ((b"\xff", b"\xff", b"\xff", b"\xe2", b"\x82", b"\xac"), ("\u20ac",), 5, "\u20ac"),
        ((b"stop\xe2", b"\x82", b"\xac"), ("stop",), 0, "stop"),
        ((b"a", b"", b"b", b"c"), ("ab",), 2, "ab"),
        ((b"a", b"b", b"c"), ("z",), 2, None),
    ],
    ids=[
        "across",
        "whole",
        "first to begin",
        "split",
        "split 2",
        "bytes",
        "split after bytes",
        "before a half",
        "empty",
        "none",
    ],
)
def test_strings_over_tokens(
    parts: tuple[bytes, ...], stop: tuple[str, ...], end: int, match: str | None
) -> None:
    expected = None if match is None else StopMatch(text=match)
    assert checked(pieces(*parts), len(parts), *stop) == (end, expected)


@given(
    parts=st.lists(
        st.sampled_from(
            [b"a", b"b ", b"\xe2", b"\x82", b"\xac", b"\x82\xac", b"\xf0\x9f", b"\xff"]
        ),
        min_size=1,
        max_size=24,
    ),
    stop=st.sampled_from(["a", "ab", "\u20ac", "\u20aca", "a\u20ac\u20ac", "b \u20ac"]),
)
def test_a_string_ends_the_output_at_the_token_that_completes_it(
    parts: list[bytes], stop: str
) -> None:
    decode = pieces(*parts)
    ends = (n for n in range(len(parts)) if stop in decode(range(n + 1)))
    expected = next(((n, StopMatch(text=stop)) for n in ends), (len(parts) - 1, None))
    assert checked(decode, len(parts), stop) == expected


def test_a_string_before_min_tokens_does_not_stop_later() -> None:
    parts = (b"ab", b"c", b"d", b"e", b"ab")
    found = checked(pieces(*parts), 5, "ab", "longerthanall", min_tokens=2)
    assert found == (4, StopMatch(text="ab"))
