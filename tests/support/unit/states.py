"""What a worker that serves answers to `GET /v1/state` and `GET /v1/info`, in the fields that callers read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def serving_state(**changes: Any) -> dict[str, Any]:
    """Return the state with these fields changed, or more."""
    return {
        "boot_id": "b1",
        "engine": "hf",
        "lifecycle": "Active",
        "serving": True,
        "weights": {"active": None},
        "resident": {"weights": True, "kv_cache": True},
        **changes,
    }


def worker_info(logprobs: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
    """Return the description of a worker that can do nothing of note, with these fields changed, or more."""
    flags = ("seed", "priority", "stop_strings", "memory_release", "prefix_cache", "cache_salt")
    able: dict[str, Any] = {"logprobs": logprobs, "in_flight": [], "sleep_levels": []}
    return {
        "engine": "tiny",
        "engine_version": "1",
        "model": "m",
        "max_length": 64,
        "eos_token_ids": (),
        "capabilities": able | dict.fromkeys(flags, False),
        **changes,
    }
