"""The outcome of a publish of several ranks, as rank 0 sends it to the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rollout_client.errors import EpochLost, PublishFailed, RolloutError, Superseded
from rollout_client.steering.steering_protocol import Published, PublishReport, PushedTo
from rollout_common.wire import WeightsId

_KINDS: Mapping[str, type[RolloutError]] = {"EpochLost": EpochLost, "Superseded": Superseded}


def to_json(outcome: Published | BaseException) -> dict[str, Any]:
    """Return the outcome in the form that `of_json` takes."""
    if isinstance(outcome, BaseException):
        return {"error": type(outcome).__name__, "detail": str(outcome) or "it was cancelled"}
    return {**asdict(outcome), "identity": list(outcome.identity.as_tuple())}


def of_json(outcome: Mapping[str, Any]) -> Published:
    """Return what was published.

    Raises:
        RolloutError: The publish failed: the error that rank 0 raised, or `PublishFailed` with its text.
    """
    if "error" in outcome:
        kind = _KINDS.get(str(outcome["error"]), PublishFailed)
        raise kind(f"rank 0 of the group: {outcome.get('detail')}")
    epoch, version = outcome["identity"]
    report = outcome["report"]
    if report is not None:
        replicas = {name: PushedTo(**each) for name, each in report["replicas"].items()}
        report = PublishReport(**{**report, "replicas": replicas})
    rest = ("root_hash", "replicas", "seconds", "pause_seconds", "message")
    fields = {name: outcome[name] for name in rest}
    return Published(identity=WeightsId(epoch=epoch, version=version), report=report, **fields)
