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
        quick = "--quick" if self.quick else ""
        runs = "" if self.runs is None else f"--runs {self.runs}"
        pools = "" if self.pools is None else f"--pools {self.pools}"
        replicas = "" if self.replicas is None else f"--replicas {self.replicas}"
        return " ".join(filter(None, (quick, runs, pools, replicas)))
