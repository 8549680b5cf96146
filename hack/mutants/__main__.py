"""`make mutants`: sample, run, report; see the package."""

from __future__ import annotations

import argparse
import difflib
import random
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .edits import Edit, compiles, edits_of
from .trials import ROOT, Bench, Broken, Outcome, Trial, bench

TABLE = Path(__file__).with_name("modules.toml")
SLOWER = 5.0
"""A mutant whose tests take so many times as long as they do without it has been noticed."""


@dataclass(frozen=True, slots=True)
class Module:
    """A module to break, the tests that hold it, and mutants that change nothing."""

    path: str
    tests: tuple[str, ...]
    equivalent: frozenset[str]

    def changes(self) -> list[tuple[str, Edit]]:
        """Return all changes, each with the first line that it alters as it reads afterwards."""
        source = (ROOT / self.path).read_text()
        return [(_changed_line(source, edit), edit) for edit in edits_of(source)]

    def mutants(self) -> list[Edit]:
        """Return all changes but those that are listed as equivalent."""
        source = (ROOT / self.path).read_text()
        found = [edit for line, edit in self.changes() if line not in self.equivalent]
        return [edit for edit in found if compiles(edit.apply(source))]


def _changed_line(source: str, edit: Edit) -> str:
    lines = zip(source.splitlines(), edit.apply(source).splitlines(), strict=False)
    return next((new.strip() for old, new in lines if old != new), "")


def table() -> dict[str, Module]:
    """Read `modules.toml`."""
    document = tomllib.loads(TABLE.read_text())
    modules = {}
    for path, tests in document["modules"].items():
        same = (e["becomes"] for e in document.get("equivalent", ()) if e["module"] == path)
        modules[path] = Module(path, tuple(tests), frozenset(same))
    return modules


def diff(path: str, before: str, after: str) -> str:
    """A mutant for a person."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), path, path, n=1, lineterm=""
    )
    return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def judge(module: Module, sample: int, seed: int, on: Bench) -> tuple[int, list[str]]:
    """Run the tests on a sample of the module's mutants; return how many, and who survived."""
    found = module.mutants()
    chosen = random.Random(f"{seed} {module.path}").sample(found, min(sample, len(found)))
    source = (ROOT / module.path).read_text()
    seconds = 10 + SLOWER * on.baseline(module.path, module.tests)
    trials = [Trial(module.path, e.apply(source), module.tests, seconds) for e in chosen]
    survivors = []
    ended: Outcome
    for trial, ended in on.run(trials):
        if ended == "survived":
            survivors.append(diff(module.path, source, trial.text))
    return len(trials), sorted(survivors)


def main(argv: Sequence[str] | None = None) -> int:
    """Break the modules and print what the tests noticed; 1: less than `--least` percent."""
    parser = argparse.ArgumentParser(prog="mutants", description="break the code on purpose")
    parser.add_argument("modules", nargs="*", help="parts of paths; default: all of modules.toml")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="at once (%(default)s)")
    parser.add_argument("--least", type=float, default=85.0, help="percent to kill (%(default)g)")
    options = parser.parse_args(argv)
    known = table()
    chosen = [p for p in known if not options.modules or any(m in p for m in options.modules)]
    total = killed = 0
    with bench(options.jobs) as on:
        for path in chosen:
            count, survivors = judge(known[path], options.sample, options.seed, on)
            total, killed = total + count, killed + count - len(survivors)
            print(f"{path:32} {count - len(survivors):4} of {count:4} killed", flush=True)
            for each in survivors:
                print(each, flush=True)
    share = 100 * killed / max(total, 1)
    print(f"{'all':32} {killed:4} of {total:4} killed, {share:.1f} % (seed {options.seed})")
    return 0 if share >= options.least else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Broken as error:
        sys.exit(str(error))
