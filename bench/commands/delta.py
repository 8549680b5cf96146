"""What differs between two versions: found and applied, against plain copies and plain TCP of all bytes.

Words of two bytes change at uniformly random places, which is the worst that sparse changes can be. One
thread does everything, span by span as a transfer does; the ways take turns, round by round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import numpy.typing as npt

from bench.options import Options
from bench.reporting.figures import Figure, Goal, Result, figure
from bench.rigs.pushing import over_loopback
from rollout_worker.transfer.delta import SPAN_BYTES, WAY, WORTH, apply, encode

DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)
"""Changed words; a step of reinforcement learning changes about the one in the middle."""
TYPICAL = 0.01
SMALLER = 45
ENCODE_SHARE, APPLY_SHARE = 0.5, 3.5
"""Of the rate of a plain copy, which the typical density is to reach."""

Words = npt.NDArray[np.uint16]


@dataclass(slots=True)
class Took:
    """The rounds of one density, in seconds, and the bytes of its deltas."""

    encode: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)
    nbytes: int = 0

    @property
    def both(self) -> list[float]:
        """Finding and applying, one after the other; in a transfer they overlap."""
        return [sum(pair) for pair in zip(self.encode, self.apply, strict=True)]


class Pair:
    """A base, a new version of it, and memory that has the base."""

    def __init__(self, base: Words, density: float) -> None:
        draw = np.random.default_rng(1)
        self._base, self._new = base, base.copy()
        places = draw.choice(len(base), int(len(base) * density), replace=False)
        self._new[places] ^= draw.integers(1, 1 << 16, len(places), dtype=np.uint16)
        self._memory = base.copy()

    def measure(self, took: Took) -> None:
        """Find and apply what differs, once."""
        base, new, memory = (
            memoryview(words.data).cast("B") for words in (self._base, self._new, self._memory)
        )
        memory[:] = base
        spans = range(0, len(base), SPAN_BYTES)
        deltas: list[bytes] = []

        def find() -> None:
            for at in spans:
                made = encode(base[at : at + SPAN_BYTES], new[at : at + SPAN_BYTES])
                assert made is not None
                deltas.append(made)

        def write() -> None:
            for at, delta in zip(spans, deltas, strict=True):
                apply(delta, memory[at : at + SPAN_BYTES])

        took.encode.append(timed(find))
        took.apply.append(timed(write))
        took.nbytes = sum(map(len, deltas))
        assert memory == new


def run(options: Options) -> Result:
    """Measure all densities; the quick run has little memory, which a cache may hold."""
    base = np.random.default_rng(0).integers(
        0, 1 << 16, (16 if options.quick else 128) << 20, dtype=np.uint16
    )
    target, copies, loopback = base.copy(), list[float](), list[float]()
    took = {density: Took() for density in DENSITIES}
    for density in DENSITIES:
        pair = Pair(base, density)
        for _ in range(options.count(10, 2)):
            copies.append(timed(lambda: np.copyto(target, base)))
            pair.measure(took[density])
            loopback.append(over_loopback(base.nbytes))
    sizes = ", ".join(
        f"{density:.1%}: {base.nbytes / each.nbytes:.1f} times" for density, each in took.items()
    )
    small = base.nbytes / took[TYPICAL].nbytes
    notes = [
        f"{base.nbytes >> 20} MiB of random words, found and applied by {WAY}. A delta is smaller than what it covers: {sizes}; the goal is "
        f"{SMALLER} times at {TYPICAL:.0%}: {'met' if small >= SMALLER else 'MISSED'}.",
        f"Plain copies: {base.nbytes / 1e9 / median(copies):.1f} GB/s; over loopback "
        f"{base.nbytes / 1e9 / median(loopback):.1f} GB/s, the receiver's copy with it.",
        "Where finding and applying take as long as loopback, a delta pays over any network; it is sent up to "
        f"{WORTH:.0%} of the bytes, {WORTH / 2:.1%} of the words.",
    ]
    return Result(
        "delta", "What differs between two versions", _figures(took, copies, loopback), notes
    )


def _figures(took: dict[float, Took], copies: list[float], loopback: list[float]) -> list[Figure]:
    copy, figures = median(copies), []
    for density, each in took.items():
        bound = density == TYPICAL
        figures += [
            figure(
                f"{density:.1%} changed: find",
                each.encode,
                baseline=copies,
                against="a plain copy",
                goal=Goal(copy / ENCODE_SHARE) if bound else None,
            ),
            figure(
                "… apply",
                each.apply,
                baseline=copies,
                against="a plain copy",
                goal=Goal(copy / APPLY_SHARE) if bound else None,
            ),
            figure("… both", each.both, baseline=loopback, against="plain loopback"),
        ]
    return figures


def timed(do: Callable[[], None]) -> float:
    """Return how many seconds something takes."""
    began = time.perf_counter()
    do()
    return time.perf_counter() - began
