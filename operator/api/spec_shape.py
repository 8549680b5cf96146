"""The part of the spec that says how large one replica is, and what it runs on."""

from __future__ import annotations

from pydantic import Field

from .schema import ApiModel, ExtendedResourceName, api_default, cel_rule, config_with_rules

OPERATOR_CLASS_RULE = cel_rule(
    "has(self.operatorClass) == has(oldSelf.operatorClass) && (!has(self.operatorClass) || "
    "self.operatorClass == oldSelf.operatorClass)",
    "spec.operatorClass is immutable: create another RolloutReplica for another operator",
    path=".operatorClass",
)
"""Two operators never lead one pool, not even for the moment in which it changes hands."""


class Parallelism(ApiModel):
    """How one replica is spread across accelerators and pods. Immutable."""

    model_config = config_with_rules(
        cel_rule(
            "(self.tensor * self.pipeline * self.data) % self.nodes == 0",
            "'spec.parallelism: tensor*pipeline*data = %d is not divisible by nodes = %d: set nodes "
            "to a divisor of it'.format([self.tensor * self.pipeline * self.data, self.nodes])",
            expression=True,
        ),
        cel_rule(
            "self == oldSelf",
            "spec.parallelism is immutable: create another RolloutReplica with the new shape",
        ),
    )

    tensor: int = Field(default=1, ge=1, le=4096, json_schema_extra=api_default())
    """Tensor-parallel size."""
    pipeline: int = Field(default=1, ge=1, le=4096, json_schema_extra=api_default())
    """Pipeline-parallel size."""
    data: int = Field(default=1, ge=1, le=4096, json_schema_extra=api_default())
    """Data-parallel size within the replica."""
    nodes: int = Field(default=1, ge=1, le=999, json_schema_extra=api_default())
    """Pods per replica; must divide tensor*pipeline*data."""

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.tensor * self.pipeline * self.data


class AcceleratorSpec(ApiModel):
    """Accelerator that the engine runs on."""

    resource: ExtendedResourceName
    """Extended resource of one accelerator, for example `nvidia.com/gpu`."""
