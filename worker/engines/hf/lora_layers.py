"""LoRA adapters in a transformers model: each token of a pass gets what its own request's adapter adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollout_common.transfer.layout import TORCH_NAMES
from rollout_worker.engine import EngineError, WeightsRejected
from rollout_worker.lora.lora_sink import LoraAdapter, LoraTensor


@dataclass(frozen=True, slots=True, eq=False)
class HfAdapter:
    """One adapter on the model's device: by module, A [r, in] and B [out, r]."""

    name: str
    scaling: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]


AdapterSegment = tuple[int, int, HfAdapter]
"""The tokens [begin, end) of a pass, and the adapter of their requests."""


class LoraLayers:
    """The linear layers of a model's decoder that adapters may change."""

    def __init__(self, model: Any) -> None:
        self._device = model.device
        self.segments: Sequence[AdapterSegment] = ()
        """Of the pass that runs."""
        self._hooked: set[str] = set()
        # Experts see some tokens of a pass, in an order of their own, and a vision tower sees none.
        decoder = model.get_decoder()
        known = {id(module) for _, module in decoder.named_modules()}
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if id(module) in known and isinstance(module, nn.Linear) and ".experts." not in name
        }

    def load_adapters(self, adapters: Sequence[LoraAdapter]) -> dict[str, HfAdapter]:
        """Copy adapters to the model's device; runs in a thread, next to steps.

        Raises:
            WeightsRejected: A module is not one of these layers.
            EngineError: The device has no memory for them.
        """
        for adapter in adapters:
            unknown = next((name for name in adapter.pairs if name not in self._layers), None)
            if unknown is not None:
                raise WeightsRejected(
                    f"adapter {adapter.name!r} changes {unknown!r}: the hf engine adds adapters to the linear layers of"
                    " the decoder, experts and vision towers excluded; merge it into the weights"
                )
        try:
            return {each.name: self._copy_adapter(each) for each in adapters}
        except torch.OutOfMemoryError as error:
            raise EngineError(f"no memory on {self._device} for the adapters: {error}") from error

    def unload_adapters(self, loaded: Mapping[str, HfAdapter]) -> None:
        """Do nothing: their memory goes with the last request that has one."""

    def _copy_adapter(self, adapter: LoraAdapter) -> HfAdapter:
        pairs = {
            name: (self._copy_tensor(a), self._copy_tensor(b))
            for name, (a, b) in adapter.pairs.items()
        }
        return HfAdapter(adapter.name, adapter.config.scaling, pairs)

    def _copy_tensor(self, half: LoraTensor) -> Tensor:
        flat = torch.frombuffer(half.content, dtype=getattr(torch, TORCH_NAMES[half.spec.dtype]))
        return flat.reshape(half.spec.shape).to(self._device, copy=True)

    def prepare_layers(self, adapters: Mapping[str, HfAdapter]) -> None:
        """Have the layers of these adapters add to their outputs; call it between steps."""
        for name in {name for each in adapters.values() for name in each.pairs} - self._hooked:
            self._hooked.add(name)
            self._layers[name].register_forward_hook(
                lambda _, inputs, output, name=name: self._add_parts(name, inputs[0], output)
            )

    def _add_parts(self, name: str, given: Tensor, output: Tensor) -> Tensor:
        """Return the output of a layer with what adapters add, in the order of PEFT's arithmetic.

        It is [1, N, out], or [N, out] where a model flattens its tokens, as for experts that all of them pass.
        """
        if not self.segments:
            return output
        output = output.clone(memory_format=torch.contiguous_format)
        inputs, outputs = given.reshape(-1, given.shape[-1]), output.view(-1, output.shape[-1])
        for begin, end, adapter in self.segments:
            pair = adapter.pairs.get(name)
            if pair is not None:
                a, b = pair
                part = inputs[begin:end].to(a.dtype) @ a.T @ b.T * adapter.scaling
                outputs[begin:end] += part.to(output.dtype)
        return output


def find_segments(lengths: Sequence[tuple[int, HfAdapter | None]]) -> list[AdapterSegment]:
    """Return the segments of a pass from (number of tokens, adapter) of its parts, in order."""
    found: list[AdapterSegment] = []
    at = 0
    for count, adapter in lengths:
        if adapter is not None:
            if found and found[-1][1] == at and found[-1][2] is adapter:
                found[-1] = (found[-1][0], at + count, adapter)
            else:
                found.append((at, at + count, adapter))
        at += count
    return found
