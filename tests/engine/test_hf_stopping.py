"""Where outputs end: length, EOS, stop ids and strings, min_tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.engine import InvalidRequest
from rollout_worker.engines.model_folder import decode_tokens, load_tokenizer
from rollout_worker.engines.request_checks import StopChecker
from rollout_worker.schemas import SamplingParams, StopMatch, StopReason
from tests.support.engine.engines import PROMPT, request, run, serving
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels


def edited(folder: Path, tmp_path: Path, **generation: Any) -> Path:
    """Copy a model with another generation_config."""
    copy = tmp_path / "edited"
    shutil.copytree(folder, copy)
    (copy / "generation_config.json").write_text(json.dumps(generation))
    return copy


async def test_length(tiny_models: TinyModels) -> None:
    async with serving(tiny_models.model(1)) as (engine, _):
        output = await run(engine, request(max_tokens=3))
    assert (output.stop_reason, output.stop_match) == (StopReason.LENGTH, None)
    assert len(output.token_ids) == 3


async def test_no_max_tokens_runs_up_to_the_maximum_length(tiny_models: TinyModels) -> None:
    async with serving(tiny_models.model(1), max_length=40) as (engine, info):
        output = await run(engine, request(max_tokens=None))
        with pytest.raises(InvalidRequest, match="maximum length is 40") as refused:
            engine.validate(request(max_tokens=33))
    assert info.max_length == 40
    assert len(output.token_ids) == 32
    assert (refused.value.field, refused.value.status) == ("sampling.max_tokens", 413)


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("many", [False, True])
async def test_eos_of_generation_config(
    tiny_models: TinyModels, reference: Reference, tmp_path: Path, many: bool, ignore: bool
) -> None:
    greedy = reference.greedy(PROMPT, 8)
    folder = edited(
        tiny_models.model(1), tmp_path, eos_token_id=[greedy[5], greedy[3]] if many else greedy[3]
    )
    async with serving(folder) as (engine, info):
        output = await run(engine, request(ignore_eos=ignore))
    assert info.eos_token_ids == ({greedy[3], greedy[5]} if many else {greedy[3]})
    assert output.token_ids == (greedy if ignore else greedy[:4])
    if not ignore:
        assert output.stop_reason is StopReason.STOP
        assert output.stop_match == StopMatch(token_id=greedy[3])


async def test_stop_ids_hold_with_ignore_eos_and_the_last_token_may_match(
    tiny_models: TinyModels, reference: Reference
) -> None:
    greedy = reference.greedy(PROMPT, 8)
    async with serving(tiny_models.model(1)) as (engine, _):
        early = await run(engine, request(stop_token_ids=[greedy[2]]))
        last = await run(engine, request(stop_token_ids=[greedy[7]]))
    assert early.token_ids == greedy[:3]
    assert (early.stop_reason, early.stop_match) == ("stop", StopMatch(token_id=greedy[2]))
    assert (last.stop_reason, last.stop_match) == ("stop", StopMatch(token_id=greedy[7]))


async def test_min_tokens_withholds_stops(tiny_models: TinyModels, reference: Reference) -> None:
    greedy = reference.greedy(PROMPT, 8)
    async with serving(tiny_models.model(1)) as (engine, _):
        wanted = request(stop_token_ids=[greedy[2]], min_tokens=6, max_tokens=30)
        output = await run(engine, wanted)
    assert output.token_ids[:2] == greedy[:2]
    assert greedy[2] not in output.token_ids[:6]


async def test_stop_strings(tiny_models: TinyModels, reference: Reference) -> None:
    greedy = reference.greedy(PROMPT, 12)
    async with serving(tiny_models.model(1)) as (engine, _):
        # From within the text of one token into the next, so that no id could match.
        tokenizer = load_tokenizer(tiny_models.model(1))
        text, upto = (decode_tokens(tokenizer, ids, special=False) for ids in (greedy, greedy[:5]))
        stop = text[len(upto) - 1 : len(upto) + 2]
        end = next(
            n for n in range(13) if stop in decode_tokens(tokenizer, greedy[:n], special=False)
        )
        output = await run(engine, request(max_tokens=12, stop=["absent", stop]))
        late = await run(engine, request(max_tokens=12, stop=[stop], min_tokens=12))
    assert output.token_ids == greedy[:end]
    assert (output.stop_reason, output.stop_match) == ("stop", StopMatch(text=stop))
    assert late.token_ids == greedy


async def test_without_a_tokenizer_ids_are_served_and_stop_strings_refused(
    tiny_models: TinyModels, reference: Reference, tmp_path: Path
) -> None:
    folder = edited(tiny_models.model(1), tmp_path, eos_token_id=2)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    async with serving(folder) as (engine, _):
        assert not engine.capabilities.stop_strings
        with pytest.raises(InvalidRequest, match="no tokenizer") as refused:
            engine.validate(request(stop=["x"]))
        assert (refused.value.field, refused.value.status) == ("sampling.stop", 422)
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
