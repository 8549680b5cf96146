"""The part of the spec that says how large one replica is, and on what it computes."""

from __future__ import annotations

from pydantic import Field

from .schema import ApiModel, ResourceName, api_default, cel, checked


class Parallelism(ApiModel):
    """How one replica spreads over accelerators and pods; immutable."""

    model_config = checked(
        cel(
            "(self.tensor * self.pipeline * self.data) % self.nodes == 0",
            "'spec.parallelism: tensor*pipeline*data = %d does not divide over %d nodes: set nodes "
            "to a divisor of it'.format([self.tensor * self.pipeline * self.data, self.nodes])",
            expression=True,
        ),
        cel(
            "self == oldSelf",
            "spec.parallelism is immutable: make another RolloutReplica with the new shape",
        ),
    )

    tensor: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Tensor parallel size.",
        json_schema_extra=api_default(),
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Pipeline parallel size.",
        json_schema_extra=api_default(),
    )
    data: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Data parallel size within the replica.",
        json_schema_extra=api_default(),
    )
    nodes: int = Field(
        default=1,
        ge=1,
        le=999,
        description="Pods of one replica; must divide tensor*pipeline*data.",
        json_schema_extra=api_default(),
    )

    @property
    def world(self) -> int:
        """Ranks of one replica."""
        return self.tensor * self.pipeline * self.data


class Accelerator(ApiModel):
    """What the engine computes on."""

    resource: ResourceName = Field(
        description="Extended resource of one accelerator, for example `nvidia.com/gpu`."
    )
