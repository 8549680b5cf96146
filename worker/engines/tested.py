"""The adapters' own flags, and what they refuse at a start: engine versions that they were not tested with, and flags.

Imports only the standard library, for the main module of SGLang's child.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

ALLOW_UNTESTED_FLAG = "--allow-untested-version"
"""The flag in `engine.args` with which another version starts."""

SELF_CHECK_FLAG = "--self-update-check"
"""The flag in `engine.args` of engines that load a checkpoint in another way than an update: see `selfcheck`."""

TESTED_VERSIONS = {"vLLM": "0.32.0", "SGLang": "0.5.23"}


def add_adapter_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ours that every engine in processes of its own takes."""
    parser.add_argument("--step-deadline-seconds", type=float, default=120.0)
    parser.add_argument(ALLOW_UNTESTED_FLAG, action="store_true")
    parser.add_argument(SELF_CHECK_FLAG, choices=("on", "off"), default="on")


def untested_version_refusal(engine: str, found: str) -> str | None:
    """Return why this version must not start, None if it may; a local part (`+cpu`) is ignored."""
    tested = TESTED_VERSIONS[engine]
    if found.partition("+")[0] == tested:
        return None
    return (
        f"the worker was tested with {engine} {tested}; found {found}: install {tested}, or add "
        f"{ALLOW_UNTESTED_FLAG} to engine.args to try this one"
    )


def reasons_by_flag(flags_by_reason: Mapping[str, str]) -> dict[str, str]:
    """Return a table of refused flags, from the flags (separated by spaces) of each reason."""
    return {flag: why for why, flags in flags_by_reason.items() for flag in flags.split()}


def shape_refusal(flag: str, asked: int, name: str, of_pool: int) -> str:
    """Return why a flag can't ask for other ranks than the pool's `spec.parallelism`, by which pods get devices."""
    return (
        f"engine.args: {flag} {asked} contradicts spec.parallelism.{name}, by which pods get their "
        f"accelerators and which is {of_pool}: remove the flag, or create a pool with "
        f"parallelism: {{{name}: {asked}}}"
    )
