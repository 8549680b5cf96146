"""The part of the spec that sets the worker processes: how long they load, queue, log and sleep."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .schema import ApiModel, Quantity, cel_rule, config_with_rules, schema_extra


class SpillSpec(ApiModel):
    """Where sleep at level 1 keeps the weights: in a volume of the pod's own, or in a folder."""

    model_config = config_with_rules(
        cel_rule(
            "!has(self.path) || (!has(self.medium) && !has(self.sizeLimit))",
            "spec.sleep.spill.path names a folder of your own: remove medium and sizeLimit, or path",
        )
    )

    medium: Literal["Disk", "Memory"] = "Disk"
    """Disk: an emptyDir on the node's disk. Memory: one in the node's memory, which counts as the
    container's."""
    size_limit: Quantity | None = None
    """Size of that emptyDir: at least that of the weights that one pod holds. A pod that exceeds it
    is evicted. If unset, what the node has."""
    path: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None,
        json_schema_extra=schema_extra(
            cel_rule(
                r"self.startsWith('/') && !self.matches('(^|/)[.][.](/|$)')",
                "spec.sleep.spill.path must be an absolute path without '..': use one like /scratch",
            )
        ),
    )
    """A folder instead, which must exist and be writable, in a mount of
    spec.podTemplate.volumeMounts."""


class SleepSpec(ApiModel):
    """How an engine sleeps."""

    level: Literal[1, 2] = 1
    """1: a copy of the weights is kept and restored on wake. 2: the weights are dropped and
    reloaded from their source on wake."""
    spill: SpillSpec = SpillSpec()
    """Where level 1 keeps the copy; changing it replaces the pods."""


class WorkerProcess(ApiModel):
    """Settings of the worker processes; changing them replaces the pods."""

    start_timeout_seconds: int = Field(default=3600, ge=1, le=86400)
    """How long a model may take to load, a download included; then the worker starts its engine
    anew."""
    max_queue: int = Field(default=1024, ge=1, le=1_048_576)
    """Maximum queued outputs of a worker; requests beyond it get a 429."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum log level."""
