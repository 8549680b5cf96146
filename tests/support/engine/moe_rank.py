"""One of two ranks that publish a model with fused experts, which FSDP has cut."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeForCausalLM
from transformers.utils import logging

from rollout_client import RolloutPool


def main(rank: int, ranks: int, folder: Path, story: str) -> None:
    """Write the root hash to `root-RANK`; `story` is JSON: model, url, control."""
    told: dict[str, Any] = json.loads(story)
    where = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    logging.disable_progress_bar()
    model: Any = Qwen3MoeForCausalLM.from_pretrained(told["model"])
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with RolloutPool.from_urls([told["url"]], control_urls=[told["control"]]) as pool:
        if rank == 0:
            pool.acquire()
        done = pool.publish_weights(1, tensors=model, ranks=distributed.group.WORLD)
    (folder / f"root-{rank}").write_text(str(done.root_hash))
    os._exit(0)
