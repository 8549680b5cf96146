"""One of two ranks that publish a checkpoint, and then what differs from it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rollout_client import DirectOptions, RolloutPool


def main(rank: int, ranks: int, folder: Path, story: str) -> None:
    """Write the reports to `report-RANK`; `story` is JSON: ports, token, weights, versions, transport."""
    told = json.loads(story)
    where = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    tensors = load_file(Path(told["weights"]) / "model.safetensors")
    direct = DirectOptions(token=lambda: str(told["token"]), in_flight="Abort")
    reports = []
    with RolloutPool.from_urls(**told["ports"], direct=direct) as pool:
        for version in told["versions"]:
            shards = {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in tensors.items()}
            done = pool.publish_weights(
                version,
                tensors=shards,
                transport=told["transport"],
                ranks=distributed.group.WORLD,
            )
            assert done.report is not None
            reports.append(
                {**asdict(done.report), "deltas": done.report.deltas, "root": done.root_hash}
            )
            for tensor in tensors.values():
                tensor.view(-1)[::500] *= -1
    (folder / f"report-{rank}").write_text(json.dumps(reports))
    os._exit(0)
