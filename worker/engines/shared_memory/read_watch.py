"""What a rank reads of the tensors that it is loaded from: seen once, and relied on from then on.

Nothing is guessed from names. While a rank is loaded from a whole version, every call of torch's is watched. A tensor
that none was made with, not even for its shape, and that nobody has kept can't have got into the model. Its bytes need not
come the next time: then the loader gets `AbsentTensor` in its place, which raises whatever it is asked for. It is
not left out: vLLM keeps the old values of a layer that gets nothing, or fresh memory as it lies (0.32).
"""

from __future__ import annotations

import bisect
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .tensor_views import TORCH_DTYPES


class AbsentTensorRead(RuntimeError):
    """The loader asked for a tensor that is not on this node."""


class AbsentTensor(Tensor):
    """Stands for a tensor whose bytes are not on this node: without values, and any call with it raises."""

    _rollout_name: str

    @staticmethod
    def stand_in_for(name: str, dtype: str, shape: Sequence[int]) -> AbsentTensor:
        """Return one for this tensor."""
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
            AbsentRead: names the tensor and what to do.
        """
        name = next(
            (each._rollout_name for each in flatten_tensors((args, kwargs)) if type(each) is cls),
            "?",
        )
        raise AbsentTensorRead(
            f"the loader reads tensor {name!r}, which it did not before, so its bytes did not come to"
            " this node: start the workers with --gang-fetch all, and report this model"
        )


class ReadWatch(TorchFunctionMode):
    """Notes with which of some tensors torch is called, in this thread, while it is entered.

    A tensor is known by where its bytes are, so what was made of it unseen, as parameters are, is known, too.
    Functions that torch has compiled run uncompiled meanwhile: it can't compile what watches.

    Args:
        tensors: By name; kept until the end, so that none takes another's place.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._source = tensors
        self._kept: list[Tensor] = [torch.empty(0)]
        self._alone = self._reference_count(0)
        """How many a tensor has that nobody keeps but this."""
        self._names: list[str] = [""]
        self._where: list[tuple[int, int]] = []
        """(address, number) of each, in order."""
        self._touched: set[int] = {0}
        self._stance = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Watch."""
        self._stance.enter_context(torch.compiler.set_stance("force_eager"))
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __exit__(self, *error: Any) -> None:
        """Watch no more."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stance.close()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, each watched from then on."""
        source = iter(self._source)
        while True:
            with torch._C.DisableTorchFunction():  # what makes them reads nothing
                name, tensor = next(source, ("", None))
                if tensor is None:
                    return
                bisect.insort(self._where, (_data_address(tensor), len(self._kept)))
            self._names.append(name)
            self._kept.append(tensor)
            yield name, tensor

    @property
    def untouched_names(self) -> frozenset[str]:
        """The names of those that were yielded, with which nothing was called, and which nobody has kept."""
        numbers = set(range(len(self._kept))) - self._touched
        return frozenset(self._names[n] for n in numbers if self._reference_count(n) <= self._alone)

    def _reference_count(self, number: int) -> int:
        return sys.getrefcount(self._kept[number])

    def _note_touched(self, tensor: Tensor) -> None:
        """Note a call with it, or with a part of it."""
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
        """Note what the call is made with, and make it."""
        for each in flatten_tensors((args, kwargs)):
            self._note_touched(each)
        return func(*args, **(kwargs or {}))


def _data_address(tensor: Tensor) -> int:
    """Return where its bytes begin; 0 if it has none."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):  # no storage, or no shape yet
        return 0


def flatten_tensors(value: object) -> Iterator[Any]:
    """Yield the tensors in arguments, however deep they lie."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from flatten_tensors(each)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from flatten_tensors(each)
