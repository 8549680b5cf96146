"""What a pool in mode Hybrid refuses: all that is said to pods, for these are the trainer's."""

from __future__ import annotations

from .schema import cel_rule

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
