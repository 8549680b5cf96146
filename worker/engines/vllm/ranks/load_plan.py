"""vLLM's loads by recorded copies, layer by layer.

vLLM 0.32 calls each loader twice at a load, binds its arguments and wraps the parameters again: 0.2 to 0.35 ms a
tensor, which is seconds for a model with 20,000 tensors of experts. `LoadRecorder` watches one such load, `replay_load`
repeats its copies and lets vLLM process the layers as it does. Layers that vLLM quantises are not recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rollout_worker.engines.shared_memory.copy_plan import (
    COPYING_METHODS,
    CopyList,
    CopyRecorder,
    NotRecordable,
    SourceIndex,
    TensorMemory,
    TensorRows,
    check_method,
    have_same_bytes,
    make_copies,
    repeat_copies,
    resolve_copies,
    source_names,
)
from rollout_worker.engines.shared_memory.copy_ring import TensorCopy

from .direct_writes import DirectRecorder, replaced_attributes

IN_PLACE_METHODS = COPYING_METHODS - {"UnquantizedFusedMoEMethod"}
"""Those of them that may leave parameters as they were copied."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The copies of one layer.

    Attributes:
        layer: The module.
        copies: What its loaders did.
        in_place: Whether they go into the serving parameters; else vLLM processes the layer after them.
    """

    layer: Any
    copies: CopyList
    in_place: bool


@dataclass(slots=True)
class LoadPlan:
    """All copies of a model's load, by layer in the order in which vLLM finished them."""

    rows: TensorRows
    layers: list[LayerPlan] = field(default_factory=list)

    @property
    def tensor_names(self) -> set[str]:
        """The tensors that this rank needs."""
        return source_names(copy for layer in self.layers for copy in layer.copies.recorded)


