"""A program for vLLM's interpreter: commits to a model that copies into its parameters itself, as those of gpt-oss and GLM-4.5 do.

Prints one JSON object: by commit what serves, a value of each parameter; `refused`: the error of a model that copies into a
quantised layer.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.engine.vllm_loads import forget_load, make_rank, stage_version

SHAPES = {"gate": (2, 3), "correction": (2,), "experts": (2, 3, 3), "sinks": (4,)}
LOST = 777.0
"""What memory has that a sleep at level 2 gave away."""


class QuantisedMethod:
    """Stands for a method of vLLM's that makes something else of parameters."""


class Gate(nn.Module):
    """A router: a matrix, and a bias that vLLM leaves out of the layer's load."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPES["gate"]))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(SHAPES["correction"]))


class Experts(nn.Module):
    """All experts in one parameter."""

    quant_method: object = None

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(SHAPES["experts"]))


class Model(nn.Module):
    """As much of a model as vLLM loads."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.attention = Gate(), Experts(), nn.Module()
        self.attention.sinks = nn.Parameter(torch.zeros(SHAPES["sinks"]))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        mine = dict(self.named_parameters())
        for name, tensor in weights:
            if name == "experts":
                for expert, part in enumerate(tensor):
                    mine["experts.w13_weight"].data[expert].copy_(part)
            elif name == "sinks":
                mine["attention.sinks"].data.copy_(tensor.narrow(0, 0, len(tensor)))
            else:
                own = {"gate": "weight", "correction": "e_score_correction_bias"}[name]
                parameter = mine[f"gate.{own}"]
                load = getattr(parameter, "weight_loader", default_weight_loader)
                load(parameter, tensor)


def main(folder: Path) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    model = Model().requires_grad_(requires_grad=False)
    layerwise.record_metadata_for_reloading(model)
    worker, places = make_rank(model), [each.data_ptr() for each in model.parameters()]

    def commit(value: float) -> list[float]:
        tensors = {
            name: torch.full(shape, value + n) for n, (name, shape) in enumerate(SHAPES.items())
        }
        save_file(tensors, folder / "model.safetensors")
        for each in model.parameters():
            each.data.fill_(LOST)
        worker.rollout_load(stage_version(folder, folder / "staged"))
        assert [each.data_ptr() for each in model.parameters()] == places, "graphs know these"
        values = [set(each.flatten().tolist()) for each in model.parameters()]
        assert all(len(each) == 1 for each in values), "all of a parameter is loaded"
        return [each.pop() for each in values]

    answer: dict[str, Any] = {"recorded": commit(10.0), "planned": worker._rollout_plan is not None}
    answer["repeated"] = commit(20.0)
    rows = [[name, "F32", list(shape)] for name, shape in sorted(SHAPES.items())]
    forget_load(worker, rows)
    answer["vllm's own"] = commit(30.0)
    # As attention is loaded whose scales of the KV cache are in the checkpoint.
    vars(layerwise)["is_deferred_attention_layer"] = lambda layer: layer is model.gate
    vars(model.gate)["process_weights_after_loading"] = lambda _: None
    forget_load(worker, None)
    answer["with scales"] = commit(35.0)
    answer["repeated with scales"] = worker._rollout_plan is not None
    model.experts.quant_method = QuantisedMethod()
    try:
        commit(40.0)
    except RuntimeError as error:
        answer["refused"] = str(error)
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
