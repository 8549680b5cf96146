"""What a trainer gives to publish: whole tensors, streams of them, and shards of several ranks."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from rollout_client.steering.checkpoint_form import described, held, is_sharded, state_of
from rollout_client.steering.spool import named_tensors
from rollout_common.transfer.layout import TORCH_NAMES, LayoutError
from rollout_common.wire import CASTABLE

if TYPE_CHECKING:
    import torch

    from rollout_client.steering.spool import Tensors

Dtypes = Mapping[str, str]
"""By name of a tensor: its dtype, as safetensors calls it."""

Spec = tuple[str, str, tuple[int, ...]]
"""Name, dtype as safetensors call it, and shape."""


@dataclass(frozen=True, slots=True)
class Given:
    """What there is to publish.

    Attributes:
        items: (name, tensor), in the order in which they are to be taken.
        specs: Of all of them; None: a stream, of which nothing is known before its end.
        at_rest: Whether taking one is no work of several ranks: any thread may do it.
    """

    items: Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]]
    specs: tuple[Spec, ...] | None
    at_rest: bool


def given(tensors: Tensors) -> Given:
    """Say what there is to publish.

    Raises:
        LayoutError: Something is no tensor, or of a dtype that no worker takes; names it.
        TypeError: These are no tensors at all.
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
    return Given(((name, state[name]) for name in sorted(state)), specs, at_rest=True)


def whole_tensors(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of a model or state dict whose tensors may be shards of several ranks.

    Each DTensor (FSDP, tensor parallel) is gathered when it is its turn, and freed after it: no rank
    ever holds more than one whole tensor on its device. Every rank must take all of them, in the same
    order; one of them gives them to `publish_weights`, the others just iterate.
    """
    return iter(named_tensors(tensors))


def spec_of(name: object, tensor: Any) -> Spec:
    """Return what a tensor is, in the words of workers.

    Raises:
        LayoutError: It is no tensor, or of a dtype that no worker takes.
    """
    import torch

    if not isinstance(name, str):
        raise LayoutError(f"a tensor's name must be a string, not {name!r}")
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise LayoutError(f"{name!r} is a {kind}, not a tensor: leave it out", tensor=name)
    if tensor.is_nested:
        raise LayoutError(
            f"tensor {name!r} is nested, and workers take dense ones: give it in the shape that it has in"
            " the model's checkpoint",
            tensor=name,
        )
    dtype = _dtypes().get(tensor.dtype)
    if dtype is None:
        raise LayoutError(
            f"tensor {name!r} has the dtype {tensor.dtype}, which no worker takes: give it in the"
            " dtype of the model's checkpoint",
            tensor=name,
        )
    return name, dtype, tuple(tensor.shape)


@cache
def _dtypes() -> dict[Any, str]:
    import torch

    # Older torch has fewer of them.
    found = {getattr(torch, name, None): dtype for dtype, name in TORCH_NAMES.items()}
    found.pop(None, None)
    return found


def check_there(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose memory is gone, which torch itself reads all the same.

    Raises:
        LayoutError: It was freed.
    """
    import torch

    plain = tensor.detach()
    # What only acts like a tensor may have no memory of its own, and a sparse one has none.
    if type(plain) is not torch.Tensor or plain.layout != torch.strided or not plain.numel():
        return
    last = sum((size - 1) * step for size, step in zip(plain.shape, plain.stride(), strict=True))
    end = (plain.storage_offset() + last + 1) * plain.element_size()
    if plain.untyped_storage().nbytes() < end:
        raise LayoutError(
            f"the memory of tensor {name!r} was freed, as FSDP does between two uses: give a state dict,"
            " whose tensors are there",
            tensor=name,
        )


def cast_specs(specs: Iterable[Spec], dtypes: Dtypes) -> tuple[Spec, ...]:
    """Return what tensors are once they are `cast`."""
    return tuple((name, cast_dtype(name, dtype, dtypes), shape) for name, dtype, shape in specs)


def cast_dtype(name: str, dtype: str, dtypes: Dtypes) -> str:
    """Return the dtype of a tensor once it is cast: only floating-point numbers are."""
    wanted = dtypes.get(name, dtype)
    return wanted if {dtype, wanted} <= CASTABLE else dtype


def cast(name: str, tensor: Any, dtypes: Dtypes) -> Any:
    """Return a tensor in the dtype that it is to have: itself if it has it, or is none of floating-point numbers.

    Raises:
        LayoutError: Its memory was freed.
    """
    wanted = dtypes.get(name)
    if wanted not in CASTABLE or _dtypes().get(getattr(tensor, "dtype", None)) not in CASTABLE:
        return tensor
    check_there(name, tensor)
    return tensor.detach().to(torch_dtype(wanted))


def torch_dtype(name: str) -> Any:
    """Return torch's dtype for a name of safetensors."""
    return next(dtype for dtype, known in _dtypes().items() if known == name)
