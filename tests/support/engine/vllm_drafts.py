"""A program for vLLM's interpreter: commits to a target whose embedding its EAGLE draft shares, by vLLM's own loads.

Prints one JSON object: by commit, a value of the `target`'s embedding and one of the `draft`'s own layer.
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

from tests.support.engine.vllm_loads import make_rank, stage_version


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 2)
        self.fc = nn.Linear(2, 2, bias=False)


class Model(nn.Module):
    """As much of a model as vLLM loads."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        from vllm.model_executor.models.utils import AutoWeightsLoader

        return AutoWeightsLoader(self).load_weights(weights)


def make_version(value: float, drafted: float | None) -> dict[str, Tensor]:
    """Return a version whose target is `value` everywhere; `drafted`: what its draft is, None without."""

    def tensors(prefix: str, filled: float) -> dict[str, Tensor]:
        shapes = {"model.embed_tokens.weight": (4, 2), "model.fc.weight": (2, 2)}
        return {prefix + name: torch.full(shape, filled) for name, shape in shapes.items()}

    return tensors("", value) | ({} if drafted is None else tensors("draft/", drafted))


def main(folder: Path) -> None:
    from vllm.config import utils
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import _should_share

    vars(utils)["replace"] = lambda config, **_: config  # ours is no dataclass
    target, draft = Model(), Model()
    for model in (target, draft):
        layerwise.record_metadata_for_reloading(model)
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    vars(draft)["has_own_embed_tokens"] = True
    assert _should_share(
        draft, "has_own_embed_tokens", draft.model.embed_tokens, target.model.embed_tokens
    )
    draft.model.embed_tokens = target.model.embed_tokens  # as vLLM does then
    worker, found = make_rank(target, draft), {}
    commits = {"loaded": (7.0, 3.0), "without": (8.0, None), "repeated": (9.0, 4.0)}
    for name, values in commits.items():
        save_file(make_version(*values), folder / "model.safetensors")
        worker.rollout_load(stage_version(folder, folder / "staged"))
        served = (target.model.embed_tokens.weight, draft.model.fc.weight)
        found[name] = [float(each.detach()[0, 0]) for each in served]
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
