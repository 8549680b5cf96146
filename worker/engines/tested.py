"""What the adapters refuse at a start: engine versions that they were not tested with, and flags.

Imports only the standard library, for the main module of SGLang's child.
"""

from __future__ import annotations

from collections.abc import Iterable

ALLOW_UNTESTED_FLAG = "--allow-untested-version"
"""The flag in `engine.args` with which another version starts."""

TESTED_VERSIONS = {"vLLM": "0.32.0", "SGLang": "0.5.23"}


def untested_version_refusal(engine: str, found: str) -> str | None:
    """Return why this version must not start, None if it may; a local part (`+cpu`) is ignored."""
    tested = TESTED_VERSIONS[engine]
    if found.partition("+")[0] == tested:
        return None
    return (
        f"the worker was tested with {engine} {tested}; found {found}: install {tested}, or add "
        f"{ALLOW_UNTESTED_FLAG} to engine.args to try this one"
    )


def refused_flag_entries(why: str, *flags: str) -> Iterable[tuple[str, str]]:
    """Yield an entry of a table of refused flags for each of these."""
    return ((flag, why) for flag in flags)
