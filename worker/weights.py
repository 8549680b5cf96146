"""Checks that tensors are weights of a model (layout and ties), and their root hash; all pure.

Every tensor has a content hash, over the hashes of its leaves. The root hash is the hash over the ordered
(name, dtype, shape, content hash), so the same content has the same hash however it is sharded.
Every refusal is a `WeightsRejected` that names the tensor and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from rollout_common.transfer.layout import ALIGN, LayoutError, PushLayout
from rollout_common.wire import CASTABLE
from rollout_common.wire.root_hash import OUTPUT_HEAD, TREE_SCHEME, HashedTensor, root_hash_of

from .engine import TensorEntry, TensorSpec, WeightsLayout, WeightsRejected
from .lora.lora_checks import check_adapters, holds_adapters

__all__ = [
    "ALIGN",
    "OUTPUT_HEAD",
    "LayoutError",
    "PushLayout",
    "check_layout",
    "check_tied_weights",
    "compute_root_hash",
]

_EXPERT, _FUSED = re.compile(r"\.experts\.\d+\."), re.compile(r"\.experts\.[a-z]")
"""Found in the name of one expert's tensor, and of a tensor that holds all experts of a layer."""
_FIX_FUSED = (
    "it holds all experts of a layer, which the model's checkpoint has one by one: publish the model of"
    " transformers itself, not its state dict"
)


def check_layout(layout: WeightsLayout, entries: Sequence[TensorEntry], where: str) -> None:
    """Refuse a missing or unexpected tensor, or one of a wrong shape or dtype; `where`: their source.

    Tensors of adapters are a version, too: these must fit the model's.
    """
    if holds_adapters(entries):
        check_adapters(layout, entries, where)
        return
    have = {entry.name: entry.spec for entry in entries}
    for name, want in layout.required.items():
        if name not in have:
            raise WeightsRejected(
                f"tensor {name!r} is missing in {where!r}: {_missing_tensor_fix(name, have)}",
                tensor=name,
            )
        _check_tensor_spec(name, have[name], want)
    for name, spec in have.items():
        if name in layout.required:
            continue
        if name not in layout.optional:
            names = "publish the tensors of the model's checkpoint under its names and nothing else"
            fix = _FIX_FUSED if _FUSED.search(name) else names
            raise WeightsRejected(
                f"tensor {name!r} in {where!r} is unknown to the model: {fix}", tensor=name
            )
        _check_tensor_spec(name, spec, layout.optional[name])


def _missing_tensor_fix(name: str, have: Collection[str]) -> str:
    """Return what to do about a missing tensor, by the names that are there instead."""
    if longer := next((each for each in have if each.endswith(f".{name}")), None):
        prefix = longer.removesuffix(name)
        return (
            f"{longer!r} is there: publish without the prefix {prefix!r}, as of the wrapped model"
        )
    if _EXPERT.search(name) and (fused := next(filter(_FUSED.search, have), None)):
        return f"{fused!r} is there: {_FIX_FUSED}"
    return "publish every tensor of the model's checkpoint"


def _check_tensor_spec(name: str, have: TensorSpec, want: TensorSpec) -> None:
    if have != want:
        what = "shape" if have.dtype == want.dtype else "dtype"
        castable = have.shape == want.shape and {have.dtype, want.dtype} <= CASTABLE
        cast = ", or tensors by publish_weights(…, cast=True)" if castable else ""
        raise WeightsRejected(
            f"tensor {name!r} has the wrong {what}: it is {have}, the model's checkpoint has "
            f"{want}; publish it as {want}{cast}",
            tensor=name,
        )


def check_tied_weights(tied: Mapping[str, str], digests: Mapping[str, str]) -> None:
    """Refuse a tensor that differs from the one that `WeightsLayout.tied` ties it to."""
    for name, target in tied.items():
        if name in digests and digests[name] != digests[target]:
            raise WeightsRejected(
                f"tensor {name!r} differs from {target!r}, but the model ties the two: leave "
                f"{name!r} out or publish equal bytes",
                tensor=name,
            )


def compute_root_hash(
    entries: Sequence[TensorEntry], digests: Mapping[str, str], scheme: str = TREE_SCHEME
) -> str:
    """Return the root hash of tensors, given the content hash of each, which is of this scheme."""
    return root_hash_of(
        {e.name: HashedTensor(e.spec.dtype, e.spec.shape, digests[e.name]) for e in entries}, scheme
    )
