"""The outcome of a publish of several ranks, as rank 0 sends it to the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from rollout_client.errors import EpochLost, PublishFailed, RolloutError, Superseded
from rollout_client.steering.steering_protocol import Published

_KINDS: Mapping[str, type[RolloutError]] = {"EpochLost": EpochLost, "Superseded": Superseded}
_PUBLISHED = TypeAdapter(Published)


def to_json(outcome: Published | BaseException) -> dict[str, Any]:
    """Return the outcome in the form that `of_json` takes."""
    if isinstance(outcome, BaseException):
        return {"error": type(outcome).__name__, "detail": str(outcome) or "it was cancelled"}
    found: dict[str, Any] = _PUBLISHED.dump_python(outcome, mode="json")
    return found


def of_json(outcome: Mapping[str, Any]) -> Published:
    """Return what was published.

    Raises:
        RolloutError: The publish failed: the error that rank 0 raised, or `PublishFailed` with its text.
    """
    if "error" in outcome:
        kind = _KINDS.get(str(outcome["error"]), PublishFailed)
        raise kind(f"rank 0 of the group: {outcome.get('detail')}")
    return _PUBLISHED.validate_python(outcome)
