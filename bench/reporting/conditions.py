"""How and where a table was measured: the exact command, the machine, its load."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime

from bench.options import Options
from tests.support.engine.engine_kinds import KINDS

from .figures import Result

QUIET = 2.0
"""A load average above this marks a table as noisy."""


def load() -> float:
    return os.getloadavg()[0]


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
    """The conditions of a measurement; made at its end, with the load at its beginning."""

    command: str
    load_before: float
    load_after: float = field(default_factory=load)
    machine: str = field(default_factory=machine)
    date: str = field(default_factory=today)

    @property
    def noisy(self) -> bool:
        return max(self.load_before, self.load_after) > QUIET

    def sentences(self) -> list[str]:
        loads = f"load average {self.load_before:.1f} before and {self.load_after:.1f} after"
        said = [f"Measured {self.date} on {self.machine}; {loads}."]
        if self.noisy:
            said.append(
                f"NOISY: the load average was above {QUIET:g} (the benchmark's own load counts, too)."
                " Trust the ratios more than the absolute figures, and neither to the last digit."
            )
        return said
