"""How and where a table was measured: the exact command, the machine, and what others did to it.

The benchmark's own load says nothing against it, so others are measured when nothing of the benchmark runs:
just before it starts, and when its processes have ended.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bench.options import Options
from tests.support.engine.engine_kinds import KINDS

from .figures import Result

QUIET = 0.1
"""A machine of which others use more than this share is noisy."""

LOOKS, LOOK_SECONDS, QUICK_LOOK_SECONDS = 5, 1.0, 0.1
"""The least of so many looks counts: what a benchmark has just ended still cleans up."""


def others_share(*, quick: bool = False) -> float:
    """Return the share of all cores, 0 to 1, that is in use while this process sleeps."""
    seconds = QUICK_LOOK_SECONDS if quick else LOOK_SECONDS
    return min(_busy_share(seconds) for _ in range(LOOKS))


def _busy_share(seconds: float) -> float:
    before = _ticks()
    time.sleep(seconds)
    busy, idle = (now - then for now, then in zip(_ticks(), before, strict=True))
    return busy / (busy + idle)


def _ticks() -> tuple[int, int]:
    """Return the busy and idle ticks of all cores since the machine started (proc(5))."""
    found = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = found[3] + found[4]
    return sum(found) - idle, idle


def machine() -> str:
    """Describe the machine in words that do not name it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release().split('-')[0]}"


def command(result: Result, options: Options) -> str:
    part = f"ROLLOUT_ENGINES={result.part} " if result.part in KINDS else ""
    return f"{part}python -m bench {result.name} {options.words()}".rstrip()


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of a measurement, with others' share of the machine just before and just after it."""

    command: str
    others_before: float
    others_after: float
    machine: str = field(default_factory=machine)
    date: str = field(default_factory=today)

    @property
    def noisy(self) -> bool:
        return max(self.others_before, self.others_after) > QUIET

    def sentences(self) -> list[str]:
        shares = (
            f"{self.others_before:.0%} of them just before and {self.others_after:.0%} just after"
        )
        said = [f"Measured {self.date} on {self.machine}; others used {shares}."]
        if self.noisy:
            said.append(
                f"NOISY: others used more than {QUIET:.0%} of the cores."
                " Trust the ratios more than the absolute figures, and neither to the last digit."
            )
        return said
