"""The part of the pod template that describes containers: the worker's own, and others beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from .names import WORKER_CONTAINER
from .schema import OPEN_OBJECT, ApiModel, Dns1123, Dns1123Label, cel_rule, config_with_rules

OpenObject = Mapping[str, Any]
ProbeSeconds = Annotated[int, Field(ge=1, le=86400)]


class ProbeTimings(ApiModel):
    """Times of a probe; what it asks is the operator's."""

    initial_delay_seconds: Annotated[int, Field(ge=0, le=86400)] | None = None
    """Time from the container's start to the first probe."""
    period_seconds: ProbeSeconds | None = None
    """Time between two probes."""
    timeout_seconds: ProbeSeconds | None = None
    """How long an answer may take."""
    failure_threshold: Annotated[int, Field(ge=1, le=86400)] | None = None
    """Failures in a row that count."""


class WorkerContainer(ApiModel):
    """The worker's container: what lies over the operator's own settings."""

    security_context: OpenObject | None = Field(default=None, json_schema_extra=OPEN_OBJECT)
    """Security context of the container, as in a pod spec; its fields lie over the operator's (no
    privileges, read-only root)."""
    lifecycle: OpenObject | None = Field(default=None, json_schema_extra=OPEN_OBJECT)
    """Hooks postStart and preStop, as in a pod spec. preStop uses up the grace period,
    spec.drainSeconds + 15 s."""
    startup_probe: ProbeTimings | None = None
    """Until the process answers on /health; every second, 300 failures. Loading the model is no
    part of it."""
    liveness_probe: ProbeTimings | None = None
    """Of /health; every 10 s, 5 s to answer, 6 failures."""
    readiness_probe: ProbeTimings | None = None
    """Of /ready; every 2 s, 2 s to answer, 2 failures."""


class InitContainer(ApiModel):
    """A container that ends before the worker starts, as in a pod spec (`image`, `command`, …)."""

    model_config = config_with_rules(
        cel_rule(
            f"self.name != '{WORKER_CONTAINER}'",
            f"the container name {WORKER_CONTAINER} is the worker's own: rename this container",
            path=".name",
        ),
        x_kubernetes_preserve_unknown_fields=True,
    ) | {"extra": "allow"}

    name: Dns1123Label
    """Name of the container."""
    restart_policy: Literal["Always"] | None = None
    """Always: the container keeps running beside the others, and may start before later entries."""


class Sidecar(InitContainer):
    """A container that runs beside the worker, as in a pod spec (`image`, `command`, …).

    It starts before the worker, is restarted when it ends and ends after the worker.
    """

    restart_policy: Literal["Always"] | None = None
    """Always, whether it is said or not."""


class PodResourceClaim(ApiModel):
    """A ResourceClaim (DRA) of the pod: a claim that exists, or a template that makes one a pod."""

    model_config = config_with_rules(
        cel_rule(
            "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
            "an entry of spec.podTemplate.resourceClaims needs exactly one of resourceClaimName and "
            "resourceClaimTemplateName: keep one",
        )
    )

    name: Dns1123Label
    """Name that spec.resources.claims refers to."""
    resource_claim_name: Dns1123 | None = None
    """A ResourceClaim in the pool's namespace, shared by the pods."""
    resource_claim_template_name: Dns1123 | None = None
    """A ResourceClaimTemplate, of which each pod gets a claim."""
