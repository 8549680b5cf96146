"""`python -m bench [NAME…] [--quick] [--runs N] [--json FILE] [--write]`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from . import results
from .results import Options, Result

NAMES = (
    *("startup", "reaction", "reconcile", "polling", "conversation", "hf", "engines", "vllm"),
    "sglang",
    *("balancer", "balancing", "client"),
)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
_MARK = "<!-- {}: {} -->"


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    options = Options(arguments.quick, arguments.runs, arguments.dtype)
    found = []
    for name in arguments.name or NAMES:
        print(f"{name}: {_module(name).SUMMARY}", flush=True)
        began = time.monotonic()
        outcome: Result | Iterable[Result] = _module(name).run(options)
        for result in (outcome,) if isinstance(outcome, Result) else outcome:
            print(results.text(result), f"\n  ({time.monotonic() - began:.0f} s)\n", flush=True)
            found.append(result)
            if arguments.write:
                PAGE.write_text(merged(PAGE.read_text() if PAGE.exists() else "", result))
    if arguments.json:
        document = {"machine": machine(), "results": [result.document() for result in found]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(f.met is False for result in found for f in result.figures))


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:10} {_module(name).SUMMARY}" for name in NAMES)
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"Measure, and compare with a baseline of the same run.\n\n{listed}",
        epilog="Exit status 1: a promised figure was missed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="*", type=_name, metavar="NAME", help="default: all")
    parser.add_argument(
        "--quick", action="store_true", help="fewer runs: minutes, not tens of them"
    )
    parser.add_argument("--runs", type=_positive, help="how often each sample is taken")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the 0.5B shape before vLLM and SGLang; CPUs may only emulate bfloat16",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--write", action="store_true", help="put them into docs/benchmarks.md")
    return parser


def _name(word: str) -> str:
    if word not in NAMES:
        raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(NAMES)}")
    return word


def _positive(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)


def machine() -> str:
    """What was measured on, in words that name no machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release().split('-')[0]}"


def merged(page: str, result: Result) -> str:
    """Return the page with this benchmark's section put in or replaced."""
    name = f"{result.name} {result.part}".strip()
    begin, end = _MARK.format("begin", name), _MARK.format("end", name)
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    where = f"Measured {when} on {machine()}, load average {result.load_before:.1f} at the end.\n"
    section = f"{begin}\n{results.markdown(result)}\n{where}{end}\n"
    if begin not in page:
        return f"{page.rstrip()}\n\n{section}" if page else section
    head, _, rest = page.partition(begin)
    return head + section + rest.partition(end + "\n")[2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
