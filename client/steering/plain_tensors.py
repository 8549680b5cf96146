"""What a tensor must be so that a version can have it: a known dtype, plain values, and memory that is there."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from rollout_common.transfer.layout import TORCH_NAMES, LayoutError

if TYPE_CHECKING:
    import torch

Spec = tuple[str, str, tuple[int, ...]]
"""Name, dtype as safetensors call it, and shape."""


def spec_of(name: object, tensor: Any) -> Spec:
    """Return name, dtype and shape of a tensor, as safetensors names them.

    Raises:
        LayoutError: It is not a tensor, or has a dtype that no worker takes.
    """
    import torch

    if not isinstance(name, str):
        raise LayoutError(f"a tensor's name must be a string, not {name!r}")
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise LayoutError(f"{name!r} is a {kind}, not a tensor: leave it out", tensor=name)
    try:
        known, shape, is_nested = tensor.dtype, tuple(tensor.shape), tensor.is_nested
    except Exception as error:
        raise unreadable_error(name, tensor, error) from error
    if is_nested:
        raise LayoutError(
            f"tensor {name!r} is nested, and workers take dense ones: give it in the shape that it has in"
            " the model's checkpoint",
            tensor=name,
        )
    dtype = _dtypes().get(known)
    if dtype is None:
        raise LayoutError(
            f"tensor {name!r} has the dtype {known}, which no worker takes: give it in the"
            " dtype of the model's checkpoint",
            tensor=name,
        )
    return name, dtype, shape


def unreadable_error(name: str, tensor: Any, error: Exception) -> LayoutError:
    """Return the error for a subclass of tensors that raises where torch's own have an answer."""
    kind, why = type(tensor).__name__, str(error).partition("\n")[0][:200]
    return LayoutError(
        f"tensor {name!r} is a {kind}, which can't be read as a plain tensor ({type(error).__name__}: {why}):"
        " give it as a dense tensor or a DTensor",
        tensor=name,
    )


def check_readable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor without plain values, or whose memory is freed: torch itself would read that all the same.

    Raises:
        LayoutError: It is sparse, quantised or on the meta device, or it was freed.
    """
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise LayoutError(
            f"tensor {name!r} has no plain values to send (sparse, quantised or on the meta device):"
            " give it as a dense tensor",
            tensor=name,
        )
    plain = tensor.detach()
    # A tensor subclass may have no storage.
    if type(plain) is not torch.Tensor or not plain.numel():
        return
    last = sum((size - 1) * step for size, step in zip(plain.shape, plain.stride(), strict=True))
    end = (plain.storage_offset() + last + 1) * plain.element_size()
    if plain.untyped_storage().nbytes() < end:
        raise LayoutError(
            f"the memory of tensor {name!r} was freed, as FSDP does between two uses: give a state dict,"
            " whose tensors are there",
            tensor=name,
        )


@cache
def _dtypes() -> dict[Any, str]:
    import torch

    # An older torch has fewer of them.
    found = {getattr(torch, name, None): dtype for dtype, name in TORCH_NAMES.items()}
    found.pop(None, None)
    return found


def dtype_of(tensor: Any) -> str | None:
    """Return a tensor's dtype as safetensors call it; None: it is not a tensor, or has a dtype that no worker takes."""
    return _dtypes().get(getattr(tensor, "dtype", None))


def torch_dtype(name: str) -> Any:
    """Return torch's dtype for a name of safetensors."""
    return next(dtype for dtype, known in _dtypes().items() if known == name)
