"""The tensors that a trainer publishes: whole tensors, streams of them, and shards of several ranks."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout_client.steering.checkpoint_form import described, held, is_sharded, state_of
from rollout_client.steering.plain_tensors import (
    Spec,
    check_readable,
    dtype_of,
    spec_of,
    torch_dtype,
)
from rollout_client.steering.spool import named_tensors
from rollout_common.wire import CASTABLE

if TYPE_CHECKING:
    import torch

    from rollout_client.steering.spool import Tensors

Dtypes = Mapping[str, str]
"""By name of a tensor: its dtype, as safetensors calls it."""


@dataclass(frozen=True, slots=True)
class Given:
    """The tensors of a publish.

    Attributes:
        items: (name, tensor), in the order in which they are copied.
        specs: Of all tensors; None: a stream, whose tensors are unknown before its end.
        at_rest: Whether it takes no collective operation to get a tensor, so that any thread may do it.
    """

    items: Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]]
    specs: tuple[Spec, ...] | None
    at_rest: bool


def given(tensors: Tensors) -> Given:
    """Return the tensors of a publish, with their specs where they are known.

    Raises:
        LayoutError: A value is not a tensor, or has a dtype that no worker takes; names it.
        TypeError: The argument does not hold tensors.
    """
    state = state_of(tensors)
    if isinstance(state, AsyncIterable):
        return Given(state, None, at_rest=False)
    if not isinstance(state, Mapping):
        return Given(named_tensors(state), None, at_rest=False)
    specs = tuple(spec_of(name, tensor) for name, tensor in described(state).items())
    if any(map(is_sharded, held(state).values())):
        return Given(named_tensors(state), specs, at_rest=False)
    # In the order in which they lie, so that receivers can follow.
    return Given(((name, state[name]) for name, _, _ in specs), specs, at_rest=True)


def whole_tensors(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of a model or state dict whose tensors may be shards of several ranks.

    Each DTensor (FSDP, tensor parallel) is gathered in its turn, and freed afterwards: no rank holds more
    than one whole tensor on its device at any time. Every rank must take all of them, in the same order;
    one rank passes them to `publish_weights`, the others just iterate.
    """
    return iter(named_tensors(tensors))


def cast_specs(specs: Iterable[Spec], dtypes: Dtypes) -> tuple[Spec, ...]:
    """Return the specs of tensors after `cast`."""
    return tuple((name, cast_dtype(name, dtype, dtypes), shape) for name, dtype, shape in specs)


def cast_dtype(name: str, dtype: str, dtypes: Dtypes) -> str:
    """Return the dtype of a tensor once it is cast: only floating-point numbers are."""
    wanted = dtypes.get(name, dtype)
    return wanted if {dtype, wanted} <= CASTABLE else dtype


def cast(name: str, tensor: Any, dtypes: Dtypes) -> Any:
    """Return a tensor in its wanted dtype: itself if it has that dtype, or does not hold floating-point numbers.

    Raises:
        LayoutError: It has no plain values, or its memory was freed.
    """
    wanted = dtypes.get(name)
    if wanted not in CASTABLE or dtype_of(tensor) not in CASTABLE:
        return tensor
    check_readable(name, tensor)
    return tensor.detach().to(torch_dtype(wanted))
