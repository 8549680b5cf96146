"""The state of a model under the names and in the shapes of its checkpoint.

Models of transformers 5 fuse the experts of a layer into one tensor; their checkpoints do not.
`save_pretrained` reverts that for the whole state at once. This module does it layer by layer, so that
at most one layer's experts are in memory twice.
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
"""Found in the name of a tensor that fuses the experts of one layer."""


def state_of(tensors: Any) -> Any:
    """Return the state of a model in the form of its checkpoint; anything else unchanged.

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
        # Private, but `save_pretrained` uses it, and nothing public does the same.
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return _unfused_already(state)
    unfused = Unfused(tensors, state, revert_weight_conversion)
    return unfused if unfused.made else state


def whole(tensor: Any) -> Any:
    """Gather a tensor of which each rank has a part: a collective operation of all ranks."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def is_sharded(tensor: Any) -> bool:
    """Whether other ranks have parts of it, as with a DTensor (FSDP, tensor parallel)."""
    return hasattr(tensor, "full_tensor")


def described(state: State) -> Mapping[str, torch.Tensor]:
    """Return tensors with the dtypes and whole shapes of a state, in its order, without gathering any."""
    return state.described if isinstance(state, Unfused) else state


def held(state: State) -> State:
    """Return the tensors from which a state is made."""
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


class Unfused(Mapping[str, Any]):
    """The state as a mapping from names of the checkpoint to tensors.

    Tensors that the model holds in the checkpoint's form are returned as they are; the others are made on
    access, whole. Ranks that have parts of the tensors must take all of them in the same order.

    Args:
        model: The model.
        state: The tensors that it holds.
        revert: `revert_weight_conversion` of transformers.
    """

    def __init__(self, model: Any, state: State, revert: Revert) -> None:
        import torch

        meta = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in state.items()
        }
        reverted = revert(model, dict(meta))
        layers: dict[str, list[str]] = defaultdict(list)
        for name, tensor in meta.items():
            if reverted.get(name) is not tensor:
                layers[layer_of(name)].append(name)
        made = {}
        for layer, names in layers.items():
            part = revert(model, {name: meta[name] for name in names})
            made.update(dict.fromkeys(part, layer))
        changed = {name for name, tensor in reverted.items() if meta.get(name) is not tensor}
        if made.keys() != changed:  # one conversion needs tensors of several layers
            layers = {"": [name for names in layers.values() for name in names]}
            made = dict.fromkeys(changed, "")
        self.made = made
        """By name of each tensor that the model does not hold: the layer from which it is made."""
        self.held = state
        self.described = {name: reverted[name] for name in sorted(reverted)}
        self._model, self._revert, self._layers = model, revert, layers
        self._last: tuple[str, Mapping[str, Any]] | None = None

    def __getitem__(self, name: str) -> Any:
        layer = self.made.get(name)
        if layer is None:
            return self.held[name]
        if self._last is None or self._last[0] != layer:
            self._last = None  # before the next layer is made, or two would be in memory
            parts = {part: whole(self.held[part]) for part in self._layers[layer]}
            self._last = layer, self._revert(self._model, parts)
        return self._last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)
