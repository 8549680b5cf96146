"""What a worker that serves answers to `GET /v1/state`, in the fields that callers read."""

from __future__ import annotations

from typing import Any


def serving_state(**changes: Any) -> dict[str, Any]:
    """Return the answer with these fields changed, or more."""
    return {
        "boot_id": "b1",
        "engine": "hf",
        "lifecycle": "Active",
        "serving": True,
        "weights": {"active": None},
        "resident": {"weights": True, "kv_cache": True},
        **changes,
    }
