"""Deltas: whatever differs is found, whatever is written is exact, and lies are refused by name.

Native code and numpy go through the same.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_common.transfer.delta import BLOCK_BYTES, DeltaError
from tests.support.unit.delta_ways import EDGES, LIES, SIZES, Way, applied, every_way, lie, made


@every_way
@given(
    size=st.sampled_from(SIZES + EDGES),
    places=st.dictionaries(st.integers(0, 1 << 20), st.integers(1, 255), max_size=40),
)
def test_any_change_of_any_size_comes_out_bit_exact(
    way: Way, size: int, places: dict[int, int]
) -> None:
    base, new = made(size, places if size else {})
    assert applied(way, way.encode(base, new), base) == new


@every_way
@given(st.binary(max_size=400), st.data())
def test_any_two_runs_of_bytes_come_out_bit_exact(
    way: Way, base: bytes, data: st.DataObject
) -> None:
    new = data.draw(st.binary(min_size=len(base), max_size=len(base)))
    delta = way.encode(base, new)
    assert applied(way, delta, base) == new
    half = bytes(b if i % 3 else a for i, (a, b) in enumerate(zip(base, new, strict=True)))
    assert applied(way, delta, half) == new, "what is there in part becomes whole"


@every_way
@pytest.mark.parametrize("size", EDGES)
def test_the_words_at_the_edges_of_blocks_are_found(way: Way, size: int) -> None:
    edges = {0: 1, BLOCK_BYTES - 1: 1, BLOCK_BYTES: 1, size - 1: 1}
    base, new = made(size, edges)
    assert applied(way, way.encode(base, new), base) == new


@every_way
def test_what_is_equal_takes_four_bytes(way: Way) -> None:
    base, _ = made(3 * BLOCK_BYTES, {})
    assert way.encode(base, base) == bytes(4)


@every_way
def test_one_percent_of_the_words_is_45_times_smaller(way: Way) -> None:
    size = 16 * BLOCK_BYTES
    draw = random.Random(1)
    base = draw.randbytes(size)
    new = bytearray(base)
    for word in draw.sample(range(size // 2), size // 200):
        new[2 * word] ^= draw.randint(1, 255)
    delta = way.encode(base, bytes(new))
    assert delta is not None
    assert applied(way, delta, base) == new
    assert size >= 45 * len(delta)


@every_way
def test_a_delta_that_is_larger_than_it_may_be_is_not_made(way: Way) -> None:
    size = BLOCK_BYTES
    base, new = bytes(size), bytes([1, 0]) * (size // 8) + bytes(size - size // 4)
    delta = way.encode(base, new)
    assert delta is not None
    assert len(delta) == 4 + 8 + 4 * (size // 8)
    assert way.encode(base, new, 0.5) is not None
    assert way.encode(base, new, 0.49) is None
    assert way.encode(base, b"\1" * size, 1.0) is None, "it would be twice as large"


@every_way
def test_versions_of_different_sizes_have_no_delta(way: Way) -> None:
    with pytest.raises(ValueError, match="the base has 4 bytes, the new version 6"):
        way.encode(bytes(4), bytes(6))


@every_way
@pytest.mark.parametrize("what", LIES)
def test_a_delta_that_lies_is_refused_by_name_and_writes_nothing(way: Way, what: str) -> None:
    memory = bytearray(b"\7" * 200)
    with pytest.raises(DeltaError, match=what):
        way.apply(LIES[what], memoryview(memory))
    assert memory == b"\7" * 200


@every_way
def test_a_word_or_a_block_that_comes_twice_is_refused(way: Way) -> None:
    memory = bytearray(3 * BLOCK_BYTES)
    for twice in (lie(0, 2, offsets=(4, 4)), lie(1, 1, 0, 1, offsets=(0, 0))):
        with pytest.raises(DeltaError, match="not in order"):
            way.apply(twice, memoryview(memory))
    assert not any(memory)


@every_way
@given(st.binary(max_size=64), st.integers(0, 40))
def test_no_bytes_that_are_no_delta_do_harm(way: Way, noise: bytes, size: int) -> None:
    around = bytearray(b"\7" * (size + 20))
    inside = memoryview(around)[10 : 10 + size]
    try:
        way.apply(noise, inside)
    except DeltaError:
        assert around == b"\7" * len(around)
    assert around[:10] == around[-10:] == b"\7" * 10


@every_way
def test_a_delta_that_is_cut_anywhere_is_refused(way: Way) -> None:
    base, new = made(301, {3: 1, 90: 2, 300: 3})
    delta = way.encode(base, new)
    assert delta is not None
    for size in range(len(delta)):
        memory = bytearray(base)
        with pytest.raises(DeltaError):
            way.apply(delta[:size], memoryview(memory))
        assert memory == base
