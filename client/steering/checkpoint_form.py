"""The state of a model under the names and in the shapes of its checkpoint.

Models of transformers 5 hold some tensors otherwise than their checkpoints do: the experts of a layer are fused into
one. `save_pretrained` reverts that for the whole state at once; here it is done layer by layer, so that no
more than one layer's experts are there twice.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rollout_common.transfer.layout import LayoutError, layer_of

if TYPE_CHECKING:
    import torch

State = Mapping[str, Any]
Revert = Callable[[Any, dict[str, Any]], dict[str, Any]]

_FUSED = re.compile(r"\.experts\.[a-z]")
"""In a name of the experts of one layer, all in one tensor."""


def state_of(tensors: Any) -> Any:
    """Return the state of a model in the form of its checkpoint; what is no model, as it is.

    Raises:
        LayoutError: Its experts are fused, and this release of transformers can't revert that.
    """
    if not hasattr(tensors, "state_dict"):
        return tensors
    state: State = tensors.state_dict()
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(tensors, modeling.PreTrainedModel):
        return state
    try:
        # No public name: what `save_pretrained` uses.
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return _unfused_already(state)
    return _reverted(tensors, state, revert_weight_conversion)


def whole(tensor: Any) -> Any:
    """Return a tensor that all ranks have parts of as one: a collective operation of all of them."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def is_sharded(tensor: Any) -> bool:
    """Whether other ranks have parts of it, as of a DTensor (FSDP, tensor parallel)."""
    return hasattr(tensor, "full_tensor")


def described(state: State) -> Mapping[str, torch.Tensor]:
    """Return tensors of the dtypes and (whole) shapes of a state, in its order; making them costs nothing."""
    return state.described if isinstance(state, Unfused) else state


def held(state: State) -> State:
    """Return the tensors of which a state is made."""
    return state.held if isinstance(state, Unfused) else state


def _unfused_already(state: State) -> State:
    import transformers

    if fused := next(filter(_FUSED.search, state), None):
        raise LayoutError(
            f"tensor {fused!r} has the experts of a layer in one, and transformers {transformers.__version__} has no"
            " revert_weight_conversion to write them as its checkpoint does: give a state dict with the names of the"
            " checkpoint, or use transformers 5.16 to 5.19",
            tensor=fused,
        )
    return state


def _reverted(model: Any, state: State, revert: Revert) -> State:
    import torch

    meta = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in state.items()
    }
    reverted = revert(model, dict(meta))
    if all(meta.get(name) is tensor for name, tensor in reverted.items()):
        return state
    layers: dict[str, list[str]] = defaultdict(list)
    for name, tensor in meta.items():
        if reverted.get(name) is not tensor:
            layers[layer_of(name)].append(name)
    made = {}
    for layer, names in layers.items():
        part = revert(model, {name: meta[name] for name in names})
        made.update(dict.fromkeys(part, layer))
    changed = {name for name, tensor in reverted.items() if meta.get(name) is not tensor}
    if made.keys() != changed:  # what is converted together lies in several layers
        layers = {"": [name for names in layers.values() for name in names]}
        made = dict.fromkeys(changed, "")
    return Unfused(model, state, revert, reverted, made, layers)


class Unfused(Mapping[str, Any]):
    """The state as a mapping from names of the checkpoint to tensors.

    What its checkpoint has as well is given as it is held; the rest is made when it is asked for, whole.

    Ranks that have parts of the tensors take all of them in the same order.

    Args:
        model: Whose state it is.
        state: The tensors that it holds.
        revert: Of transformers.
        reverted: What it comes to, without memory.
        made: By name of what is not held: the layer of which it is made.
        layers: By layer: the tensors that it holds instead.
    """

    def __init__(
        self,
        model: Any,
        state: State,
        revert: Revert,
        reverted: Mapping[str, torch.Tensor],
        made: Mapping[str, str],
        layers: Mapping[str, list[str]],
    ) -> None:
        self.held = state
        self.described = {name: reverted[name] for name in sorted(reverted)}
        self.made = made
        self._model, self._revert, self._layers = model, revert, layers
        self._last: tuple[str, Mapping[str, Any]] | None = None

    def __getitem__(self, name: str) -> Any:
        layer = self.made.get(name)
        if layer is None:
            return self.held[name]
        if self._last is None or self._last[0] != layer:
            self._last = None  # first: two layers would be there at once
            parts = {part: whole(self.held[part]) for part in self._layers[layer]}
            self._last = layer, self._revert(self._model, parts)
        return self._last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)
