"""How much to measure, as the command line asks for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """What a benchmark is asked for.

    `runs`: rounds of everything that is repeated; None leaves it to the benchmark. `pools`, `replicas`: of
    `reconcile`; None leaves them to it.
    """

    quick: bool = False
    runs: int | None = None
    pools: int | None = None
    replicas: int | None = None

    def count(self, whole: int, quick: int) -> int:
        """Return how often to repeat: as asked, else `whole`, or `quick` with --quick."""
        return self.runs or (quick if self.quick else whole)

    def words(self) -> str:
        """Return the flags that ask for this; empty for the defaults."""
        numbers = {"runs": self.runs, "pools": self.pools, "replicas": self.replicas}
        given = (f"--{name} {value}" for name, value in numbers.items() if value is not None)
        return " ".join((*(["--quick"] if self.quick else ()), *given))
