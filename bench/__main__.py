"""`python -m bench [NAME…] [--quick] [--runs N] [--write]`."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from localkube import ClusterError

from . import tables
from .figures import Options, Result, Verdict

COMMANDS = {
    path.stem: path for path in sorted((Path(__file__).parent / "commands").glob("[a-z]*.py"))
}


def main(argv: Sequence[str]) -> int:
    """Measure what is asked for and return the exit status."""
    arguments = _parser().parse_args(argv)
    # As the Makefile does: threads that fight for busy cores make an engine ten times slower.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Of what the local cluster grants its programs in Go, thousands of pods leave no room: their garbage collectors
    # would take more than half of the cores, again and again for little.
    os.environ.setdefault("GOMEMLIMIT", "6GiB")
    try:
        return _measure_all(arguments)
    except ClusterError as error:
        sys.stderr.write(f"python -m bench: {error}\n")
        return 2


def _measure_all(arguments: argparse.Namespace) -> int:
    options = Options(arguments.quick, arguments.runs, arguments.pools, arguments.replicas)
    missed, before = False, tables.others_share(quick=options.quick)
    for name in arguments.name or COMMANDS:
        print(f"{name}: {_summary(name)}", flush=True)
        began = time.monotonic()
        for result in _results(name, options):
            took = time.monotonic() - began
            after = tables.others_share(quick=options.quick)
            table = tables.markdown(
                result, tables.Conditions(tables.command(result, options), before, after)
            )
            print(f"\n{table}\nTook {took:.0f} s.\n", flush=True)
            if arguments.write:
                tables.write_section(f"{result.name} {result.part}".strip(), table)
            missed |= any(each.verdict is Verdict.MISSED for each in result.figures)
            before, began = after, time.monotonic()
    return int(missed)


def _results(name: str, options: Options) -> Iterable[Result]:
    outcome = importlib.import_module(f".commands.{name}", __package__).run(options)
    return [outcome] if isinstance(outcome, Result) else outcome


def _summary(name: str) -> str:
    """Return the first line of a command's file without an import of it."""
    said = ast.get_docstring(ast.parse(COMMANDS[name].read_text()))
    assert said is not None, f"{COMMANDS[name]} does not say what it is"
    return said.partition("\n")[0]


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:13} {_summary(name)}" for name in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"Measure, and compare with a baseline measured in the same run.\n\n{listed}",
        epilog="Exit status 1: at least one goal was missed; 2: it can't be measured here.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="*", type=_name, metavar="NAME", help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller loads")
    parser.add_argument("--runs", type=_positive, help="rounds to measure; five make a verdict")
    parser.add_argument("--pools", type=_positive, help="of reconcile; default: 200, 50 if quick")
    parser.add_argument("--replicas", type=_positive, help="of each pool of reconcile; default: 4")
    parser.add_argument("--write", action="store_true", help="also update docs/benchmarks.md")
    return parser


def _name(word: str) -> str:
    if word not in COMMANDS:
        raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(COMMANDS)}")
    return word


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"give a whole number of at least 1, not {word!r}")
    return int(word)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