class LoadRecorder:
    """Records one load.

    Args:
        rows: The tensors that come.
        model: What they are loaded into.
    """

    def __init__(self, rows: TensorRows, model: nn.Module) -> None:
        self.refusal: str | None = None
        """Why it can't be replayed."""
        self._plan = LoadPlan(rows)
        self._sources = SourceIndex()
        self._model = model

    @property
    def plan(self) -> LoadPlan | None:
        """The recorded load; None if it can't be replayed."""
        return None if self.refusal is not None or not self._plan.layers else self._plan

    @contextlib.contextmanager
    def record_load(
        self, tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Give tensors to load in the block, and record what vLLM does with them."""
        from vllm.model_executor.model_loader.reload import layerwise

        process, load_scales = layerwise._layerwise_process, layerwise._reload_attention_scales

        def refuse_scales(layer: Any, info: Any) -> None:
            self.refusal = f"{type(layer).__name__}: scales of a KV cache are more than copies"
            load_scales(layer, info)

        def record_layer(layer: Any, info: Any) -> None:
            if self.refusal is None:
                try:
                    self._record_layer(layer, info, process)
                except NotRecordable as error:
                    # The layer is loaded again, as if it had not begun.
                    self.refusal = f"{type(layer).__name__}: {error}"
                else:
                    return
            process(layer, info)

        with (
            replaced_attributes(
                layerwise, _layerwise_process=record_layer, _reload_attention_scales=refuse_scales
            ),
            DirectRecorder(self._sources, self._model) as recorder,
        ):
            yield self._sources.track_tensors(tensors)
        self._record_direct(recorder)

    def _record_direct(self, recorder: DirectRecorder) -> None:
        """Record what was copied into tensors that the reload never replaces."""
        try:
            recorder.check_copies()
        except NotRecordable as error:
            self.refusal = self.refusal or str(error)
        if recorder.copies:
            self._plan.layers.append(
                LayerPlan(recorder.owner, CopyList(recorder.copies), in_place=True)
            )

    def _record_layer(self, layer: Any, info: Any, process: Any) -> None:
        """Load a layer as vLLM does, with its loaders watched.

        Raises:
            NotRecordable: It can't be replayed.
        """
        from vllm.model_executor.model_loader.reload import layerwise

        check_method(layer)
        if {name for name, _ in info.loaded_weights} & info.kernel_non_persistent_buffers:
            raise NotRecordable("a buffer that is not saved is loaded")
        layerwise.materialize_layer(layer, info)
        tensors = layerwise.get_layer_tensors(layer)
        for parameter in tensors.values():
            parameter.weight_loader = layerwise._get_original_loader(parameter)
        plain = {name: tensor.data for name, tensor in tensors.items()}
        with CopyRecorder(self._sources, plain) as recorder:
            for name, bound in info.loaded_weights:
                bound.arguments["param"] = parameter = getattr(layer, name)
                parameter.weight_loader(*bound.args, **bound.kwargs)
        recorder.check_copies()
        before = {name: tensor.clone() for name, tensor in plain.items()}
        info.loaded_weights = []  # they are there: what is left is to process the layer
        process(layer, info)
        in_place = _is_as_copied(layer, before)
        self._plan.layers.append(LayerPlan(layer, CopyList(recorder.copies), in_place))


def _is_as_copied(layer: Any, before: Mapping[str, Tensor]) -> bool:
    """Whether a layer serves from what was copied into its parameters, and from nothing made of it."""
    from vllm.model_executor.model_loader.reload import layerwise

    method = getattr(layer, "quant_method", None)
    if method is not None and type(method).__name__ not in IN_PLACE_METHODS:
        return False
    if hasattr(layer, "cpu_linear"):  # a CPU's packed weights
        return False
    now = {name: tensor.data for name, tensor in layerwise.get_layer_tensors(layer).items()}
    return now.keys() == before.keys() and all(
        (tensor.shape, tensor.stride(), tensor.dtype)
        == (now[name].shape, now[name].stride(), now[name].dtype)
        and have_same_bytes(now[name], tensor)
        for name, tensor in before.items()
    )


def replay_load(plan: LoadPlan, runner: Any, memory: TensorMemory) -> None:
    """Load a version by the recorded copies; a failure leaves the model unusable, as in a load by vLLM.

    Args:
        plan: The recorded load of this model.
        runner: vLLM's model runner.
        memory: The version.
    """
    from vllm.model_executor.model_loader.reload import inplace

    model = runner.get_model()

    def load_weights(_: object) -> None:
        # Most layers have one or two small tensors: one call for many of them keeps the ring's threads busy.
        waiting: list[TensorCopy] = []
        for layer in plan.layers:
            if layer.in_place:
                waiting += _resolve_layer(layer, memory)
            else:
                _replay_layer(layer, memory)
        make_copies(waiting, memory)

    # Through vLLM's own method, which also drops whatever is made of the old weights.
    with (
        replaced_attributes(model, load_weights=load_weights),
        replaced_attributes(
            inplace,
            initialize_layerwise_reload=lambda _: None,
            finalize_layerwise_reload=_process_attention,
        ),
        torch.no_grad(),
    ):
        runner.reload_weights(weights_iterator=iter(()))


def _resolve_layer(plan: LayerPlan, memory: TensorMemory) -> list[TensorCopy]:
    from vllm.model_executor.model_loader.reload import layerwise

    return resolve_copies(plan.copies, layerwise.get_layer_tensors(plan.layer), memory)


def _replay_layer(plan: LayerPlan, memory: TensorMemory) -> None:
    """Load a layer that vLLM processes after its copies."""
    from vllm.model_executor.model_loader.reload import layerwise

    layer = plan.layer
    # As `initialize_layerwise_reload` begins a layer, without the wrappers of its loaders.
    info = layerwise.get_layerwise_info(layer)
    info.kernel_tensors = layerwise.get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    layerwise.restore_layer_on_meta(layer, info)
    info.load_numel_total = layerwise.get_layer_size(layer)
    layerwise.materialize_layer(layer, info)
    repeat_copies(plan.copies, layerwise.get_layer_tensors(layer), memory)
    layerwise._layerwise_process(layer, info)


def _process_attention(model: Any, config: Any) -> None:
    """Let attention layers make what they make of other layers' weights, as at the end of a load by vLLM."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            layer.process_weights_after_loading(config.dtype)
