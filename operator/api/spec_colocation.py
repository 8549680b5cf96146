"""The part of the spec that says whose accelerators the engines use: their own, or a trainer's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from .schema import (
    ATOMIC_LIST,
    ATOMIC_MAP,
    ApiModel,
    Dns1123Label,
    api_default,
    cel_rule,
    config_with_rules,
    schema_extra,
)
from .spec_pod import LABEL_KEY_PATTERN, LabelValue, label_keys_rule

DEVICES_CLAIM_NAME = "rollout-devices"
"""What a colocated pod calls the trainer's claim."""

VISIBLE_DEVICES_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""By these variables the operator gives each of several pods its share of a claim."""


class PoolMode(StrEnum):
    """Whose accelerators the pool uses."""

    STANDALONE = "Standalone"
    COLOCATED = "Colocated"
    HYBRID = "Hybrid"


class LabelSelectorRequirement(ApiModel):
    """A condition on one label."""

    model_config = config_with_rules(
        cel_rule(
            "(self.operator in ['In', 'NotIn']) == (has(self.values) && self.values.size() > 0)",
            "spec.colocation.trainerSelector.matchExpressions: In and NotIn need values, Exists and "
            "DoesNotExist must have none: correct values",
        )
    )

    key: Annotated[str, Field(min_length=1, max_length=317, pattern=LABEL_KEY_PATTERN)]
    """Label key."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How the label is compared with values."""
    values: tuple[LabelValue, ...] = Field(default=(), max_length=32, json_schema_extra=ATOMIC_LIST)
    """Values, for In and NotIn."""

    def to_query(self) -> str:
        """Return the condition as a query has it."""
        listed = f"({','.join(self.values)})"
        return {
            "In": f"{self.key} in {listed}",
            "NotIn": f"{self.key} notin {listed}",
            "Exists": self.key,
            "DoesNotExist": f"!{self.key}",
        }[self.operator]

    def matches_labels(self, labels: Mapping[str, str]) -> bool:
        """Whether the condition holds for these labels."""
        there = self.key in labels
        return {
            "In": there and labels.get(self.key) in self.values,
            "NotIn": not there or labels.get(self.key) not in self.values,
            "Exists": there,
            "DoesNotExist": not there,
        }[self.operator]


class TrainerSelector(ApiModel):
    """A label selector, as everywhere in Kubernetes; all conditions must hold."""

    model_config = config_with_rules(
        cel_rule(
            "(has(self.matchLabels) && self.matchLabels.size() > 0) || "
            "(has(self.matchExpressions) && self.matchExpressions.size() > 0)",
            "spec.colocation.trainerSelector is empty and would select every pod: add matchLabels or "
            "matchExpressions",
        )
    )

    match_labels: Mapping[str, LabelValue] = Field(
        default_factory=dict,
        max_length=32,
        json_schema_extra=schema_extra(
            label_keys_rule("spec.colocation.trainerSelector.matchLabels"), **ATOMIC_MAP
        ),
    )
    """Labels that a pod must have."""
    match_expressions: tuple[LabelSelectorRequirement, ...] = Field(
        default=(), max_length=32, json_schema_extra=ATOMIC_LIST
    )
    """Further conditions on labels."""

    def to_query(self) -> str:
        """Return the selector as a query of the API server has it."""
        return ",".join(self._query_terms())

    def matches_labels(self, labels: Mapping[str, str]) -> bool:
        """Whether the API server would select an object with these labels."""
        wanted = all(labels.get(key) == value for key, value in self.match_labels.items())
        return wanted and all(each.matches_labels(labels) for each in self.match_expressions)

    def _query_terms(self) -> Iterator[str]:
        yield from (f"{key}={value}" for key, value in sorted(self.match_labels.items()))
        yield from sorted(each.to_query() for each in self.match_expressions)


class Colocation(ApiModel):
    """Next to or in which pods the engines run, and which part of their devices they use. Immutable."""

    model_config = config_with_rules(
        cel_rule(
            "self == oldSelf",
            "spec.colocation is immutable: create another RolloutReplica",
        )
    )

    trainer_selector: TrainerSelector
    """Label selector of the trainer's pods, in the pool's namespace. They are ordered by name,
    numbers in it by their value."""
    slots: int = Field(default=1, ge=1, le=256, json_schema_extra=api_default())
    """Colocated: rollout pods next to each trainer pod; each uses an equal share of the claim's
    devices."""
    request: Dns1123Label | None = None
    """Colocated: request of the trainer's ResourceClaim whose devices the engines use; if unset,
    the only one."""


