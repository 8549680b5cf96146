"""What `wait --for` can wait for. Pure."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from rollout_common.kube.access import Obj

from .pool_summary import conditions_of, has_condition

Holds = Callable[[Obj], bool]
"""Whether a RolloutReplica has what is waited for."""

_CONDITIONS = {"ready": "Ready", "asleep": "Asleep", "suspended": "Suspended"}
_WEIGHTS = re.compile(r"weights=(?:(\d{1,18})/)?(\d{1,18})")


def parse_wait(text: str) -> Holds:
    """Return the condition that a word names.

    Raises:
        argparse.ArgumentTypeError: It names none.
    """
    if text in _CONDITIONS:
        return lambda pool: _is_current(pool, _CONDITIONS[text])
    found = _WEIGHTS.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"give ready, asleep, suspended, weights=VERSION or weights=EPOCH/VERSION, not {text!r}"
        )
    epoch, version = found[1], int(found[2])
    if epoch is None:
        return lambda pool: _committed(pool)[1] >= version
    return lambda pool: _committed(pool) >= (int(epoch), version)


def _is_current(pool: Obj, kind: str) -> bool:
    seen = conditions_of(pool).get(kind, {}).get("observedGeneration", 0)
    return has_condition(pool, kind) and seen >= pool["metadata"].get("generation", 0)


def _committed(pool: Obj) -> tuple[int, int]:
    weights = (pool.get("status") or {}).get("weights") or {}
    found = weights.get("committed") or {"epoch": -1, "version": -1}
    return int(found["epoch"]), int(found["version"])
