"""What a pass makes of raw pods: the sentence about a container that ended."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_operator.core.world import parse_pod


def trouble(log: str, code: int = 1) -> str:
    ended = {"exitCode": code, "reason": "Error", "message": log}
    raw: dict[str, Any] = {
        "metadata": {
            "name": "p-0-0",
            "uid": "u",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"rollout.dev/replica": "0", "rollout.dev/rank": "0"},
        },
        "status": {
            "phase": "Failed",
            "containerStatuses": [{"name": "worker", "state": {"terminated": ended}}],
        },
    }
    found = parse_pod(raw, "owner")
    assert found is not None
    return found.trouble


def line(level: str, message: str) -> str:
    return json.dumps({"level": level, "message": message})


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", ""),
        (f"{line('info', 'serving')}\n{line('info', 'loading')}\n", ""),
        (f"{line('error', 'no model')}\n{line('info', 'bye')}\n", ": no model"),
        (f'", "message": "cut"}}\n{line("info", "serving")}', ""),
        (
            "Traceback (most recent call last):\n  File x\nMemoryError: 3 GiB\n",
            ": MemoryError: 3 GiB",
        ),
    ],
    ids=["empty", "killed while it served", "its own error", "cut", "traceback"],
)
def test_an_end_is_told_in_one_line(log: str, said: str) -> None:
    assert trouble(log, 137) == f"container 'worker' ended: Error, exit code 137{said}"


def test_a_long_end_is_cut() -> None:
    assert len(trouble("x" * 5000)) < 400
