"""Native code and numpy never differ: neither in a byte of a delta nor in a verdict.

Where the library was not built, as on a plain checkout, there is nothing to compare, and numpy does it; `make
wheel` fails without the library.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_common.transfer import delta_native as native
from rollout_common.transfer.delta import BLOCK_BYTES, BLOCK_WORDS, DeltaError
from tests.support.unit.delta_ways import (
    EDGES,
    SIZES,
    WAYS,
    Run,
    Way,
    built,
    every_way,
    lie,
    made,
)


def verdict(way: Way, delta: Run, base: bytes) -> tuple[str, bytes]:
    """What a way says of a delta, and what has become of the memory, which lies at an odd address."""
    around = bytearray(b"\7" * 33 + base + b"\7" * 32)
    try:
        way.apply(delta, memoryview(around)[33 : 33 + len(base)])
    except DeltaError as error:
        return str(error), bytes(around)
    return "applied", bytes(around)


def same_verdict(delta: Run, base: bytes) -> str:
    verdicts = {verdict(way, delta, base) for way in WAYS.values()}
    assert len(verdicts) == 1
    said, around = verdicts.pop()
    assert around[:33] + around[33 + len(base) :] == b"\7" * 65, "it wrote outside"
    assert said == "applied" or around[33:-32] == base, "it wrote, and then refused"
    return said


@built
@given(
    size=st.sampled_from([*SIZES, *EDGES, 127, 128, 129, 3 * BLOCK_BYTES + 127]),
    share=st.sampled_from([0.0, 0.0001, 0.01, 0.05, 0.3, 1.0]),
    seed=st.integers(0, 1 << 32),
    most=st.sampled_from([None, -1.0, 0.0, 0.001, 0.02, 0.1, 2.0, 9.0]),
    shift=st.integers(0, 3),
)
def test_both_ways_make_the_same_delta(
    size: int, share: float, seed: int, most: float | None, shift: int
) -> None:
    draw = np.random.default_rng(seed)
    base = draw.integers(0, 256, size + shift, dtype=np.uint8)
    new = base ^ (draw.random(size + shift) < share).astype(np.uint8)
    before, after = (memoryview(each.data)[shift:] for each in (base, new))  # at any address
    made = [way.encode(before, after, most) for way in WAYS.values()]
    assert made[0] == made[1]
    if made[0] is not None:
        assert same_verdict(made[0], bytes(before)) == "applied"
        assert same_verdict(memoryview(b"_" + made[0])[1:], bytes(before)) == "applied"


@built
@pytest.mark.parametrize("words", [1, 63, 64, 65, 200, BLOCK_WORDS + 70])
def test_both_ways_give_up_at_the_same_word(words: int) -> None:
    base, new = bytes(2 * words), b"\1" * (2 * words)
    for most in (words - 1, words):
        made = [way.encode(base, new, 2 * most / words) for way in WAYS.values()]
        assert made[0] == made[1]
        assert (made[0] is None) == (most < words)


@built
@given(st.data())
def test_of_what_a_liar_sends_both_ways_think_the_same(data: st.DataObject) -> None:
    """A good delta in which something is other than it was, mostly at the places that steer."""
    size = data.draw(st.sampled_from([0, 1, 2, 200, 201, BLOCK_BYTES, 2 * BLOCK_BYTES + 31]))
    places = data.draw(st.dictionaries(st.integers(0, 1 << 20), st.integers(1, 255), max_size=9))
    base, new = made(size, places if size else {})
    delta = bytearray(WAYS["numpy"].encode(base, new) or b"")
    number = st.sampled_from([0, 1, 2, 3, 255, 0xFFFF, 0x10000, 0x10001, 2**31, 2**32 - 1])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(delta)))
        if data.draw(st.booleans()):
            at = at // 4 * 4
            delta[at : at + 4] = struct.pack("<I", data.draw(number))
        else:
            delta[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    same_verdict(bytes(delta), base)


@built
@given(
    table=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=4),
    offsets=st.lists(st.sampled_from([0, 1, 2, 3, 50, 0xFFFE, 0xFFFF]), max_size=8),
    size=st.sampled_from([0, 3, 4, 7, 102, BLOCK_BYTES, 2 * BLOCK_BYTES + 3]),
)
def test_of_any_table_both_ways_think_the_same(
    table: list[tuple[int, int]], offsets: list[int], size: int
) -> None:
    flat = [number for row in table for number in row]
    same_verdict(lie(*flat, offsets=tuple(offsets)) + b"\1" * (size % 2), bytes(size))


@every_way
def test_what_changes_while_it_is_compared_spoils_nothing_but_the_answer(way: Way) -> None:
    """A trainer may write into its memory too early: hashes tell that later, nothing breaks here."""
    base = np.zeros(4 * BLOCK_WORDS, dtype=np.uint16)
    new, over = base.copy(), threading.Event()

    def disturb() -> None:
        while not over.is_set():
            new[:] = 1
            new[:] = 0

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(200):
            found = way.encode(base.data.cast("B"), new.data.cast("B"), 0.5)
            if found is not None:
                way.apply(found, memoryview(bytearray(base.nbytes)))
    finally:
        over.set()
        thread.join()


@every_way
def test_memory_that_is_only_read_is_never_written(way: Way) -> None:
    base, new = made(200, {3: 1, 90: 2})
    delta = way.encode(base, new)
    assert delta is not None
    with pytest.raises(ValueError, match="read-only"):
        way.apply(delta, memoryview(base))
    assert (base, new) == made(200, {3: 1, 90: 2})


def test_a_library_that_is_not_there_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert native.load_library(tmp_path / "libdelta.so") is None
    assert not caplog.messages


def test_a_file_that_is_no_library_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "libdelta.so"
    broken.write_bytes(b"no ELF")
    assert native.load_library(broken) is None
    assert native.load_library(Path(sys.modules["_ctypes"].__file__ or "")) is None
    assert [text.split()[1:6] for text in caplog.messages] == [
        ["can't", "be", "used,", "numpy", "does"]
    ] * 2


@built
def test_a_library_of_older_code_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    path = Path(native.__file__).with_name("libdelta.so")
    assert native.load_library(path, native.ABI + 1) is None
    assert f"is of other code ({native.ABI})" in caplog.text


def test_a_plain_checkout_finds_and_applies_by_numpy(tmp_path: Path) -> None:
    package = Path(native.__file__).parents[1]
    ignored = shutil.ignore_patterns("libdelta.so", "__pycache__")
    shutil.copytree(package, tmp_path / "rollout_common", ignore=ignored)
    program = (
        "from rollout_common.transfer.delta import WAY, apply_delta, encode_delta;"
        "memory = bytearray(b'old!'); apply_delta(encode_delta(b'old!', b'new!'), memoryview(memory));"
        "print(WAY, memory.decode())"
    )
    said = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert said == "numpy new!\n"
