"""What models write into parameters themselves, past vLLM's reload of layers (vLLM 0.32).

A reload puts parameters without memory in the place of those that serve, and wraps their loaders to fill a layer once all of
it is there. Some models copy without these loaders (experts and sinks of gpt-oss, experts of Step 3): into nothing, so
that the former weights would go on serving, without an error. A few tensors (a router's
`e_score_correction_bias`) are never replaced: a copy goes into what serves, at once. This runs in vLLM's workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from rollout_worker.engines.shared_memory.copy_plan import (
    CopyRecorder,
    NotRecordable,
    SourceIndex,
    StridedPart,
    check_method,
)


@contextlib.contextmanager
def replaced_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes for the block, and restore them after it."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)


@contextlib.contextmanager
def catch_lost_writes(model: nn.Module) -> Iterator[None]:
    """Have copies into parameters without memory, in the block, made when their layer is filled."""
    from vllm.model_executor.model_loader.reload import layerwise

    catcher, count_loaded = _LostWrites(model), layerwise.get_numel_loaded

    def count_apart(*args: Any) -> Any:
        with catcher.let_pass():
            return count_loaded(*args)

    with replaced_attributes(layerwise, get_numel_loaded=count_apart), catcher:
        yield


class _LostWrites(TorchDispatchMode):
    """Gives copies into parameters without memory to the reload, as if the parameters' loaders had been called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._places: dict[int, tuple[Any, str]] = {}
        self._passing = False

    @contextlib.contextmanager
    def let_pass(self) -> Iterator[None]:
        """Let such copies be made in the block: vLLM makes them to count what a loader loads."""
        before, self._passing = self._passing, True
        try:
            yield
        finally:
            self._passing = before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make one call of torch's, or have it made later."""
        if func is torch.ops.aten.copy_.default and args[0].is_meta and not self._passing:
            place = self._find_place(args[0])
            if place is not None:
                _load_later(*place, args[0], args[1])
                return args[0]
        return func(*args, **(kwargs or {}))

    def _find_place(self, target: Tensor) -> tuple[Any, str] | None:
        """Return the layer that a tensor without memory is a part of, and the parameter's name."""
        key = _storage_id(target)
        if key not in self._places:
            self._places = {
                _storage_id(each): (layer, name)
                for layer in self._model.modules()
                for name, each in layer.named_parameters(recurse=False)
                if each.is_meta
            }
        return self._places.get(key)


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _load_later(layer: Any, name: str, target: Tensor, source: Tensor) -> None:
    """Give a copy to the reload.

    Raises:
        RuntimeError: The layer is quantised: what is made of its parameters may be kept where no reload writes.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    try:
        check_method(layer)
    except NotRecordable as error:
        raise RuntimeError(f"vLLM can't update {name} of this model: {error}") from error
    parameter = getattr(layer, name)
    parameter.weight_loader = _copy_part
    load = layerwise.make_online_process_loader(layer, name)
    part = StridedPart(int(target.storage_offset()), tuple(target.shape), target.stride())
    load(parameter, source.expand(part.size), part)


def _copy_part(param: Tensor, source: Tensor, part: StridedPart) -> None:
    part.view_of(param.data).copy_(source)


class DirectRecorder(CopyRecorder):  # type: ignore[no-untyped-call]
    """Notes what is copied into the tensors of a model that a reload never replaces, while it loads.

    Args:
        sources: The checkpoint's tensors.
        model: What they are loaded into.
    """

    def __init__(self, sources: SourceIndex, model: nn.Module) -> None:
        self.owner = _kept_tensors(model)
        """A module that has these tensors."""
        self._wrong: NotRecordable | None = None
        super().__init__(sources, dict(self.owner.named_buffers()))

    @override
    def _check_read(self, func: Any, args: Sequence[Any]) -> None:
        """Allow it: where a model computes what it gives to a layer, the layer's load is refused."""

    @override
    def _note_write(self, func: Any, args: Sequence[Any], written: Sequence[Tensor]) -> None:
        if len(args) > 1 and _are_same(args[0], args[1]):
            return  # at the end of a layer's load each of its tensors is copied to where it serves
        try:
            super()._note_write(func, args, written)
        except NotRecordable as error:  # raised here it would end a load that is sound
            self._wrong = error

    @override
    def check_copies(self) -> None:
        if self._wrong is not None:
            raise self._wrong
        super().check_copies()


def _are_same(one: object, other: object) -> bool:
    return (
        isinstance(one, Tensor) and isinstance(other, Tensor) and one.data_ptr() == other.data_ptr()
    )


def _kept_tensors(model: nn.Module) -> nn.Module:
    """Return a module whose buffers are the tensors of a model that a reload never replaces."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

    kept = nn.Module()
    owned = (own for layer in model.modules() for own in (layer._parameters, layer._buffers))
    found = (tensor for own in owned for name, tensor in own.items() if name in SKIP_LOAD_TENSORS)
    unique = {tensor.data_ptr(): tensor for tensor in found if tensor is not None}
    for number, tensor in enumerate(unique.values()):
        kept.register_buffer(f"tensor_{number}", tensor)
    return kept