COLOCATED_RULES = (
    cel_rule(
        "has(self.colocation) == (self.mode != 'Standalone')",
        "spec.colocation belongs to the modes Colocated and Hybrid: set it there, and only there",
        path=".colocation",
    ),
    cel_rule(
        "self.mode != 'Colocated' || !has(self.accelerator)",
        "spec.accelerator must not be set in mode Colocated: the devices are those of the trainer's "
        "ResourceClaim; remove it",
        path=".accelerator",
    ),
    cel_rule(
        "self.mode != 'Colocated' || !has(self.podTemplate) || "
        "!has(self.podTemplate.resourceClaims) || "
        f"!self.podTemplate.resourceClaims.exists(c, c.name == '{DEVICES_CLAIM_NAME}')",
        f"spec.podTemplate.resourceClaims: the name {DEVICES_CLAIM_NAME} is that of the trainer's claim in mode "
        "Colocated: rename this claim",
        path=".podTemplate",
    ),
    cel_rule(
        "self.mode != 'Colocated' || !has(self.updateStrategy) || !has(self.updateStrategy.maxSurge) || "
        "self.updateStrategy.maxSurge == 0",
        "spec.updateStrategy.maxSurge must not be set in mode Colocated: a surge has no devices of the "
        "trainer's; remove it",
        path=".updateStrategy",
    ),
    cel_rule(
        "self.mode != 'Colocated' || !has(self.scheduling) || !has(self.scheduling.gang)",
        "spec.scheduling.gang must not be set in mode Colocated: the pods go where the trainer's pods are; "
        "remove it, and let the trainer's own pods start together",
        path=".scheduling",
    ),
    cel_rule(
        "!has(self.colocation) || self.colocation.slots == 1 || !has(self.engine.env) || "
        f"!self.engine.env.exists(e, e.name in {list(VISIBLE_DEVICES_VARIABLES)!r})",
        f"spec.engine.env: the operator sets {' and '.join(VISIBLE_DEVICES_VARIABLES)} where colocation.slots is "
        "more than 1: remove them",
        path=".engine.env",
    ),
)
"""Rules of the whole spec that are about the mode."""


_ENGINE_REASON = "the trainer starts the engine with settings of its own"
_PODS_REASON = "the pods are the trainer's, and the operator never touches them"
_MEMORY_REASON = "the worker runs in the trainer's process, whose memory is the trainer's to plan"

_REFUSED_FIELDS = (
    # field below spec, and why
    ("engine.image", _PODS_REASON),
    ("engine.imagePullPolicy", _PODS_REASON),
    ("engine.args", _ENGINE_REASON),
    ("engine.env", _ENGINE_REASON),
    ("engine.logprobs", _ENGINE_REASON),
    ("engine.cache", _PODS_REASON),
    ("model", "the trainer starts the engine with its own model"),
    ("accelerator", _PODS_REASON),
    ("resources", _PODS_REASON),
    ("sleep.spill", _MEMORY_REASON),
    ("weights.volume", "the pods are the trainer's, so mount it there"),
    ("weights.stagingMemory", _MEMORY_REASON),
    ("weights.transport", _ENGINE_REASON),
    ("updateStrategy", _PODS_REASON),
    ("disruption", _PODS_REASON),
    ("scheduling", _PODS_REASON),
    ("restartPolicy", _PODS_REASON),
    ("worker", _ENGINE_REASON),
    ("podTemplate", _PODS_REASON),
    ("colocation.request", "the engine uses whatever the trainer's process has"),
)


def _is_set_expression(field: str) -> str:
    """The CEL expression that says whether a field is set."""
    parts = field.split(".")
    steps = (".".join(parts[: end + 1]) for end in range(len(parts)))
    return " && ".join(f"has(self.{step})" for step in steps)


HYBRID_RULES = (
    *(
        cel_rule(
            f"self.mode != 'Hybrid' || !({_is_set_expression(field)})",
            f"spec.{field} must not be set in mode Hybrid: {why}; remove it",
            path=f".{field.partition('.')[0]}",
        )
        for field, why in _REFUSED_FIELDS
    ),
    cel_rule(
        "self.mode == 'Hybrid' || has(self.model)",
        "spec.model is required: name the checkpoint in spec.model.source",
        path=".model",
    ),
    cel_rule(
        "self.mode != 'Hybrid' || self.replicas == 1",
        "'spec.replicas: a Hybrid pool has one replica in each pod of its trainer, not %d: leave it "
        "out, and scale the trainer'.format([self.replicas])",
        expression=True,
        path=".replicas",
    ),
    cel_rule(
        "self.mode != 'Hybrid' || !self.suspend",
        "spec.suspend must be false in mode Hybrid: the pods are the trainer's; set spec.state to Asleep "
        "to get their memory back",
        path=".suspend",
    ),
    cel_rule(
        "self.mode != 'Hybrid' || (self.parallelism.tensor == 1 && self.parallelism.pipeline == 1 && "
        "self.parallelism.data == 1 && self.parallelism.nodes == 1)",
        f"spec.parallelism must not be set in mode Hybrid: {_ENGINE_REASON}; remove it",
        path=".parallelism",
    ),
    cel_rule(
        "self.mode != 'Hybrid' || !has(self.colocation) || self.colocation.slots == 1",
        "spec.colocation.slots must be 1 in mode Hybrid: each of the trainer's pods is one replica; "
        "remove it",
        path=".colocation",
    ),
)
"""Rules of the whole spec that are about mode Hybrid."""
