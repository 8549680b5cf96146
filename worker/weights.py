"""What makes tensors the weights of a model, and which: layout, ties, content hash. All pure.

Every tensor has a content hash (XXH3-128 of its bytes). `root_hash` is the hash over the ordered
(name, dtype, shape, content hash), so the same content has the same hash however it is sharded.
Every refusal is a `WeightsRejected` that names the tensor and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .engine import Entry, Layout, TensorSpec, WeightsRejected
from .transfer.layout import ALIGN, LayoutError, PushLayout
from .wire.roothash import HASH, OUTPUT_HEAD, Hashed, root_hash_of

__all__ = [
    "ALIGN",
    "HASH",
    "OUTPUT_HEAD",
    "LayoutError",
    "PushLayout",
    "check_layout",
    "check_ties",
    "root_hash",
]


def check_layout(layout: Layout, entries: Sequence[Entry], where: str) -> None:
    """Refuse a missing, unexpected, ill-shaped or ill-typed tensor; `where` they were found."""
    have = {entry.name: entry.spec for entry in entries}
    for name, want in layout.required.items():
        if name not in have:
            raise WeightsRejected(
                f"tensor {name!r} is missing in {where!r}: publish every tensor "
                "of the model's checkpoint",
                tensor=name,
            )
        _check_spec(name, have[name], want)
    for name, spec in have.items():
        if name in layout.required:
            continue
        if name not in layout.optional:
            raise WeightsRejected(
                f"tensor {name!r} in {where!r} is unknown to the model: publish "
                "the tensors of the model's checkpoint under its names and nothing else",
                tensor=name,
            )
        _check_spec(name, spec, layout.optional[name])


def _check_spec(name: str, have: TensorSpec, want: TensorSpec) -> None:
    if have != want:
        what = "shape" if have.dtype == want.dtype else "dtype"
        raise WeightsRejected(
            f"tensor {name!r} has the wrong {what}: it is {have}, the model's checkpoint has "
            f"{want}; publish it as {want}",
            tensor=name,
        )


def check_ties(tied: Mapping[str, str], digests: Mapping[str, str]) -> None:
    """Refuse a tensor that differs from the one it is tied to, as `Layout.tied` says."""
    for name, target in tied.items():
        if name in digests and digests[name] != digests[target]:
            raise WeightsRejected(
                f"tensor {name!r} differs from {target!r}, but the model ties the two: leave "
                f"{name!r} out or publish equal bytes",
                tensor=name,
            )


def root_hash(entries: Sequence[Entry], digests: Mapping[str, str]) -> str:
    """Return the hash of a whole set of tensors, given the content hash of each."""
    return root_hash_of(
        {e.name: Hashed(e.spec.dtype, e.spec.shape, digests[e.name]) for e in entries}
    )
