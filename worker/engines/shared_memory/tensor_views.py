"""The tensors that a rank is loaded from: views of mapped memory, and which of them the rank reads.

Nothing is guessed from names. While a rank is loaded from a whole version, `ReadWatch` sees every call of torch.
A tensor that no call had as an argument, not even for its shape, and that nothing has kept a reference to can't
have got into the model. Its bytes need not come the next time: then the loader gets an `AbsentTensor` in its place,
which raises whatever is called with it. It is not left out: vLLM keeps the old values of a layer that gets
nothing, or fresh memory as it is (0.32). Any process with torch can run this module.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rollout_common.transfer.layout import TORCH_NAMES

TensorPlace = tuple[str, str, Sequence[int], int]
"""Name, dtype as safetensors call it, shape, and where its bytes begin."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    dtype: getattr(torch, name) for dtype, name in TORCH_NAMES.items() if hasattr(torch, name)
}
"""Torch's dtypes by their names in safetensors."""


def view_tensors(whole: Tensor, places: Iterable[TensorPlace]) -> Iterator[tuple[str, Tensor]]:
    """Yield parts of bytes ([n] uint8) by name; a part that is not aligned for its dtype is a copy."""
    for name, dtype, shape, start in places:
        kind = TORCH_DTYPES[dtype]
        part = whole[start : start + math.prod(shape) * kind.itemsize]
        if start % kind.itemsize:
            part = part.clone()
        yield name, part.view(kind).reshape(tuple(shape))


class AbsentTensorRead(RuntimeError):
    """The loader read a tensor that is not on this node."""


class AbsentTensor(Tensor):
    """Stands in for a tensor whose bytes are not on this node; it has no values, and any call with it raises."""

    _rollout_name: str

    @staticmethod
    def stand_in_for(name: str, dtype: str, shape: Sequence[int]) -> AbsentTensor:
        """Return the stand-in for this tensor."""
        empty = torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype], device="meta")
        made: AbsentTensor = empty.as_subclass(AbsentTensor)
        made._rollout_name = name
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse the call.

        Raises:
            AbsentTensorRead: names the tensor and what to do.
        """
        name = next(
            (each._rollout_name for each in _flatten_tensors((args, kwargs)) if type(each) is cls),
            "?",
        )
        raise AbsentTensorRead(
            f"the loader reads tensor {name!r}, which it did not before, so its bytes did not come to"
            " this node: start the workers with --gang-fetch all, and report this model"
        )


class ReadWatch(TorchFunctionMode):
    """Notes which of some tensors torch is called with, in this thread, while it is entered.

    It knows a tensor by the address of its bytes, so it also knows what was made of one unseen, as parameters are.
    Functions that torch has compiled run uncompiled under it: torch can't compile a `TorchFunctionMode`.

    Args:
        tensors: By name; kept until the end, so that no other tensor gets the same address.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._source = tensors
        self._kept: list[Tensor] = [torch.empty(0)]
        self._alone = self._reference_count(0)
        """The reference count of a tensor that nothing else keeps."""
        self._names: list[str] = [""]
        self._where: list[tuple[int, int]] = []
        """(address, number) of each, in order."""
        self._touched: set[int] = {0}
        self._stance = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._stance.enter_context(torch.compiler.set_stance("force_eager"))
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __exit__(self, *error: Any) -> None:
        """Stop watching."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stance.close()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors; each is watched from then on."""
        source = iter(self._source)
        while True:
            with torch._C.DisableTorchFunction():  # the calls that make a tensor don't read one
                name, tensor = next(source, ("", None))
                if tensor is None:
                    return
                bisect.insort(self._where, (_data_address(tensor), len(self._kept)))
            self._names.append(name)
            self._kept.append(tensor)
            yield name, tensor

    @property
    def untouched_names(self) -> frozenset[str]:
        """The names of the yielded tensors that no call had as an argument and that nothing else keeps."""
        numbers = set(range(len(self._kept))) - self._touched
        return frozenset(self._names[n] for n in numbers if self._reference_count(n) <= self._alone)

    def _reference_count(self, number: int) -> int:
        return sys.getrefcount(self._kept[number])

    def _note_touched(self, tensor: Tensor) -> None:
        """Note a call with a tensor, or with a part of it."""
        address = _data_address(tensor)
        at = bisect.bisect_right(self._where, (address, len(self._kept)))
        while at:  # all without bytes are at 0
            begin, number = self._where[at - 1]
            if address >= begin + max(self._kept[number].nbytes, 1):
                return
            self._touched.add(number)
            at -= 1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note the call's arguments, and make it."""
        for each in _flatten_tensors((args, kwargs)):
            self._note_touched(each)
        return func(*args, **(kwargs or {}))


def _data_address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):  # no storage, or no shape yet
        return 0


def _flatten_tensors(value: object) -> Iterator[Any]:
    """Yield the tensors in arguments, however deep they are nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple, set, frozenset)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _flatten_tensors(each)
